"""Writes the official checkpoint layout that `official` reads: one file or shards with an index,
atomically.

Everything is written under another name first and renamed when it is whole; the file that makes a
directory a checkpoint (`model.safetensors` or the index) comes last. A write that is killed leaves
a directory without that file, never a mixture.
"""

import json
import math
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.official import INDEX, SINGLE, raise_checkpoint_error
from dspark_jax.checkpoints.safetensors_file import BITS
from dspark_jax.checkpoints.tensor_spec import TensorSpec

# Larger elements first: tensors then begin at multiples of their element size, which other readers
# need.
_ORDER = {"i64": 0, "f32": 1, "bf16": 2, "fp8": 3, "fp4": 3}
_PARTIAL = ".partial"

Values = Any  # array | (codes, scales) | () -> either | () -> iterator over row blocks of either


def write_official(
    directory: str | Path,
    config_dict: dict[str, Any],
    items: Iterable[tuple[TensorSpec, Values]],
    max_shard_bytes: int | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes config.json, the tensors and the tokenizer to `directory`, replacing the checkpoint
    that is there.

    items: each spec with its values in the logical shape. Floats are quantised to the spec's
      storage; fp8 and fp4 tensors may also be given as stored, (weight bytes, scale bytes). A
      callable is called when its tensor is written, so that only one tensor is in memory at a time;
      it may return an iterator over blocks of rows (whole 128-row blocks for fp8).
    max_shard_bytes: largest shard; None writes a single file. A larger tensor gets a shard of its
      own.
    tokenizer: path of a tokenizer.json, or an object with `to_str()` such as tokenizers.Tokenizer.
    progress: called with (bytes written, bytes in all) after every tensor.
    Raises CheckpointError when the target cannot be written (read-only, full); what was there is
      then unchanged.
    """
    directory, items = Path(directory), list(items)
    names = [spec.name for spec, _ in items]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    raise_checkpoint_error(directory, [f"{name}: given twice" for name in twice])
    shards = _shards(items, max_shard_bytes)
    total = sum(stored_bytes(spec) for spec, _ in items)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_all(directory, config_dict, shards, total, tokenizer, progress)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be written ({error.strerror}); the checkpoint needs {total:,} "
            f"bytes, {free_bytes(directory):,} are free. What was there before is unchanged"
        ) from error
    finally:
        for left in directory.glob(f".*{_PARTIAL}"):
            left.unlink(missing_ok=True)


def _write_all(
    directory: Path,
    config_dict: dict,
    shards: dict[str, list],
    total: int,
    tokenizer: Any,
    progress,
) -> None:
    final, written = [], 0
    if tokenizer is not None:
        text = (
            tokenizer.to_str()
            if hasattr(tokenizer, "to_str")
            else Path(tokenizer).read_text(encoding="utf-8")
        )
        final.append(_write_text(directory, "tokenizer.json", text))
    final.append(_write_text(directory, "config.json", json.dumps(config_dict, indent=2) + "\n"))
    for name, items in shards.items():
        for nbytes in _write_shard(directory / f".{name}{_PARTIAL}", items):
            written += nbytes
            if progress is not None:
                progress(written, total)
        final.append(name)
    if SINGLE not in shards:
        weight_map = {
            stored: name
            for name, items in shards.items()
            for spec, _ in items
            for stored in spec.stored()
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        final.append(_write_text(directory, INDEX, json.dumps(index, indent=2) + "\n"))
    for stale in [
        directory / SINGLE,
        directory / INDEX,
        *directory.glob("model-*-of-*.safetensors"),
    ]:
        stale.unlink(missing_ok=True)
    for name in final:
        os.replace(directory / f".{name}{_PARTIAL}", directory / name)


def _shards(items: list, max_shard_bytes: int | None) -> dict[str, list]:
    """File name -> its items, filled in the given order."""
    groups, size = [[]], 0
    for item in items:
        nbytes = stored_bytes(item[0])
        if max_shard_bytes is not None and groups[-1] and size + nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    groups = [sorted(group, key=lambda item: _ORDER[item[0].storage]) for group in groups]
    if max_shard_bytes is None:
        return {SINGLE: groups[0]}
    return {
        f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }


def stored_bytes(spec: TensorSpec) -> int:
    """What the tensor takes in a file, its scales included."""
    return sum(math.prod(shape) * BITS[dtypes[0]] // 8 for dtypes, shape in spec.stored().values())


def _write_shard(path: Path, items: list) -> Iterator[int]:
    """Writes one file, yielding the bytes of each tensor."""
    header, end = {}, 0
    for spec, _ in items:
        for name, (dtypes, shape) in spec.stored().items():
            stop = end + math.prod(shape) * BITS[dtypes[0]] // 8
            header[name] = {"dtype": dtypes[0], "shape": list(shape), "data_offsets": [end, stop]}
            end = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec, values in items:
            _write_tensor(file, spec, values() if callable(values) else values)
            yield stored_bytes(spec)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file, spec: TensorSpec, values: Values) -> None:
    """Writes the weight block by block, then its scales, which are small enough to be kept until
    then.
    """
    scales, rows = [], 0
    for block in values if isinstance(values, Iterator) else [values]:
        if spec.storage == "fp8" and rows % formats.FP8_BLOCK:
            raise ValueError(
                f"{spec.name}: a block of rows begins at {rows}, inside a 128-row quantisation "
                "block"
            )
        codes, scale = _encode(spec, block)
        rows += codes.shape[0] if codes.ndim else 1
        file.write(np.ascontiguousarray(codes).data.cast("B") if codes.ndim else codes.tobytes())
        if scale is not None:
            scales.append(scale)
    if rows != (spec.shape[0] if spec.shape else 1):
        raise ValueError(f"{spec.name}: {rows} rows given, the spec has shape {spec.shape}")
    for scale in scales:
        file.write(scale.tobytes())


def _encode(spec: TensorSpec, values: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """One block of rows as stored: (values or codes, scales or None), in a dtype whose bytes NumPy
    can hand out.
    """
    if isinstance(values, tuple):
        codes, scale = (np.asarray(part).view(np.uint8) for part in values)
        halved = 2 if spec.storage == "fp4" else 1
        _require_shape(spec, (codes.shape[0], codes.shape[1] * halved))
        return codes, scale
    values = np.asarray(values)
    _require_shape(spec, values.shape)
    if spec.storage == "i64":
        if values.dtype.kind not in "iu":
            raise ValueError(f"{spec.name}: {values.dtype} values for an integer tensor")
        return values.astype(np.int64), None
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{spec.name}: holds NaN or infinity; such a checkpoint would be useless and is not "
            "written"
        )
    if spec.storage == "fp8":
        return formats.quantise_fp8(values)
    if spec.storage == "fp4":
        return formats.quantise_fp4(values)
    return (
        values.astype(ml_dtypes.bfloat16).view(np.uint16) if spec.storage == "bf16" else values
    ), None


def _require_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if shape[1:] != tuple(spec.shape)[1:] or len(shape) != len(spec.shape):
        raise ValueError(f"{spec.name}: values of shape {shape}, the spec has {tuple(spec.shape)}")


def _write_text(directory: Path, name: str, text: str) -> str:
    with open(directory / f".{name}{_PARTIAL}", "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return name


def free_bytes(directory: Path) -> int:
    """On the disk that `directory` lies on, or would."""
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    return shutil.disk_usage(existing).free
