"""`dspark inspect DIR`: what a checkpoint holds, from its headers alone: config, parameters and bytes by part and precision; and
how `load` would hold its routed experts on this machine (storage.py). A converted checkpoint's manifest tells the same of it.

A stored number is one parameter (a packed byte holds two); scales count as bytes of the tensor that they belong to.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints.official import OfficialCheckpoint, collection_paused
from checkpoints.orbax_io import ConvertedCheckpoint, is_converted
from dspark_jax.config import ModelConfig
from dspark_jax.errors import DsparkError
from dspark_jax.layers.numerics import Numerics
from dspark_jax.loading import dtype_name, expected_tensors, expert_storage, record_leaves
from dspark_jax.storage import ExpertStorage

# The first pattern that begins the name, after the prefix of its layer or stage, decides.
PARTS = (("embed.", "embedding"), ("head.", "head"), ("norm.", "head"), ("hc_head_", "head"), ("main_", "main projection"),
         ("markov_head.", "Markov head"), ("confidence_head.", "confidence head"), ("hc_", "hyper-connections"),
         ("attn_norm.", "norms"), ("ffn_norm.", "norms"), ("attn.indexer.", "indexer"), ("attn.compressor.", "compressor"),
         ("attn.", "attention"), ("ffn.experts.", "routed experts"), ("ffn.shared_experts.", "shared expert"),
         ("ffn.gate.", "gate"))
_PATTERNS = re.compile("|".join(f"({re.escape(pattern)})" for pattern, _ in PARTS))
OTHER = "other"
PRECISIONS = {"BF16": "bf16", "F32": "f32", "I64": "i64", "F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4",
              "bfloat16": "bf16", "float32": "f32", "int32": "i32", "uint8": "fp4"}  # a conversion's


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the model in one precision. module: "main" or "drafter". parameters: a count. bytes: stored, with scales."""

    module: str
    part: str
    precision: str
    parameters: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a checkpoint was converted from.

    path: of the official checkpoint when it was read; None: not written down. files, bytes: its safetensors files.
    checksums: how many are recorded of what was read, for `dspark convert --verify`; every array has one or several.
    """

    path: str | None
    files: int
    bytes: int
    checksums: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `inspect_checkpoint` found.

    kind: the draft module that the tensor names show, as OfficialCheckpoint.kind says. config: None when it was refused.
    problem: why the checkpoint cannot be loaded, as far as config and headers show it; None when nothing is wrong with them.
    files: how many hold tensors; units of a converted checkpoint. tensors: stored tensors, scales included.
    parts: in the order of the forward pass. origin: of a converted checkpoint, else None.
    expert_storage: what `load` with its defaults would choose on this machine now; None when config was refused or JAX has no
      device.
    """

    path: str
    kind: str
    files: int
    tensors: int
    parts: tuple[Part, ...]
    config: ModelConfig | None
    problem: str | None
    origin: Origin | None
    expert_storage: ExpertStorage | None

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def by_precision(self) -> dict[str, dict[str, int]]:
        """Precision -> parameters and bytes."""
        out: dict[str, dict[str, int]] = {}
        for part in self.parts:
            total = out.setdefault(part.precision, {"parameters": 0, "bytes": 0})
            total["parameters"] += part.parameters
            total["bytes"] += part.bytes
        return out

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {"path": self.path, "kind": self.kind, "files": self.files, "tensors": self.tensors, "parameters": self.parameters,
                "bytes": self.bytes, "parts": [dataclasses.asdict(part) for part in self.parts],
                "precisions": self.by_precision(), "problem": self.problem,
                "converted_from": None if self.origin is None else dataclasses.asdict(self.origin),
                "expert_storage": None if self.expert_storage is None else self.expert_storage.to_dict(),
                "config": None if self.config is None else self.config.to_dict()}


def inspect_checkpoint(path: str | Path) -> Summary:
    """Reads the headers (or the manifest) and config.json of the checkpoint at `path`. Damaged files raise CheckpointError."""
    with collection_paused():
        return _inspect(path)


