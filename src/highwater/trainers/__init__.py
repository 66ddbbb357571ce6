"""Configuration for other trainers, one file each, made of a recommendation alone.

None imports what it configures.
"""
