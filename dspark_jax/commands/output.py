"""Standard output and standard error of the command: what may be wrong with them is one line."""

from __future__ import annotations

import os
import sys


def guard_streams() -> None:
    """For the command's own process, before anything is printed or opened.

    Characters that the terminal's encoding lacks are replaced. A closed descriptor (`2>&-`) becomes
    the null device, else the next file that is opened would take its number, and what is printed
    would go there or to standard output.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def finish_output() -> None:
    """Writes out what is held back. Raises OSError where that cannot be done."""
    sys.stdout.flush()


def give_up_output() -> None:
    """Keeps the interpreter from complaining, when it ends, of output that cannot be written."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor, in tests
        pass
