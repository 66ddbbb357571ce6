"""Control plane: the reference trainer's closed form, bundled traces and published settings.

Its row in memory/trainers.py alone imports this folder.
"""
