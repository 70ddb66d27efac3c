"""`dspark convert SOURCE TARGET`: an official checkpoint to sharded Orbax
(checkpoints/orbax_io.py); `--verify` checks one.
"""

from __future__ import annotations

import argparse
from typing import Any

from dspark_jax.commands.byte_progress import ByteProgress, interruptible
from dspark_jax.commands.together import add_options, command_mesh, run_command, several_asked_for
from dspark_jax.errors import ConfigError


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

    with interruptible(
        ByteProgress("verified" if args.verify else "converted", args.quiet or not prints)
    ) as progress:
        if args.verify:
            count = verify(args.paths[0], progress)
        else:
            convert_checkpoint(*args.paths, mesh=command_mesh(args.mesh), progress=progress)
    if args.verify:
        print(f"{args.paths[0]}: {count:,} bytes as recorded when they were converted")
    return 0
