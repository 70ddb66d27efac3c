"""Where the command's process begins. Nothing is imported before Ctrl-C is seen to."""

import sys

from dspark_jax.commands.early_interrupt import begin


def entry() -> int:
    """The command `dspark`. Returns the exit status."""
    begin()
    from dspark_jax.commands import main

    return main.entry()


if __name__ == "__main__":
    sys.exit(entry())
