"""A checkpoint with some of its tensors replaced: all others are copied as they are stored, byte
for byte, and so are its config, its tokenizer and its other small files.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.official import INDEX, SINGLE, OfficialCheckpoint
from dspark_jax.checkpoints.safetensors_file import BITS, SafetensorsFile
from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.checkpoints.writer import Values, write_official

BLOCK_BYTES = 16 << 20  # copied at a time
COPIED = ("*.json", "*.jinja", "LICENSE*")  # besides the weights
LEFT = (INDEX, "calibration.json")  # made anew; of the tensors that are replaced
Part = tuple[SafetensorsFile, str]  # a stored tensor of a file


def replace_tensors(
    source: OfficialCheckpoint,
    target: str | Path,
    prefix: str,
    items: Iterable[tuple[TensorSpec, Values]],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes to the directory `target`, which is new or empty, the checkpoint `source` without its
    tensors whose names begin with `prefix`, and with `items` (see `write_official`) in their place.

    A single file stays one; shards keep their names, and what is new is in one of its own, named by
    the prefix. progress: called with (bytes written, bytes in all).
    Raises CheckpointError where `target` cannot be written; it then stays empty.
    """
    target = Path(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target) as folder:
            unfinished = Path(folder)
            _write(source, unfinished, prefix, list(items), progress)
            for path in sorted(unfinished.iterdir(), key=_weights_last):
                os.replace(path, target / path.name)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error.strerror}); the checkpoint needs "
            f"{sum(_size(file) for file in source.files.values()):,} bytes"
        ) from error


def _weights_last(path: Path) -> bool:
    """What makes a directory a checkpoint comes when the rest is there."""
    return path.name in (SINGLE, INDEX)


def _size(file: SafetensorsFile) -> int:
    return sum(entry.nbytes for entry in file.entries.values())


def _write(source: OfficialCheckpoint, folder: Path, prefix: str, items: list, progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as other:
        write_official(other, {}, items)
        new = SafetensorsFile(Path(other) / SINGLE)
        plan = _plan(source, prefix, new)
        total = sum(file.entries[name].nbytes for parts in plan.values() for file, name in parts)
        done = 0
        for name, parts in plan.items():
            for count in _write_file(folder / name, parts):
                done += count
                if progress is not None:
                    progress(done, total)
        new.close()
    if SINGLE not in plan:
        where = {tensor: name for name, parts in plan.items() for _, tensor in parts}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in {path for pattern in COPIED for path in source.path.glob(pattern)}:
        if path.is_file() and path.name not in LEFT:
            shutil.copyfile(path, folder / path.name)


def _plan(source: OfficialCheckpoint, prefix: str, new: SafetensorsFile) -> dict[str, list[Part]]:
    """File name -> what it is to hold."""
    plan = {
        name: [(file, tensor) for tensor in file.entries if not tensor.startswith(prefix)]
        for name, file in source.files.items()
    }
    added = [(new, tensor) for tensor in new.entries]
    if SINGLE in plan:
        return {SINGLE: plan[SINGLE] + added}
    kept = {name: parts for name, parts in plan.items() if parts}
    return kept | {f"{prefix.strip('.')}.safetensors": added}


def _write_file(path: Path, parts: list[Part]):
    """Writes one file, yielding the bytes of each tensor. Larger elements first: each tensor then
    begins at a multiple of its element's size.
    """
    parts = sorted(parts, key=lambda part: -BITS[part[0].entries[part[1]].dtype])
    header, end = {}, 0
    for file, name in parts:
        entry = file.entries[name]
        offsets = [end, end + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for file, name in parts:
            _copy(file, name, out)
            yield file.entries[name].nbytes
        out.flush()
        os.fsync(out.fileno())


def _copy(file: SafetensorsFile, name: str, out) -> None:
    entry = file.entries[name]
    with open(file.path, "rb") as stored:
        stored.seek(entry.start)
        left = entry.nbytes
        while left:
            block = stored.read(min(left, BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{file.path}: ends within {name}; copy it again")
            out.write(block)
            left -= len(block)
