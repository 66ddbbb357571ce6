"""The package's version, for a source tree that is not installed too. Of its own, so that every layer may import it."""

__version__ = "0.1.0.dev0"
