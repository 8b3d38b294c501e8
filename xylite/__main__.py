"""`python -m xylite`, the same as the `xylite` command."""

import sys

from xylite.cli import main

if __name__ == "__main__":
    sys.exit(main())
