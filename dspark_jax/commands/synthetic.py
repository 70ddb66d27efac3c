"""`dspark synthetic`: a checkpoint of random weights in the shapes of a real one
(checkpoints/synthetic.py), to try hardware and programs before the real one is there.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path

from dspark_jax.commands.output import print_json
from dspark_jax.config import PRESETS, ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError

GB = 1e9
SPARE_BYTES = 1 << 24  # beside the tensors: headers, index, config, and what the disk itself needs


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "synthetic",
        help="a checkpoint of random weights in the shapes of a real one",
        description=(
            "Writes a checkpoint in the official layout with random, well scaled weights: the "
            "shapes, the precisions and with that the speed and the memory of a real model, and "
            "text without sense. Values depend on the seed and a tensor's name alone."
        ),
    )
    add = parser.add_argument
    add(
        "--like",
        required=True,
        metavar="MODEL",
        help=f"{' or '.join(PRESETS)}, or the path of a config.json or of a checkpoint directory, "
        "whose tokenizer.json is taken too",
    )
    add(
        "--layers",
        type=int,
        metavar="N",
        help="main layers, their kinds in the proportion of the model (default: all of them); "
        "draft stages stay",
    )
    add("--out", metavar="DIR", help="directory to write, new or empty")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the weights, 0 or more (default %(default)s)",
    )
    add(
        "--max-shard-gb",
        type=float,
        default=4.0,
        metavar="GB",
        help="largest file, in 10^9 bytes (default %(default)s)",
    )
    add("--dry-run", action="store_true", help="print shapes and bytes, and write nothing")
    add("--json", action="store_true", help="print one JSON object; sizes in bytes")
    add("--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    _check(args)
    import jax

    jax.config.update("jax_platforms", "cpu")  # shapes need no device
    from dspark_jax.loading.load import expected_tensors

    config, tokenizer = _model(args.like)
    if args.layers is not None:
        from dspark_jax.config_layers import with_layers

        config = with_layers(config, args.layers)
    specs = list(expected_tensors(config).values())
    result = _described(args.like, config, specs)
    if args.dry_run:
        if args.json:
            print_json(result)
        else:
            print(render(result))
        return 0
    directory = _directory(args.out, result["bytes"])
    if not args.quiet:
        print(_title(result), file=sys.stderr)
    _write(directory, config, specs, tokenizer, args)
    if args.json:
        print_json({"directory": str(directory)} | result)
    else:
        print(f"{directory}: written, {result['bytes']:,} bytes of tensors")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.out is None and not args.dry_run:
        raise ConfigError("--out DIR is needed, or --dry-run to see what would be written")
    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers: {args.layers} is not a positive integer")
    if args.seed < 0:
        raise ConfigError(f"--seed: {args.seed} is not an integer of 0 or more")
    if not 0 < args.max_shard_gb < math.inf:
        raise ConfigError(f"--max-shard-gb: {args.max_shard_gb:g} is not above 0 and finite")


def _model(like: str) -> tuple[ModelConfig, Path | None]:
    """The config, and the tokenizer.json that lies beside it."""
    if like in PRESETS:
        return PRESETS[like](), None
    from dspark_jax.checkpoints.paths import expanded

    path = expanded(like)
    if not os.path.lexists(path):
        raise ConfigError(
            f"--like {like}: neither {' nor '.join(PRESETS)}, and no such file or directory"
        )
    file = path / "config.json" if path.is_dir() else path
    tokenizer = file.parent / "tokenizer.json"
    return ModelConfig.from_file(file), tokenizer if tokenizer.is_file() else None


def _directory(out: str, nbytes: int) -> Path:
    """Refuses before anything is written what is no new or empty directory, or has no room."""
    from dspark_jax.checkpoints.paths import expanded
    from dspark_jax.checkpoints.writer import free_bytes

    directory = expanded(out)
    if os.path.lexists(directory) and not directory.is_dir():
        raise ConfigError(f"--out {directory}: this is not a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"--out {directory}: this directory is not empty; name a new one")
    free = free_bytes(directory)
    if nbytes + SPARE_BYTES > free:
        raise CheckpointError(
            f"--out {directory}: the checkpoint needs {nbytes:,} bytes, {free:,} are free; ask for "
            "fewer --layers, or name a directory on another disk"
        )
    return directory


def _write(directory: Path, config: ModelConfig, specs, tokenizer, args) -> None:
    """A write that fails or is interrupted leaves nothing."""
    from dspark_jax.checkpoints.synthetic import write_synthetic
    from dspark_jax.commands.byte_progress import ByteProgress, interruptible

    new = not directory.exists()
    try:
        with interruptible(ByteProgress("written", args.quiet)) as progress:
            write_synthetic(
                directory,
                config.to_dict(),
                specs,
                args.seed,
                math.ceil(args.max_shard_gb * GB),
                tokenizer,
                progress,
            )
    except BaseException:
        if new and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        raise


def _described(like: str, config: ModelConfig, specs) -> dict:
    """What would be written. tensors: those that differ in the number of their layer, stage or
    expert only are one entry, with how many there are and their bytes together.
    """
    from dspark_jax.checkpoints.writer import stored_bytes

    groups: dict[tuple, dict] = {}
    for spec in specs:
        name = re.sub(r"\.\d+\.", ".*.", re.sub(r"\.\d+\.", ".*.", spec.name))
        key = name, spec.shape, spec.storage
        shape = {"name": name, "shape": list(spec.shape), "precision": spec.storage}
        group = groups.setdefault(key, {**shape, "count": 0, "bytes": 0})
        group["count"] += 1
        group["bytes"] += stored_bytes(spec)
    return {
        "like": like,
        "layers": config.num_hidden_layers,
        "compress_ratios": list(config.compress_ratios),
        "num_hash_layers": config.num_hash_layers,
        "dspark_target_layer_ids": list(config.dspark_target_layer_ids),
        "parameters": sum(math.prod(spec.shape) for spec in specs),
        "bytes": sum(group["bytes"] for group in groups.values()),
        "tensors": list(groups.values()),
    }


def _title(result: dict) -> str:
    from dspark_jax.loading.parts import size

    layers = result["layers"]
    counts = Counter(result["compress_ratios"][:layers])
    ratios = ", ".join(f"{count} of ratio {ratio}" for ratio, count in sorted(counts.items()))
    return (
        f"like {result['like']}, {layers} layers ({ratios}; the first {result['num_hash_layers']} "
        f"hash-routed), {len(result['compress_ratios']) - layers} draft stages on layers "
        f"{', '.join(map(str, result['dspark_target_layer_ids']))}: "
        f"{result['parameters']:,} parameters, {result['bytes']:,} bytes ({size(result['bytes'])})"
    )


def render(result: dict) -> str:
    """What would be written, as text for a terminal."""
    rows = result["tensors"]
    width = max(len(row["name"]) for row in rows)
    lines = [_title(result), f"  {'tensor':{width}}  {'shape':>16} {'':5}{'count':>7}{'MB':>12}"]
    lines += [
        f"  {row['name']:{width}}  {' x '.join(map(str, row['shape'])):>16} "
        f"{row['precision']:5}{row['count']:7,}{row['bytes'] / 1e6:12,.2f}"
        for row in rows
    ]
    return "\n".join(lines)
