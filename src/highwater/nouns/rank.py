"""What a rank's process is told through its environment.

RANK, LOCAL_RANK and WORLD_SIZE, beside it, are torch's own names.
"""

STORE_VARIABLE = "HIGHWATER_STORE"
"""Path of the file through which the ranks of one trial meet.

It is new for every trial, in a folder that only its user can read, and nobody has to listen on a
port for it (docs/decisions/027).
"""
