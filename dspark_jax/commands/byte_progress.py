"""How far long work on files is: a bar on a terminal, else lines; and Ctrl-C between units."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dspark_jax.commands.output import error_console, on_terminal
from dspark_jax.runtime.interrupts import watch_interrupts

LINE_SECONDS = 10.0  # between progress lines where there is no terminal


@contextlib.contextmanager
def interruptible(progress: ByteProgress) -> Iterator[Callable[[int, int], None]]:
    """`progress`, shown; after Ctrl-C its next call, which comes between units, raises
    KeyboardInterrupt if nothing did before.
    """
    with watch_interrupts(at_once=False) as interrupt, progress:

        def checked(done: int, total: int) -> None:
            if interrupt.seen:
                raise KeyboardInterrupt
            progress(done, total)

        yield checked


class ByteProgress:
    """Bytes, speed and time left: a bar on a terminal, else a line every few seconds. Called with
    (bytes done, bytes in all).
    """

    def __init__(self, verb: str, quiet: bool):
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.verb, self.quiet = verb, quiet
        self.bar = Progress(
            TextColumn(verb),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=error_console(),
            disable=quiet or not on_terminal(),
        )
        self.lines = not quiet and not on_terminal()
        self.task, self.began, self.shown = None, None, 0.0

    def __enter__(self) -> ByteProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.began is None:  # what an earlier run did says nothing about this one's speed
            self.began, self.task = (
                (now, done),
                self.bar.add_task(self.verb, total=total, completed=done),
            )
        self.bar.update(self.task, completed=done)
        if self.lines and (done == total or now - self.shown >= LINE_SECONDS):
            self.shown = now
            print(self._line(done, total, now), file=sys.stderr)

    def _line(self, done: int, total: int, now: float) -> str:
        unit, size = ("GB", 1e9) if total >= 1e8 else ("MB", 1e6)
        text = f"{self.verb} {done / size:.2f} of {total / size:.2f} {unit}"
        elapsed, moved = now - self.began[0], done - self.began[1]
        if moved and done < total:
            minutes, seconds = divmod(round((total - done) * elapsed / moved), 60)
            text += f", {moved / elapsed / 1e6:.0f} MB/s, {minutes}:{seconds:02d} left"
        return text
