"""Ctrl-C that cannot get lost."""

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
def watch_interrupts() -> Iterator[Interrupt]:
    """Within it Ctrl-C raises KeyboardInterrupt as always, and is remembered too: within a callback
    of the runtime Python drops the exception. Changes nothing outside the main thread, nor where
    the signal is ignored, as by nohup.
    """
    interrupt = Interrupt()

    def notice(number, frame):
        interrupt.seen = True
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupt
        return
    signal.signal(signal.SIGINT, notice)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
