"""Configuration for other trainers: one file a trainer, each made of a recommendation alone, none imports what it configures."""
