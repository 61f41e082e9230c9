"""`python -m nasfast ...` is `nasfast ...`; what torchrun starts."""

import sys

from nasfast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
