"""`python -m jradix` is the command `jradix`."""

import sys

from jradix.cli import main

if __name__ == "__main__":
    sys.exit(main())
