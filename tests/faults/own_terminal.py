"""Runs ``highwater`` on the terminal that it reads from, as that of its session."""

import fcntl
import sys
import termios

from highwater.cli.app import main

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
