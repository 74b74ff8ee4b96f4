"""`python -m mpizero` is the command `mpizero`."""

import sys

from mpizero.cli import main

if __name__ == "__main__":
    sys.exit(main())
