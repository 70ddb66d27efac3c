"""`dspark plan`: what a model needs on given devices, and with --compile what the compiler says
about it.
"""

from __future__ import annotations

import argparse
import math
import os
import re

from dspark_jax.checkpoints.paths import expanded
from dspark_jax.commands.output import print_json, status
from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.errors import ConfigError

GB, GIB = 1e9, 2**30

# A shape, with as many dimensions as every shape of its kind. Of one device, from the makers' data
# sheets: memory in bytes, bandwidth in bytes/s.
TPUS = {
    "v5e": ("2x4", 16 * GB, 819e9),
    "v5p": ("2x2x1", 95 * GB, 2765e9),
    "v6e": ("2x4", 32 * GB, 1640e9),
}
_DEFAULT_TOPOLOGY = "v5p:2x2x1"
_UNITS = {"GB": GB, "GiB": GIB, "TB": 1e12, "TiB": 2**40}


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plan",
        help="memory and speed of a model on given devices, before having them",
        description=(
            "Bytes per device by part, the longest context and the most streams that fit, and an "
            "estimate of tokens per second from memory bandwidth. No weights are needed. Exit "
            "status 1 when it does not fit."
        ),
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="DIR",
        help="checkpoint directory or config.json (default: DeepSeek-V4-Flash-0731)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--topology",
        metavar="NAME",
        help=f"TPU topology, v5e, v5p or v6e with its shape (default {_DEFAULT_TOPOLOGY})",
    )
    where.add_argument(
        "--devices", type=int, metavar="N", help="number of devices; give --memory too"
    )
    add(
        "--memory",
        metavar="SIZE",
        help="with --devices: memory of one device, such as 141GB or 80GiB",
    )
    add(
        "--bandwidth",
        metavar="RATE",
        help=(
            "with --devices, for an estimate of speed: memory bandwidth of one device per "
            "second, such as 4.8TB"
        ),
    )
    add("--mesh", metavar="DATAxMODEL", help="mesh of streams x model parts (default: 1xN)")
    add(
        "--context",
        type=int,
        default=65536,
        metavar="N",
        help="tokens of one stream (default %(default)s)",
    )
    add("--streams", type=int, default=1, metavar="N", help="streams at once (default %(default)s)")
    add(
        "--accepted",
        type=float,
        default=2.5,
        metavar="A",
        help="drafts accepted per round, assumed for the speculative estimate "
        "(default %(default)s)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile a prefill chunk and both speculative rounds for the topology and show the "
        "compiler's memory analysis (extra tpu-aot; minutes)",
    )
    add("--json", action="store_true", help="print one JSON object; sizes in bytes")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    import jax

    from dspark_jax.planning.sizes import make_plan
    from dspark_jax.runtime.sharding import parse_mesh

    jax.config.update(
        "jax_platforms", "cpu"
    )  # shapes need no device, and looking for a TPU that is not here takes time and complains
    config = _config(args.config)
    target = _target(args)
    mesh = (1, target.devices) if args.mesh is None else parse_mesh(args.mesh)
    plan = make_plan(config, target, mesh, args.context, args.streams, args.accepted)
    programs = None
    if args.compile:
        if args.devices is not None:
            raise ConfigError("--compile needs a --topology to compile for")
        programs = _compiled(config, target.name, mesh, args.context, args.streams)
    if args.json:
        print_json(plan.to_dict() | ({"programs": programs} if programs else {}))
    else:
        print(render(plan))
        if programs:
            print(render_programs(programs, plan))
    return 0 if plan.fits else 1


def _compiled(*what) -> dict:
    """compile_programs(*what), one after another, so that a terminal can say which."""
    from dspark_jax.planning import compile as planning

    programs = {}
    for i, name in enumerate(planning.PROGRAMS, 1):
        with status(f"compiling program {i} of {len(planning.PROGRAMS)}: {name} ..."):
            programs |= planning.compile_programs(*what, only=(name,))
    return programs


def _config(path: str | None) -> ModelConfig:
    if path is None:
        return v4_flash_0731()
    file = expanded(path)
    return ModelConfig.from_file(file / "config.json" if os.path.isdir(file) else file)


