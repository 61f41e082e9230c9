"""The script `nasfast`, which `python -m nasfast` does too; torchrun starts this module."""

import sys

from nasfast import extensions


def main() -> int:
    """Run a command and return the exit status."""
    try:
        extensions.load("nasfast.cli.flags")  # imports what the command line needs
        run = extensions.load("nasfast.cli.main:main")
    except ModuleNotFoundError as error:
        sys.exit(f"nasfast: {error}")
    return run()


if __name__ == "__main__":
    sys.exit(main())
