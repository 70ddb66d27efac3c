"""Ctrl-C that is not lost."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator


@dataclasses.dataclass
class Interrupt:
    """seen: whether Ctrl-C was pressed."""

    seen: bool = False


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Within it Ctrl-C waits: KeyboardInterrupt is raised when it ends.

    For calls into the compiler and the runtime. An exception raised amid these is dropped, or ends
    the process with a segmentation fault.
    """
    with watch_interrupts(at_once=False) as interrupt:
        yield
    if interrupt.seen:
        raise KeyboardInterrupt


@contextlib.contextmanager
def watch_interrupts(at_once: bool = True) -> Iterator[Interrupt]:
    """Within it Ctrl-C is remembered: what runs looks at `seen` between its steps.

    at_once: it raises KeyboardInterrupt too, as always; it is remembered because Python drops an
      exception that is raised within a callback of the runtime. False: it raises nothing, so that
      the step in hand is finished first.
    Changes nothing outside the main thread, nor where the signal is ignored, as under nohup, nor
    where the program has a handler that does not raise KeyboardInterrupt.
    """
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)

    def remember(number, frame):
        try:
            before(number, frame)
        except KeyboardInterrupt:
            interrupt.seen = True
            if at_once:
                raise

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupt
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
