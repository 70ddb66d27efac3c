"""Where the command's process begins. Nothing is imported before Ctrl-C is seen to."""

import sys

from dspark_jax.commands.allocator import settle
from dspark_jax.commands.early_interrupt import begin, over


def entry() -> int:
    """The command `dspark`. Returns the exit status."""
    begin()
    settle(sys.argv[1:])
    from dspark_jax.commands import main

    try:
        return main.entry()
    finally:
        over()


if __name__ == "__main__":
    sys.exit(entry())
