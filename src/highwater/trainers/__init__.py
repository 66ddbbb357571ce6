"""Other trainers, one file each: their configuration from a recommendation, trials and memory.

No file imports the trainer that it configures.
"""
