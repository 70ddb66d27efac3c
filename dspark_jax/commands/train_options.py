"""What both kinds of training are asked: where, how much, on how many devices."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from dspark_jax.commands.arguments import require_positive
from dspark_jax.errors import ConfigError


def add_shared(parser: argparse.ArgumentParser, rows: str, **defaults: Any) -> None:
    """The options that both kinds of training have. rows: what they are. defaults: those that
    differ.
    """
    add = parser.add_argument
    add(
        "--run",
        dest="run_folder",  # args.run is what a command does
        metavar="DIR",
        help="folder for the text, states and log, which a repeated command goes on from (default: "
        "OUT with -run appended)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of everything random (default 0)")
    add(
        "--steps",
        type=int,
        default=defaults["steps"],
        metavar="N",
        help="steps of the optimiser (default %(default)s)",
    )
    add("--rows", type=int, default=8, metavar="N", help=f"{rows} a step (default %(default)s)")
    add(
        "--length",
        type=int,
        default=256,
        metavar="N",
        help="tokens of each (default %(default)s)",
    )
    add(
        "--muon-rate",
        type=float,
        default=1e-2,
        metavar="X",
        help="peak learning rate of matrices, a step (default %(default)s)",
    )
    add(
        "--adam-rate",
        type=float,
        default=3e-3,
        metavar="X",
        help="peak learning rate of everything else, a step (default %(default)s)",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help="devices that share the rows of a step and must divide them (default: as many as do, "
        "of the cores of a CPU or of all accelerators)",
    )
    add(
        "--save-every",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="between states that are kept (default %(default)g)",
    )


def run_folder(args: argparse.Namespace) -> Path:
    """What --run says."""
    from dspark_jax.checkpoints.paths import expanded

    out = expanded(args.out)
    return expanded(args.run_folder) if args.run_folder else out.with_name(f"{out.name}-run")


def devices(args: argparse.Namespace) -> int:
    """How many devices share a step. A CPU is cut into as many as are wanted."""
    rows = args.rows
    for flag, number in (("--rows", rows), ("--devices", args.devices)):
        if number is not None:
            require_positive(flag, number)
    import jax

    from dspark_jax.runtime.backend import require_device

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        jax.config.update("jax_num_cpu_devices", args.devices or _largest_divisor(rows, cores))
    except RuntimeError:  # a device was used already: there are as many as there are
        pass
    require_device()
    there = jax.device_count()
    if args.devices is None:
        return _largest_divisor(rows, there)
    if args.devices > there:
        raise ConfigError(f"--devices {args.devices}: there are {there}")
    return args.devices


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
