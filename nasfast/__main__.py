"""`python -m nasfast ...` does the same as `nasfast ...`; torchrun starts this module."""

import sys

from nasfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
