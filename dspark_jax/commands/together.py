"""Commands that several processes can run together: their options, joining, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from dspark_jax.errors import ConfigError, DsparkError, PromptError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that several processes can run together."""
    add = parser.add_argument
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="run together with other processes, started alike: the address of process 0, "
        "or `auto` for what the cluster says; process 0 prints",
    )
    add("--process-id", type=int, metavar="I", help="number of this process, from 0")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")


def several_asked_for(args: argparse.Namespace) -> bool:
    """Whether the options of `add_options` ask for several processes."""
    options = args.coordinator, args.process_id, args.num_processes
    return any(option is not None for option in options)


def run_command(args: argparse.Namespace, work: Callable[[argparse.Namespace, bool], int]) -> int:
    """work(args, prints) in one process or, where the options ask for several, after joining them.
    Returns the exit status.

    prints: whether this is the process that prints results, which is number 0.
    """
    if not several_asked_for(args):
        return work(args, True)
    import jax

    from dspark_jax.runtime import processes

    joining = (
        None if args.coordinator == "auto" else args.coordinator,
        args.process_id,
        args.num_processes,
    )
    processes.check_arguments(*joining)
    processes.keep_stdout()
    processes.initialize(*joining)
    try:
        return work(args, jax.process_index() == 0)
    except DsparkError as error:
        print(f"dspark {args.command}: {error}", file=sys.stderr)
        processes.leave(2 if isinstance(error, (ConfigError, PromptError)) else 1)


def command_mesh(text: str | None):
    """The mesh that a command's option names, such as "1x4". Without it: None, one device; with
    several processes 1xALL.

    Raises ConfigError for a mesh that cannot be, or in which a process has no device.
    """
    import jax

    from dspark_jax.runtime.backend import require_device
    from dspark_jax.runtime.sharding import check_processes, make_mesh, parse_mesh

    require_device()
    if text is None and jax.process_count() == 1:
        return None
    mesh = make_mesh(*((1, jax.device_count()) if text is None else parse_mesh(text)))
    check_processes(mesh)
    return mesh
