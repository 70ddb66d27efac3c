"""`dspark train text | main | drafter`: the text, a small main model, and a drafter for any main
model.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from typing import Any

from dspark_jax.commands import train_drafter, train_main
from dspark_jax.errors import DsparkError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `train` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a drafter for any main model, or a small main model",
        description=(
            "Trains a drafter for any main model (drafter), or a small main model from nothing "
            "(main) and the text for it (text). A run that was stopped goes on when the command is "
            "repeated, with the numbers that it would have had. It needs the extra `train`: pip "
            "install 'dspark-jax[train]'."
        ),
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    for module in (train_drafter, train_main):
        module.add_parsers(stages)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. args.start(args, command) does the work; command: as it was typed,
    for the README.
    """
    if importlib.util.find_spec("optax") is None:
        raise DsparkError(
            "training needs optax, which is not installed: pip install 'dspark-jax[train]'"
        )
    try:
        args.start(args, shlex.join(["dspark", *args.argv]))
    except KeyboardInterrupt:
        print(
            f"dspark train {args.stage}: stopped; the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    return 0
