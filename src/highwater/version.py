"""The package's version, also for a source tree that is not installed.

It has a file of its own, so that every layer may import it.
"""

__version__ = "0.1.0.dev0"
