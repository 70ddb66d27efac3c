"""Reads the official checkpoint layout: `model.safetensors`, or `model.safetensors.index.json` and
its shards (spec section 2).

Opening reads headers only and lists every fault of the files in one error; `check` compares the
tensors with what a model expects and lists every missing, unexpected, misshapen or mistyped one by
name. After that, values are read tensor by tensor or slice by slice, and only the bytes of the
slice are touched.

    storage   stored as                                     read as
    bf16      name         BF16 [shape]                     ml_dtypes.bfloat16 [shape]
    f32       name         F32 [shape]                      float32 [shape]
    i64       name         I64 or I32 [shape]               int32 [shape]
    fp8       name.weight  F8_E4M3 [N, K]                   float32 [N, K], dequantised (exact)
              name.scale   F8_E8M0 or U8 [N/128, K/128]     (numbers of blocks rounded up)
    fp4       name.weight  I8 or U8 [N, K/2]                float32 [N, K], or packed as uint8
              name.scale   F8_E8M0 or U8 [N, K/32]
"""

import contextlib
import gc
import json
import math
import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.errors import CheckpointError, ConfigError
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.paths import INDEX, SINGLE, checkpoint_directory, no_file
from dspark_jax.checkpoints.safetensors_file import Entry, SafetensorsFile
from dspark_jax.checkpoints.tensor_spec import PLAIN, STORAGES, TensorSpec

# What only one kind of draft module has; the kind decides before tensors are compared one by one.
DSPARK_MARKS = (
    ".main_proj.weight",
    ".markov_head.markov_w1.weight",
    ".confidence_head.proj.weight",
)
SERIAL_MARKS = (".e_proj.", ".h_proj.", ".enorm.", ".hnorm.")
LONGEST_LIST = 400  # names of one sort that an error spells out


