"""Progress on the terminal: a bar for every part of a training run, and a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 10  # of a training stage, besides its bar
SMOOTHING = 0.95  # of the figures that are shown

console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(text)


@contextlib.contextmanager
def bar(name: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """move(by, text) of a bar with `total` things to do, `text` beside it."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(name, total=total, completed=done, shown="compiling")
        yield lambda by, text: progress.update(task, advance=by, shown=text)


class Smooth:
    """Measures averaged over the last steps, as many as there are at first."""

    def __init__(self):
        self._sums, self._weight = {}, 0.0

    def add(self, measures: dict) -> dict:
        """-> the averages with these."""
        self._weight = self._weight * SMOOTHING + 1 - SMOOTHING
        for name, value in measures.items():
            self._sums[name] = self._sums.get(name, 0.0) * SMOOTHING + value * (1 - SMOOTHING)
        return {name: value / self._weight for name, value in self._sums.items()}


class Clock:
    """Seconds since the last call."""

    def __init__(self):
        self._last = time.monotonic()

    def __call__(self) -> float:
        last, self._last = self._last, time.monotonic()
        return self._last - last


def is_line(step: int, steps: int) -> bool:
    """Whether a stage of `steps` says a line at this one."""
    return step % max(1, steps // LINES) == 0 or step == steps
