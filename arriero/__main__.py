"""`python -m arriero` is the `arriero` command."""

import sys

from arriero.launchers.cli import main

if __name__ == "__main__":
    sys.exit(main())
