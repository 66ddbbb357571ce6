"""The command line: answers go to stdout, progress, notes and errors to stderr."""
