"""`dspark convert SOURCE TARGET`: an official checkpoint to sharded Orbax
(checkpoints/orbax_io.py); `--verify` checks one.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dspark_jax.commands.output import error_console, on_terminal
from dspark_jax.commands.together import add_options, command_mesh, run_command, several_asked_for
from dspark_jax.errors import ConfigError
from dspark_jax.runtime.interrupts import watch_interrupts

LINE_SECONDS = 10.0  # between progress lines where there is no terminal


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `convert` to the command line."""
    parser = subparsers.add_parser(
        "convert",
        help="official checkpoint to sharded Orbax, resumable; --verify checks the result",
        description=(
            "Converts an official checkpoint directory to sharded Orbax, which any mesh can "
            "load. Routed experts stay packed FP4, dense weights become bfloat16 (exact). A "
            "conversion that was stopped goes on when the command is repeated. Processes that "
            "run together need SOURCE and TARGET on a file system that they share. With "
            "--verify, TARGET alone is given: its arrays, config and tokenizer are compared with "
            "the checksums of what was converted."
        ),
    )
    parser.add_argument(
        "paths",
        metavar="SOURCE TARGET",
        nargs="+",
        help="official checkpoint directory; directory to write",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read a converted checkpoint and compare checksums"
    )
    parser.add_argument(
        "--mesh",
        metavar="DATAxMODEL",
        help="devices that share the work (default: one; with several processes 1xALL)",
    )
    add_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """`dspark convert`. Returns the exit status."""
    if len(args.paths) != (1 if args.verify else 2):
        raise ConfigError("give SOURCE and TARGET, or --verify and TARGET")
    if args.verify and several_asked_for(args):
        raise ConfigError("--verify is the work of one process; leave --coordinator out")
    return run_command(args, _run)


def _run(args: argparse.Namespace, prints: bool) -> int:
    from dspark_jax.checkpoints.convert import verify
    from dspark_jax.loading.conversion import convert_checkpoint

    with _interruptible(
        _Progress("verified" if args.verify else "converted", args.quiet or not prints)
    ) as progress:
        if args.verify:
            count = verify(args.paths[0], progress)
        else:
            convert_checkpoint(*args.paths, mesh=command_mesh(args.mesh), progress=progress)
    if args.verify:
        print(f"{args.paths[0]}: {count:,} bytes as recorded when they were converted")
    return 0


@contextlib.contextmanager
def _interruptible(progress: _Progress) -> Iterator[Callable[[int, int], None]]:
    """`progress`, shown; after Ctrl-C its next call, which comes between units, raises
    KeyboardInterrupt if nothing did before.
    """
    with watch_interrupts(at_once=False) as interrupt, progress:

        def checked(done: int, total: int) -> None:
            if interrupt.seen:
                raise KeyboardInterrupt
            progress(done, total)

        yield checked


class _Progress:
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

    def __enter__(self) -> _Progress:
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
        text = f"{self.verb} {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        elapsed, moved = now - self.began[0], done - self.began[1]
        if moved and done < total:
            minutes, seconds = divmod(round((total - done) * elapsed / moved), 60)
            text += f", {moved / elapsed / 1e6:.0f} MB/s, {minutes}:{seconds:02d} left"
        return text
