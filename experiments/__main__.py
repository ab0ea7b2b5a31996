"""The command line, in a checkout."""

import sys

from _svb_jax_command import main

if __name__ == "__main__":
    sys.exit(main())