def _inspect(path: str | Path) -> Summary:
    if is_converted(path):
        checkpoint = ConvertedCheckpoint.open(path)  # only what has the draft module was converted
        return _summary(checkpoint, path, "dspark", len(checkpoint.units), _leaves(checkpoint), _origin(checkpoint))
    with OfficialCheckpoint.open(path) as checkpoint:
        return _summary(checkpoint, path, checkpoint.kind, len(checkpoint.files), _tensors(checkpoint), None)


def _summary(checkpoint, path, kind: str, files: int, tensors: Iterator[tuple[str, str, int, int]], origin) -> Summary:
    """tensors: (name, dtype, numbers, bytes); a scale has the name and dtype of the tensor that it belongs to, and no numbers."""
    stored = list(tensors)
    parameters, sizes = Counter(), Counter()
    for name, dtype, count, nbytes in stored:
        key = _key(name, dtype)
        parameters[key] += count * (2 if key[2] == "fp4" else 1)
        sizes[key] += nbytes
    parts = tuple(Part(*key, parameters[key], sizes[key]) for key in sorted(sizes, key=_rank))
    config, problem = _config(checkpoint)
    return Summary(str(path), kind, files, len(stored), parts, config, problem, origin, _storage(config))


def _tensors(checkpoint: OfficialCheckpoint) -> Iterator[tuple[str, str, int, int]]:
    stored = set(checkpoint.names())
    for name in stored:
        entry, owner = checkpoint.entry(name), name.removesuffix(".scale") + ".weight"
        if owner != name + ".weight" and owner in stored:
            yield owner, checkpoint.entry(owner).dtype, 0, entry.nbytes
        else:
            yield name, entry.dtype, math.prod(entry.shape), entry.nbytes


def _leaves(checkpoint: ConvertedCheckpoint) -> Iterator[tuple[str, str, int, int]]:
    for name, leaf in checkpoint.leaves().items():
        scale = leaf.dtype == "uint8" and name.endswith(".scale")
        yield name, leaf.dtype, 0 if scale else math.prod(leaf.shape), leaf.nbytes


def _origin(checkpoint: ConvertedCheckpoint) -> Origin:
    files = checkpoint.source["files"]
    return Origin(checkpoint.source_path, len(files), sum(file["bytes"] for file in files.values()), len(checkpoint.checksums))


def _storage(config: ModelConfig | None) -> ExpertStorage | None:
    if config is None:
        return None
    try:
        return expert_storage(config, Numerics(dtype_name(None)))
    except RuntimeError:  # JAX cannot have the accelerator, as another process uses it; the headers can be read all the same
        return None


def _config(checkpoint: OfficialCheckpoint | ConvertedCheckpoint) -> tuple[ModelConfig | None, str | None]:
    """The config, or None; and what is wrong with it or the names, or None."""
    try:
        config = ModelConfig.from_dict(checkpoint.config_dict, f"{checkpoint.path}/config.json")
    except DsparkError as error:
        return None, str(error)
    official = isinstance(checkpoint, OfficialCheckpoint)
    if official and checkpoint.kind != "dspark":
        return config, f"the tensors show no DSpark draft module (kind: {checkpoint.kind})"
    try:
        checkpoint.check((expected_tensors(config) if official else record_leaves(config).leaves).values())
    except DsparkError as error:
        return config, str(error)
    return config, None


def _key(name: str, dtype: str) -> tuple[str, str, str]:
    """(module, part, precision) of a stored tensor."""
    pieces = name.split(".")
    drafter = pieces[0] == "mtp"
    rest = ".".join(pieces[2:]) if pieces[0] in ("layers", "mtp") else name
    found = _PATTERNS.match(rest)
    part = PARTS[found.lastindex - 1][1] if found else OTHER
    return "drafter" if drafter else "main", part, PRECISIONS.get(dtype, dtype.lower())


