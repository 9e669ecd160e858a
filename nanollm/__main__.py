"""`python -m nanollm`: the command line."""

import sys

from nanollm.cli import main

if __name__ == "__main__":
    sys.exit(main())