def _target(args: argparse.Namespace):
    from dspark_jax.planning.sizes import Target

    if args.devices is None:
        target = tpu(_DEFAULT_TOPOLOGY if args.topology is None else args.topology)
        for flag, value in (("--memory", args.memory), ("--bandwidth", args.bandwidth)):
            if value is not None:
                raise ConfigError(
                    f"{flag} goes with --devices; the memory and bandwidth of {target.name} are "
                    "known"
                )
        return target
    if args.memory is None:
        raise ConfigError(
            "--devices needs --memory, the size of one device, such as --memory 141GB"
        )
    bandwidth = None if args.bandwidth is None else _size(args.bandwidth, "--bandwidth")
    return Target(
        f"{args.devices} device{'' if args.devices == 1 else 's'}",
        args.devices,
        _size(args.memory, "--memory"),
        bandwidth,
    )


def tpu(topology: str):
    """ "v5p:2x2x1" -> its Target: devices, with the memory and bandwidth of one."""
    from dspark_jax.planning.sizes import Target

    match = re.fullmatch(r"(v\w+):(\d+(?:x\d+)*)", topology)
    if not match or match[1] not in TPUS:
        raise ConfigError(
            f"--topology {topology!r}: expected one of {', '.join(TPUS)} with its shape, such as "
            "v5p:2x2x1 or v6e:2x4"
        )
    kind, sides = match[1], [int(side) for side in match[2].split("x")]
    shape, memory, bandwidth = TPUS[kind]
    dimensions = shape.count("x") + 1
    if len(sides) != dimensions or min(sides) < 1:
        raise ConfigError(
            f"--topology {topology!r}: {kind} has {dimensions} dimensions of at least 1, such as "
            f"{kind}:{shape}"
        )
    return Target(topology, math.prod(sides), memory, bandwidth)


def _size(text: str, flag: str) -> float:
    match = re.fullmatch(r"([0-9.]+)\s*(GB|GiB|TB|TiB)(?:/s)?", text)
    try:
        size = float(match[1]) * _UNITS[match[2]]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{flag} {text!r}: expected a number with one of the units {', '.join(_UNITS)}"
        ) from None
    if not 0 < size < math.inf:
        raise ConfigError(f"{flag} {text!r}: must be more than 0 and finite")
    return size


def render(plan) -> str:
    """The table for people; GB are 10^9 bytes."""
    rows = [(name, size) for name, size in plan.parameters.items()]
    rows += [
        (
            f"cache, {_streams(plan)} of {plan.context} tokens",
            plan.total - plan.activations - sum(plan.parameters.values()),
        ),
        ("activations (estimate)", plan.activations),
        ("total", plan.total),
        ("memory of a device", int(plan.target.memory)),
    ]
    lines = [f"{plan.target.name}, mesh {plan.mesh[0]}x{plan.mesh[1]} (data x model), per device:"]
    lines += [f"  {name:44}{size / GB:10.2f} GB" for name, size in rows]
    verdict = (
        "It fits."
        if plan.fits
        else (
            f"It does not fit: {(plan.total - plan.target.memory) / GB:.1f} GB too much on each "
            "device."
        )
    )
    lines += [
        f"{verdict} Longest context with {_streams(plan)}: {plan.longest_context} tokens; most "
        f"streams at {plan.context} tokens: {plan.most_streams}."
    ]
    if plan.speed:
        speed = plan.speed
        lines += [
            "Estimate from memory bandwidth alone, per stream: plain "
            f"{speed['plain_tokens_per_second_per_stream']:.0f} tok/s, speculative "
            f"{speed['speculative_tokens_per_second_per_stream']:.0f} tok/s if "
            f"{speed['assumed_accepted_per_round']:g} drafts are accepted per round",
            f"  plain = bandwidth / {speed['bytes_per_plain_step'] / GB:.2f} GB; speculative = "
            f"(accepted + 1) * bandwidth / {speed['bytes_per_round'] / GB:.2f} GB (weights of "
            "the distinct experts, dense weights and caches read once)",
        ]
    return "\n".join(lines)


def _streams(plan) -> str:
    return f"{plan.streams} stream{'s' if plan.streams > 1 else ''}"


def render_programs(programs: dict, plan) -> str:
    lines = [
        "Compiled for "
        f"{plan.target.name}:{'':12}{'seconds':>10}{'arguments':>12}{'temporary':>12}{'peak':>12} "
        "  estimate / peak   copies of caches"
    ]
    for name, row in programs.items():
        lines.append(
            f"  {name:30}{row['seconds']:10.1f}{row['argument_bytes'] / GB:9.2f} "
            f"GB{row['temporary_bytes'] / GB:9.2f} GB{row['peak_bytes'] / GB:9.2f} "
            f"GB{plan.total / row['peak_bytes']:15.2f}{row['cache_copies']:19}"
        )
    return "\n".join(lines)
