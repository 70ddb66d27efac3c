"""Ctrl-C while modules are imported: it ends the process at once.

An exception that is raised while a native module sets itself up ends in a traceback or an abort.
"""

import os
import signal


def leave(number, frame) -> None:
    """The handler of SIGINT until `ready`."""
    os.write(2, b"dspark: interrupted\n")
    os._exit(130)


def begin() -> None:
    """Installs it, unless SIGINT is ignored, as under nohup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def ready() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def over() -> None:
    """All is said and done: Ctrl-C while the interpreter shuts down would change the status."""
    if signal.getsignal(signal.SIGINT) in (leave, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
