"""The checkpoint that a drafter is trained for: its main model, and the drafter that it may have.

The main model is loaded twice, one after the other: as `dspark.load` does it, to write text, and
with its weights in the layout of whole sequences, to train on.
"""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import is_converted
from dspark_jax.checkpoints.paths import checkpoint_directory
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading.load import (
    Model,
    choose_expert_storage,
    dtype_name,
    embedded_checkpoint,
    expected_tensors,
    read_tokenizer,
)
from dspark_jax.loading.sources import OfficialSource
from dspark_jax.model.dspark import DSpark, make_limits
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import RandomSource, Source

DRAFTER = "mtp."  # what the names of a drafter's tensors begin with
SAMPLE = 1 << 16  # bytes at either end of a file that its fingerprint is made of


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An open checkpoint. has_drafter: whether it holds DSpark's tensors."""

    path: Path
    checkpoint: OfficialCheckpoint
    config: ModelConfig
    tokenizer: object
    has_drafter: bool

    def fingerprint(self) -> int:
        """Of its files: their names and sizes, and what they begin and end with."""
        total = 0
        for name, file in sorted(self.checkpoint.files.items()):
            size = file.path.stat().st_size
            with open(file.path, "rb") as content:
                first = content.read(SAMPLE)
                content.seek(max(0, size - SAMPLE))
                total = zlib.crc32(f"{name} {size}".encode() + first + content.read(), total)
        return zlib.crc32((self.path / "config.json").read_bytes(), total)

    def writer(self, max_seq_len: int, numerics: Numerics) -> Model:
        """The model that writes the text, in plain mode. Its drafter, which that leaves alone, is
        of zeros.
        """
        limits = make_limits(self.config, max_seq_len)
        experts = choose_expert_storage(self.config, numerics, max_seq_len, limits.rows)
        source = _MainOnly(OfficialSource(self.checkpoint, numerics, experts.packed))
        module = DSpark(self.config, numerics, source)
        return Model(self.config, self.tokenizer, module, limits, numerics, experts.kind)

    def main(self, numerics: Numerics) -> MainModel:
        """For whole sequences."""
        packed = choose_expert_storage(self.config, numerics).packed
        source = OfficialSource(self.checkpoint, numerics, packed)
        return MainModel(self.config, numerics, _RowsFirst(source))

    def drafter_source(self, from_nothing: bool, seed: int) -> Source:
        """Where the drafter's first values come from."""
        if from_nothing:
            return RandomSource(seed + 1)
        return OfficialSource(self.checkpoint, Numerics("float32"), packed_experts=False)


def open_checkpoint(path: str | None, from_nothing: bool) -> Frozen:
    """path: a checkpoint in the official layout; None: the embedded one. from_nothing: whether the
    drafter's first values are random, else they are those of the checkpoint's drafter.

    Raises CheckpointError or ConfigError where a drafter cannot be trained on it, before any weight
    is read.
    """
    path = embedded_checkpoint() if path is None else checkpoint_directory(path)
    if is_converted(path):
        raise CheckpointError(
            f"{path}: a converted checkpoint; give the official one that it was made from, whose "
            "tensors are copied"
        )
    checkpoint = OfficialCheckpoint.open(path)
    config = ModelConfig.from_dict(checkpoint.config_dict, f"{path}/config.json")
    tokenizer = read_tokenizer(path, config)
    if tokenizer is None:
        raise CheckpointError(
            f"{path}: has no tokenizer.json, without which text cannot become tokens; put the "
            "model's own beside the weights"
        )
    has_drafter = any(name.startswith(DRAFTER) for name in checkpoint.names())
    if not has_drafter and not from_nothing:
        raise ConfigError(
            f"{path}: holds no draft module (no tensors under {DRAFTER}) to go on from; train one "
            "from nothing with --init none"
        )
    wanted = expected_tensors(config)
    if not has_drafter:
        wanted = {name: spec for name, spec in wanted.items() if not name.startswith(DRAFTER)}
    checkpoint.check(list(wanted.values()))
    return Frozen(path, checkpoint, config, tokenizer, has_drafter)


def numerics_of(dtype: str | None, mesh=None) -> Numerics:
    return Numerics(dtype_name(dtype), True, mesh)


class _MainOnly:
    """A source, but zeros for the drafter."""

    def __init__(self, source: OfficialSource):
        self._source = source
        self.packed_experts, self.columns_first = source.packed_experts, source.columns_first

    def __call__(self, declared, prefixes):
        if prefixes[0].startswith(DRAFTER):
            shape = declared.array_shape(len(prefixes))
            return jnp.zeros(shape, declared.array_dtype(self._source.numerics.dtype))
        return self._source(declared, prefixes)


class _RowsFirst:
    """A source whose weights are held [N, K], as whole sequences want them."""

    columns_first = False

    def __init__(self, source: OfficialSource):
        self._source, self.packed_experts = source, source.packed_experts

    def __call__(self, declared, prefixes) -> jax.Array:
        return self._source(declared, prefixes)
