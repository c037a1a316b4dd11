"""`python -m fedrec` is the `fedrec` command."""

import sys

from fedrec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