class OfficialCheckpoint:
    """An open checkpoint. Made by `open`; a context manager; what it returns stays valid after
    `close`.
    """

    def __init__(self, path: Path, files: dict[str, SafetensorsFile]):
        self.path, self.files = path, files
        self._where = {name: file for file in files.values() for name in file.entries}

    @classmethod
    def open(cls, path: str | Path) -> "OfficialCheckpoint":
        """Opens a checkpoint directory, see paths.py. Raises one CheckpointError with all faults of
        its files.
        """
        path = checkpoint_directory(path)
        single, index = path / SINGLE, path / INDEX
        if os.path.lexists(index):  # a link into nowhere is there, and is called what it is
            if os.path.lexists(single):
                raise CheckpointError(
                    f"{path}: has both {SINGLE} and {INDEX}; remove the one that does not belong "
                    "here"
                )
            files, found = _open_shards(path, index)
        elif os.path.lexists(single):
            files, found = {single.name: SafetensorsFile(single)}, []
        else:
            raise CheckpointError(
                f"{path}: has neither {SINGLE} nor {INDEX}; it is not a checkpoint in the "
                "official layout"
            )
        found = [problem for file in files.values() for problem in file.problems] + found
        raise_checkpoint_error(path, found)
        return cls(path, files)

    def __enter__(self) -> "OfficialCheckpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files."""
        for file in self.files.values():
            file.close()

    @property
    def config_dict(self) -> dict[str, Any]:
        """config.json as it is; ModelConfig.from_dict makes sense of it."""
        return read_config(self.path)

    def names(self) -> list[str]:
        """Stored tensor names, sorted."""
        return sorted(self._where)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of stored tensor `name`."""
        return self._where[name].entries[name]

    @property
    def kind(self) -> str:
        """The draft module that the tensor names show: "dspark", "serial MTP", "transformers"
        (other names) or "none".
        """
        drafts = [name for name in self._where if name.startswith("mtp.")]
        if any(name.endswith(DSPARK_MARKS) for name in drafts):
            return "dspark"
        if any(mark in name for name in drafts for mark in SERIAL_MARKS):
            return "serial MTP"
        return "transformers" if any(name.startswith("model.") for name in self._where) else "none"

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Every stored tensor must be claimed by exactly one spec and every spec stored as it says;
        else one CheckpointError.
        """
        specs = list(specs)
        if any(spec.name.startswith("mtp.") for spec in specs):
            self._check_kind()
        missing, wrong, claimed, found = [], [], set(), []
        for spec in specs:
            for name in spec.stored():
                if name in claimed:
                    found.append(f"claimed twice: {name}")
                claimed.add(name)
            absent, mismatched = self._compare(spec)
            missing += absent
            wrong += mismatched
        unexpected = sorted(self._where.keys() - claimed)
        found += (
            _listed("missing", missing)
            + _listed("wrong", wrong)
            + _listed("unexpected", unexpected)
        )
        raise_checkpoint_error(self.path, found)

    def read(
        self, spec: TensorSpec, rows: slice | None = None, cols: slice | None = None
    ) -> np.ndarray:
        """Logical values of `spec`, or of a slice of its rows (first axis) and, for matrices,
        columns. See the table above.
        """
        self._require(spec)
        height, width = spec.shape[0] if spec.shape else 1, math.prod(spec.shape[1:])
        if cols is not None and len(spec.shape) != 2:
            raise ValueError(f"{spec.name}: columns of a tensor of shape {spec.shape}")
        rows, cols = _bounds(rows, height, spec.name), _bounds(cols, width, spec.name)
        if spec.storage == "fp8":
            return self._read_fp8(spec, rows, cols)
        if spec.storage == "fp4":
            return self._read_fp4(spec, rows, cols)
        dtype = np.dtype(PLAIN[spec.storage][1])
        if self.entry(spec.name).dtype == "I32":
            dtype = np.dtype(np.int32)
        columns = slice(cols.start * dtype.itemsize, cols.stop * dtype.itemsize)
        values = self._where[spec.name].read(spec.name, rows, columns).view(dtype)
        shape = (values.shape[0], *spec.shape[1:]) if cols == slice(0, width) else values.shape
        values = values.reshape(shape if spec.shape else ())
        return self._integers(spec, values) if spec.storage == "i64" else values

    def read_codes(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        """The codes of an fp4 tensor, or of rows of it, as stored: uint8 [N, K/2], low nibble
        first.
        """
        rows, name = self._packed_rows(spec, rows), f"{spec.name}.weight"
        return self._where[name].read(name, rows, slice(0, spec.shape[1] // 2))

    def read_scales(self, spec: TensorSpec, rows: slice | None = None) -> np.ndarray:
        """Their scales: uint8 e8m0 [N, K/32]."""
        rows = self._packed_rows(spec, rows)
        return self._scales(spec, rows, slice(0, spec.shape[1] // formats.FP4_BLOCK))

    def _packed_rows(self, spec: TensorSpec, rows: slice | None) -> slice:
        if spec.storage != "fp4":
            raise ValueError(f"{spec.name}: stored as {spec.storage}; only fp4 is packed")
        self._require(spec)
        return _bounds(rows, spec.shape[0], spec.name)

    def _read_fp8(self, spec: TensorSpec, rows: slice, cols: slice) -> np.ndarray:
        block = formats.FP8_BLOCK
        codes = self._where[f"{spec.name}.weight"].read(f"{spec.name}.weight", rows, cols)
        scales = self._scales(spec, _enclosing(rows, block), _enclosing(cols, block))
        return formats.dequantise_fp8(codes, scales, rows.start % block, cols.start % block)

    def _read_fp4(self, spec: TensorSpec, rows: slice, cols: slice) -> np.ndarray:
        blocks = _enclosing(cols, formats.FP4_BLOCK)
        half, first = formats.FP4_BLOCK // 2, blocks.start * formats.FP4_BLOCK
        columns = slice(blocks.start * half, blocks.stop * half)
        codes = self._where[f"{spec.name}.weight"].read(f"{spec.name}.weight", rows, columns)
        values = formats.dequantise_fp4(codes, self._scales(spec, rows, blocks))
        return values[:, cols.start - first : cols.stop - first]

    def _scales(self, spec: TensorSpec, rows: slice, columns: slice) -> np.ndarray:
        """e8m0 bytes; 255, NaN, is refused: it would spread into every product."""
        name = f"{spec.name}.scale"
        scales = self._where[name].read(name, rows, columns)
        if (scales == formats.E8M0_NAN).any():
            i, j = np.argwhere(scales == formats.E8M0_NAN)[0]
            raise CheckpointError(
                f"{self.path}: {name}[{rows.start + i}, {columns.start + j}] is e8m0 byte 255, "
                "NaN: the file is damaged, copy it again"
            )
        return scales

    def _integers(self, spec: TensorSpec, values: np.ndarray) -> np.ndarray:
        limit = 2**31 if spec.limit is None else spec.limit
        least = -(2**31) if spec.limit is None else 0
        bad = (values < least) | (values >= limit)
        if bad.any():
            raise CheckpointError(
                f"{self.path}: {spec.name} holds {values[bad].flat[0]}, outside "
                f"{least}..{limit - 1}"
            )
        return values.astype(np.int32)

    def _require(self, spec: TensorSpec) -> None:
        missing, wrong = self._compare(spec)
        raise_checkpoint_error(self.path, _listed("missing", missing) + _listed("wrong", wrong))

    def _compare(self, spec: TensorSpec) -> tuple[list[str], list[str]]:
        """What of `spec` is missing, and what is stored in another dtype or shape."""
        if spec.storage not in STORAGES:
            raise ValueError(
                f"{spec.name}: storage {spec.storage!r}; allowed: {', '.join(STORAGES)}"
            )
        missing, wrong = [], []
        for name, (dtypes, shape) in spec.stored().items():
            if name not in self._where:
                missing.append(name)
                continue
            entry = self.entry(name)
            if entry.dtype not in dtypes:
                wrong.append(f"{name}: is {entry.dtype}, expected {' or '.join(dtypes)}")
            if entry.shape != tuple(shape):
                wrong.append(f"{name}: has shape {list(entry.shape)}, expected {list(shape)}")
        return missing, wrong

    def _check_kind(self) -> None:
        needed = (
            "this library needs a DSpark checkpoint such as DeepSeek-V4-Flash of 0731, with "
            "mtp.0.main_proj and, in its last stage, markov_head and confidence_head"
        )
        if self.kind == "serial MTP":
            held = sorted(
                {
                    name.rsplit(".", 1)[0]
                    for name in self._where
                    if any(mark in name for mark in SERIAL_MARKS)
                }
            )
            raise CheckpointError(
                f"{self.path}: holds a serial multi-token-prediction (MTP) head "
                f"({', '.join(held[:4])}), not DSpark draft stages; {needed}"
            )
        if self.kind == "transformers":
            raise CheckpointError(
                f"{self.path}: tensors are named as by Hugging Face transformers (model. ...); "
                "this library needs the official names (layers.0.attn.wq_a.weight ...)"
            )
        if self.kind == "none":
            raise CheckpointError(
                f"{self.path}: holds no draft module (no DSpark tensors under mtp.); {needed}"
            )


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. Raises CheckpointError, as anything else does that is
    missing from it or damaged.
    """
    try:
        return read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def raise_checkpoint_error(path: str | Path, found: list[str]) -> None:
    """One error for all of `found`, none when there is nothing."""
    if found:
        many = f"{len(found)} problems" if len(found) > 1 else "1 problem"
        raise CheckpointError("\n  ".join([f"{path}: {many}"] + found))


def _open_shards(directory: Path, index: Path) -> tuple[dict[str, SafetensorsFile], list[str]]:
    """The files an index names, and everything in which the index and the files disagree."""
    try:
        weight_map = _read_weight_map(index)
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{INDEX}: not understood: {error}"]
    shards = sorted(set(weight_map.values()))
    found = [
        f"{shard}: missing; the index names it"
        for shard in shards
        if not os.path.lexists(directory / shard)
    ]
    with collection_paused():
        files = {
            shard: SafetensorsFile(directory / shard)
            for shard in shards
            if os.path.lexists(directory / shard)
        }
    stray = {path.name for path in directory.glob("model-*-of-*.safetensors")} - set(shards)
    found += [f"{name}: the index does not name this shard" for name in sorted(stray)]
    held: dict[str, str] = {}
    for shard, file in files.items():
        for name in file.entries:
            if name in held:
                found.append(f"{name}: in {held[name]} and again in {shard}")
            elif name not in weight_map:
                found.append(f"{name}: in {shard}, but the index does not list it")
            held.setdefault(name, shard)
    for name, shard in weight_map.items():
        if shard in files and not files[shard].problems and name not in files[shard].entries:
            found.append(f"{name}: the index says {shard}, which does not hold it")
    return files, found


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard, a file of the same directory. Raises ValueError that says what is wrong
    with the index.
    """
    if (other := no_file(index)) is not None:
        raise ValueError(f"this is {other}")
    content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_index_pairs)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            'it must be an object whose "weight_map" names the shard of every tensor; copy it again'
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise ValueError(
                f"weight_map: {tensor} is said to be in {reprlib.repr(shard)}, which names no file "
                "of this directory"
            )
    return weight_map


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and os.path.basename(name) == name


@contextlib.contextmanager
def collection_paused():
    """Within it Python does not collect garbage: the 72,000 header entries of a full-size
    checkpoint are then made in a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _index_pairs(pairs: list) -> dict:
    names = {}
    for name, value in pairs:
        if name in names:
            raise ValueError(f"{name} is listed twice")
        names[name] = value
    return names


def _listed(what: str, names: list[str]) -> list[str]:
    lines = [f"{what}: {name}" for name in names[:LONGEST_LIST]]
    return lines + (
        [f"{what}: and {len(names) - LONGEST_LIST} more"] if len(names) > LONGEST_LIST else []
    )


def _bounds(part: slice | None, size: int, name: str) -> slice:
    """A slice with explicit bounds inside 0..size."""
    start, stop = (
        (0, size) if part is None else (part.start or 0, size if part.stop is None else part.stop)
    )
    if (part is not None and part.step not in (None, 1)) or not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: slice {part} of {size}")
    return slice(start, stop)


def _enclosing(part: slice, block: int) -> slice:
    """The blocks that a slice touches."""
    return slice(part.start // block, -(-part.stop // block))
