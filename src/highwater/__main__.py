"""``python -m highwater``: the same command."""

import sys

from highwater.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
