"""The command line, in a checkout."""

import sys

from svb_jax.experiments.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
