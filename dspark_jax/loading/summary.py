"""What a checkpoint holds, from its headers alone: config, parameters and bytes by part and
precision; and how `load` would hold its routed experts on this machine (expert_storage.py). Of a
converted checkpoint the manifest says all this.

A stored number is one parameter (a packed byte holds two); scales count as bytes of the tensor that
they belong to.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints.official import OfficialCheckpoint, collection_paused
from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint, is_converted
from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError, DsparkError
from dspark_jax.loading.expert_storage import ExpertStorage
from dspark_jax.loading.load import (
    choose_expert_storage,
    dtype_name,
    expected_tensors,
    read_tokenizer,
    record_leaves,
)
from dspark_jax.loading.parts import ORDER, part_of
from dspark_jax.loading.stated_sizes import check_sizes
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.runtime.backend import require_device

# By dtype, as safetensors spell it; then as conversions do.
PRECISIONS = {
    "BF16": "bf16",
    "F32": "f32",
    "I64": "i64",
    "F8_E4M3": "fp8",
    "I8": "fp4",
    "U8": "fp4",
    "bfloat16": "bf16",
    "float32": "f32",
    "int32": "i32",
    "uint8": "fp4",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the model in one precision. module: "main" or "drafter". parameters: a count.
    bytes: stored, with scales.
    """

    module: str
    part: str
    precision: str
    parameters: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a checkpoint was converted from.

    path: of the official checkpoint when it was read; None: not written down. files, bytes: its
      safetensors files.
    checksums: how many are recorded of what was read, for `dspark convert --verify`; every array
      has one or several.
    """

    path: str | None
    files: int
    bytes: int
    checksums: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `inspect_checkpoint` found.

    kind: the draft module that the tensor names show, as OfficialCheckpoint.kind says. config: None
      when it was refused.
    problem: why the checkpoint cannot be loaded, as far as config and headers show it; None when
      nothing is wrong with them.
    files: how many hold tensors; units of a converted checkpoint. tensors: stored tensors, scales
      included.
    parts: in the order of the forward pass. origin: of a converted checkpoint, else None.
    expert_storage: what `load` with its defaults would choose on this machine now; None when config
      was refused or JAX has no device.
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
        return {
            "path": self.path,
            "kind": self.kind,
            "files": self.files,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "precisions": self.by_precision(),
            "problem": self.problem,
            "converted_from": None if self.origin is None else dataclasses.asdict(self.origin),
            "expert_storage": None
            if self.expert_storage is None
            else self.expert_storage.to_dict(),
            "config": None if self.config is None else self.config.to_dict(),
        }


def inspect_checkpoint(path: str | Path) -> Summary:
    """Reads the headers (or the manifest) and config.json of the checkpoint at `path`. Damaged
    files raise CheckpointError.
    """
    with collection_paused():
        return _inspect(path)


def _inspect(path: str | Path) -> Summary:
    if is_converted(path):
        checkpoint = ConvertedCheckpoint.open(path)  # only what has the draft module was converted
        return _summary(
            checkpoint,
            path,
            "dspark",
            len(checkpoint.units),
            _leaves(checkpoint),
            _origin(checkpoint),
        )
    with OfficialCheckpoint.open(path) as checkpoint:
        return _summary(
            checkpoint, path, checkpoint.kind, len(checkpoint.files), _tensors(checkpoint), None
        )


def _summary(
    checkpoint, path, kind: str, files: int, tensors: Iterator[tuple[str, str, int, int]], origin
) -> Summary:
    """tensors: (name, dtype, numbers, bytes); a scale has the name and dtype of the tensor that it
    belongs to, and no numbers.
    """
    stored = list(tensors)
    parameters, sizes = Counter(), Counter()
    for name, dtype, count, nbytes in stored:
        key = _key(name, dtype)
        parameters[key] += count * (2 if key[2] == "fp4" else 1)
        sizes[key] += nbytes
    parts = tuple(Part(*key, parameters[key], sizes[key]) for key in sorted(sizes, key=_rank))
    config, problem = _config(checkpoint)
    return Summary(
        str(path), kind, files, len(stored), parts, config, problem, origin, _storage(config)
    )


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
    return Origin(
        checkpoint.source_path,
        len(files),
        sum(file["bytes"] for file in files.values()),
        len(checkpoint.checksums),
    )


def _storage(config: ModelConfig | None) -> ExpertStorage | None:
    if config is None:
        return None
    try:
        require_device()
    except ConfigError:
        return (
            None  # another process has the accelerator, say; the headers can be read all the same
        )
    return choose_expert_storage(config, Numerics(dtype_name(None)))


def _config(
    checkpoint: OfficialCheckpoint | ConvertedCheckpoint,
) -> tuple[ModelConfig | None, str | None]:
    """The config, or None; and what is wrong with it, the names or the tokenizer, or None."""
    try:
        config = ModelConfig.from_dict(checkpoint.config_dict, f"{checkpoint.path}/config.json")
    except DsparkError as error:
        return None, str(error)
    official = isinstance(checkpoint, OfficialCheckpoint)
    if official and checkpoint.kind != "dspark":
        return config, f"the tensors show no DSpark draft module (kind: {checkpoint.kind})"
    try:
        if official:
            check_sizes(checkpoint, config)
        checkpoint.check(
            (expected_tensors(config) if official else record_leaves(config).leaves).values()
        )
        read_tokenizer(checkpoint.path, config)
    except DsparkError as error:
        return config, str(error)
    return config, None


def _key(name: str, dtype: str) -> tuple[str, str, str]:
    """(module, part, precision) of a stored tensor."""
    pieces = name.split(".")
    drafter = pieces[0] == "mtp"
    part = part_of(".".join(pieces[2:]) if pieces[0] in ("layers", "mtp") else name)
    return "drafter" if drafter else "main", part, PRECISIONS.get(dtype, dtype.lower())


def _rank(key: tuple[str, str, str]) -> tuple:
    return key[0] == "drafter", ORDER.index(key[1]), key[2]
