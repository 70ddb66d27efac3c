"""`python -m dspark_jax` is the command `dspark`."""

import sys

from dspark_jax.commands.start import entry

if __name__ == "__main__":
    sys.exit(entry())
