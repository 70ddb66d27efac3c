"""Standard output and standard error of the command: what may be wrong with them is one line; what
goes on meanwhile is shown on a terminal only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator


def guard_streams() -> None:
    """For the command's own process, before anything is printed or opened.

    Characters that the terminal's encoding lacks are replaced. A closed descriptor (`2>&-`) becomes
    the null device, else the next file that is opened would take its number, and what is printed
    would go there or to standard output. What cannot be written to standard error is lost, and
    nothing else: a full disk there does not end a run.
    """
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if hasattr(sys.stderr, "buffer"):
        sys.stderr = _Lossy(sys.stderr)


class _Lossy(io.TextIOWrapper):
    """A text stream in another's place that drops what it cannot write, and replaces characters
    that the encoding lacks.
    """

    def __init__(self, stream):
        super().__init__(
            stream.buffer, stream.encoding, "replace", line_buffering=True, write_through=True
        )
        self.replaced = stream  # it would close the buffer when it goes

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def finish_output() -> None:
    """Writes out what is held back. Raises OSError where that cannot be done."""
    sys.stdout.flush()


def give_up_output() -> None:
    """Keeps the interpreter from complaining, when it ends, of output that cannot be written."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor, in tests
        pass


def print_json(value) -> None:
    """One object, on one line."""
    print(json.dumps(value, allow_nan=False))


def on_terminal() -> bool:
    """Whether standard error is a terminal. Rich may be told otherwise (FORCE_COLOR)."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def status(text: str, shown: bool = True) -> Iterator[None]:
    """Says on a terminal what goes on within it; nothing of it stays, where that is possible."""
    if not (shown and on_terminal()):
        yield
        return
    from rich.text import Text

    console = error_console()
    if console.is_dumb_terminal:  # one that cannot take back what it shows
        console.print(text)
        yield
        return
    with console.status(Text(text)):  # a str would be read as markup
        yield


@contextlib.contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """advance() of a bar on a terminal, which moves it on by one; nothing of it stays. A terminal
    that cannot draw one shows the text.
    """
    if not on_terminal() or error_console().is_dumb_terminal:
        with status(f"{text} ..."):
            yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def error_console():
    """Standard error as rich writes it. Brackets and colons in a text are what they are."""
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False)