def _rank(key: tuple[str, str, str]) -> tuple:
    order = ("embedding", "main projection", "hyper-connections", "norms", "attention", "compressor", "indexer", "gate",
             "routed experts", "shared expert", "head", "Markov head", "confidence head", OTHER)
    return key[0] == "drafter", order.index(key[1]), key[2]


def print_summary(summary: Summary) -> None:
    """The summary as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100)
    holder = "unit" if summary.origin else "file"
    console.print(f"[bold]{summary.path}[/]: {summary.kind}, {summary.tensors:,} tensors in {summary.files:,} "
                  f"{holder}{'s' if summary.files > 1 else ''}, {summary.parameters:,} parameters, {_size(summary.bytes)}")
    if summary.origin is not None:
        console.print(_origin_line(summary.origin), markup=False)
    if summary.config is not None:
        console.print(_config_line(summary.config))
    table = Table("module", "part", "precision", box=None, header_style="bold")
    for title in ("parameters", "bytes", "share"):
        table.add_column(title, justify="right")
    for part in summary.parts:
        table.add_row(part.module, part.part, part.precision, f"{part.parameters:,}", _size(part.bytes),
                      f"{part.bytes / summary.bytes:.1%}")
    table.add_section()
    for precision, total in summary.by_precision().items():
        table.add_row("all", "", precision, f"{total['parameters']:,}", _size(total["bytes"]),
                      f"{total['bytes'] / summary.bytes:.1%}")
    console.print(table)
    if summary.expert_storage is not None:
        console.print(_storage_line(summary.expert_storage))
    if summary.problem is not None:
        console.print(f"cannot be loaded: {summary.problem}", style="red", markup=False)


def _config_line(c: ModelConfig) -> str:
    ratios = ", ".join(f"{count} of ratio {ratio}" for ratio, count in
                       sorted(Counter(c.compress_ratios[:c.num_hidden_layers]).items()))
    return (f"{c.num_hidden_layers} layers ({ratios}; {c.num_hash_layers} hash-routed) of width {c.hidden_size}, "
            f"{c.num_attention_heads} heads of {c.head_dim}, {c.n_routed_experts} experts, {c.num_experts_per_tok} a token, "
            f"vocabulary {c.vocab_size:,}, window {c.sliding_window}; {c.n_draft_stages} draft stages, block "
            f"{c.dspark_block_size}, on layers {', '.join(map(str, c.dspark_target_layer_ids))}")


def _origin_line(o: Origin) -> str:
    files = f"{o.files} file{'s' if o.files > 1 else ''}"
    return (f"converted from {o.path or 'an official checkpoint'} ({files}, {_size(o.bytes)}), with {o.checksums:,} checksums "
            "that dspark convert --verify compares")


def _storage_line(s: ExpertStorage) -> str:
    return (f"load would hold the routed experts {s.kind} on this machine: {s.why} (the whole model needs "
            f"{_size(s.dequantised_bytes)} dequantised, {_size(s.packed_bytes)} packed; {_size(s.available_bytes)} are available, of "
            f"which {_size(s.limit_bytes)} may be used)")


def _size(count: int) -> str:
    """Bytes with a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{count} B"
        size /= 1000
    return f"{size:.3g} TB"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `inspect` to the command line."""
    parser = subparsers.add_parser("inspect", help="what a checkpoint holds: config, parameters and bytes by part and precision",
                                   description="Reads config.json and the tensor headers of a checkpoint directory in the "
                                               "official layout, or the manifest of a converted one; no tensor. Says too how "
                                               "load, with its defaults, would hold the routed experts on this machine: on CPU "
                                               "dequantised where that fits into the available memory, else packed "
                                               "(DSPARK_EXPERT_STORAGE decides instead). "
                                               "Exit status 1 when the checkpoint could not be loaded.")
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory: config.json with model.safetensors or an index, "
                        "or what dspark convert wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """`dspark inspect`. Returns the exit status."""
    summary = inspect_checkpoint(args.directory)
    if args.json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        print_summary(summary)
    return 0 if summary.problem is None else 1
