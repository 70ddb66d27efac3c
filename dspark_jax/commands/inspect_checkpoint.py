"""`dspark inspect DIR`: what a checkpoint holds, from its headers alone (loading/summary.py), as a
table or as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from dspark_jax.commands.output import print_json


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `inspect` to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="what a checkpoint holds: config, parameters and bytes by part and precision",
        description="Reads config.json and the tensor headers of a checkpoint directory in the "
        "official layout, or the manifest of a converted one; no tensor. Says too how "
        "load, with its defaults, would hold the routed experts on this machine: on CPU "
        "dequantised where that fits into the available memory, else packed "
        "(DSPARK_EXPERT_STORAGE decides instead). "
        "Exit status 1 when the checkpoint could not be loaded.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="checkpoint directory: config.json with model.safetensors or an index, "
        "or what dspark convert wrote",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """`dspark inspect`. Returns the exit status."""
    from dspark_jax.loading.summary import inspect_checkpoint

    summary = inspect_checkpoint(args.directory)
    if args.json:
        print_json(summary.to_dict())
    else:
        print_summary(summary)
    return 0 if summary.problem is None else 1


def print_summary(summary) -> None:
    """The summary as a table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Paths, and names in a file, may have brackets and colons in them: they are no markup.
    console = Console(width=None if sys.stdout.isatty() else 100, markup=False, emoji=False)
    holder = "unit" if summary.origin else "file"
    console.print(
        Text.assemble(
            (summary.path, "bold"),
            f": {summary.kind}, {summary.tensors:,} tensors in {summary.files:,} "
            f"{holder}{'s' if summary.files > 1 else ''}, {summary.parameters:,} parameters, "
            f"{_size(summary.bytes)}",
        )
    )
    if summary.origin is not None:
        console.print(_origin_line(summary.origin))
    if summary.config is not None:
        console.print(_config_line(summary.config))
    table = Table("module", "part", "precision", box=None, header_style="bold")
    for title in ("parameters", "bytes", "share"):
        table.add_column(title, justify="right")
    for part in summary.parts:
        table.add_row(
            part.module,
            part.part,
            part.precision,
            f"{part.parameters:,}",
            _size(part.bytes),
            f"{part.bytes / summary.bytes:.1%}",
        )
    table.add_section()
    for precision, total in summary.by_precision().items():
        table.add_row(
            "all",
            "",
            precision,
            f"{total['parameters']:,}",
            _size(total["bytes"]),
            f"{total['bytes'] / summary.bytes:.1%}",
        )
    console.print(table)
    if summary.expert_storage is not None:
        console.print(_storage_line(summary.expert_storage))
    if summary.problem is not None:
        console.print(f"cannot be loaded: {summary.problem}", style="red")


def _config_line(c) -> str:
    ratios = ", ".join(
        f"{count} of ratio {ratio}"
        for ratio, count in sorted(Counter(c.compress_ratios[: c.num_hidden_layers]).items())
    )
    return (
        f"{c.num_hidden_layers} layers ({ratios}; {c.num_hash_layers} hash-routed) of width "
        f"{c.hidden_size}, {c.num_attention_heads} heads of {c.head_dim}, {c.n_routed_experts} "
        f"experts, {c.num_experts_per_tok} a token, vocabulary {c.vocab_size:,}, window "
        f"{c.sliding_window}; {c.n_draft_stages} draft stages, block {c.dspark_block_size}, on "
        f"layers {', '.join(map(str, c.dspark_target_layer_ids))}"
    )


def _origin_line(o) -> str:
    files = f"{o.files} file{'s' if o.files > 1 else ''}"
    return (
        f"converted from {o.path or 'an official checkpoint'} ({files}, {_size(o.bytes)}), with "
        f"{o.checksums:,} checksums "
        "that dspark convert --verify compares"
    )


def _storage_line(s) -> str:
    return (
        f"load would hold the routed experts {s.kind} on this machine: {s.why} (the whole model "
        f"needs {_size(s.dequantised_bytes)} dequantised, {_size(s.packed_bytes)} packed; "
        f"{_size(s.available_bytes)} are available, of which {_size(s.limit_bytes)} may be used)"
    )


def _size(count: int) -> str:
    """Bytes with a decimal unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{count} B"
        size /= 1000
    return f"{size:.3g} TB"
