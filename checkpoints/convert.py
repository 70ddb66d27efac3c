"""Conversion to the layout of `orbax_io`, unit by unit: bounded memory, several processes,
resumable after a kill at any moment.

What makes it so:
* Orbax writes a unit beside its place and renames it; then NAME.done (JSON: the unit, its
  checksums) appears by another rename, after the unit's files are on the disk. Only with that file
  does a unit count; all else in units/ is removed and done again.
* manifest.json is written when every unit is done. Before, the directory is not a checkpoint.
* conversion.json says what is converted. A conversion goes on only from the same source: names,
  sizes, modification times and headers of its files, checked again before the manifest is written.
"""

import contextlib
import ctypes
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.checkpoints.checksum import checksum, total
from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.official import OfficialCheckpoint, raise_checkpoint_error
from dspark_jax.checkpoints.orbax_io import (
    FORMAT,
    MANIFEST,
    STATE,
    UNITS,
    ConvertedCheckpoint,
    faults,
    lost_files,
    quiet_orbax,
    raise_damaged,
    read_manifest,
    read_object,
    sha256,
    write_unit,
)
from dspark_jax.checkpoints.paths import expanded
from dspark_jax.checkpoints.placing import Bounds, first_owners, place
from dspark_jax.checkpoints.target import (
    LOCK,
    lock,
    partial_of,
    sync_tree,
    write_bytes,
    write_json,
    writing,
)
from dspark_jax.checkpoints.units import (
    UNIT_BYTES,
    Leaf,
    Piece,
    Unit,
    describe,
    plan_units,
    understand,
)

DONE = ".done"
TEXTS = ("config.json", "tokenizer.json")  # copied as they are
Read = Callable[[Leaf, Bounds, np.ndarray], None]
Progress = Callable[[int, int], None]


def convert(
    checkpoint: OfficialCheckpoint,
    target: str | Path,
    leaves: Iterable[Leaf],
    read: Read,
    mesh: Mesh,
    rules: Mapping[str, str],
    progress: Progress | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> None:
    """Writes the converted checkpoint `target`, or what is missing of it.

    leaves: what to store. read(leaf, bounds, out): writes a slice of one into `out`; called for
      what this process's devices hold.
    mesh: the devices whose processes share the work; the result does not depend on it.
    rules: logical axis of a leaf -> axis of the mesh that it is cut over; an axis that is absent is
      not cut.
    progress: called with (bytes done, bytes in all), bytes of what is written.
    Raises CheckpointError when the target cannot be written, holds something else, or the source is
      damaged or changes.
    """
    quiet_orbax()
    target, units = expanded(target), plan_units(leaves, unit_bytes)
    needed = sum(unit.nbytes for unit in units)
    state = {"format": FORMAT, "unit_bytes": unit_bytes, "source": fingerprint(checkpoint)}
    with lock(target):
        finished = _begin(target, state, units)
        _require_shared(target / (MANIFEST if finished else STATE), checkpoint, state["source"])
        if not finished:
            left = _left(target, units)
            written = needed - sum(unit.nbytes for unit in left)
            for unit in left:
                if progress is not None:
                    progress(written, needed)
                _convert_unit(target, unit, read, mesh, rules)
                _trim_memory()
                written += unit.nbytes
            _finish(target, checkpoint, state, units)
    if progress is not None:
        progress(needed, needed)


def verify(path: str | Path, progress: Progress | None = None) -> int:
    """Reads a converted checkpoint and compares it with the checksums of what the conversion read.
    Returns the size of the arrays in bytes.

    Raises one CheckpointError that names every leaf and file that differs or cannot be read.
    """
    checkpoint = ConvertedCheckpoint.open(path)
    needed = sum(unit.nbytes for unit in checkpoint.units.values())
    read, found = 0, checkpoint.lost_files()
    for name, unit in checkpoint.units.items():
        if progress is not None:
            progress(read, needed)
        found += checkpoint.verify(name)
        read += unit.nbytes
    raise_damaged(checkpoint.path, found, checkpoint.changed_texts())
    if progress is not None:
        progress(needed, needed)
    return needed


def fingerprint(checkpoint: OfficialCheckpoint) -> dict[str, Any]:
    """What tells one official checkpoint from another without reading its tensors."""
    files = {}
    for name, file in sorted(checkpoint.files.items()):
        status = file.path.stat()
        header = repr(sorted(file.entries.items())).encode()
        files[name] = {
            "bytes": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "header": sha256(header),
        }
    return {"config": sha256((checkpoint.path / "config.json").read_bytes()), "files": files}


def _convert_unit(
    target: Path, unit: Unit, read: Read, mesh: Mesh, rules: Mapping[str, str]
) -> None:
    arrays, sums = {}, []
    for piece in unit.pieces:
        array, own = _array(piece, read, mesh, rules)
        arrays[piece.leaf.name] = array
        sums.append(own)
    sums = _added_up(sums)
    path = target / UNITS / unit.name
    with writing(target):
        write_unit(path, unit, arrays)
        if jax.process_index() == 0:
            sync_tree(path)
            checksums = {
                piece.leaf.name: value for piece, value in zip(unit.pieces, sums, strict=True)
            }
            # Read again before it is marked as done: what was not checked is not done.
            raise_checkpoint_error(
                f"{target}: what was written does not read back; the disk, or the folder's name, "
                "is not fit for it",
                faults(path, unit.pieces, checksums),
            )
            write_json(target / UNITS / f"{unit.name}{DONE}", describe(unit, checksums))


def _array(
    piece: Piece, read: Read, mesh: Mesh, rules: Mapping[str, str]
) -> tuple[jax.Array | np.ndarray, int]:
    """The piece over the mesh, and the checksum of the parts that this process owns.

    What a mesh does not cut is an array on the host that process 0 reads and Orbax writes there.
    (As a replicated jax.Array it would lie on every device, and Orbax would compile programs to
    share out the writing.)
    """
    leaf, sums = piece.leaf, []

    def part(bounds: Bounds) -> np.ndarray:
        inside = tuple(
            (a + start, b + start) for (a, b), start in zip(bounds, piece.origin, strict=True)
        )
        values = np.empty([stop - start for start, stop in inside], jnp.dtype(leaf.dtype))
        read(leaf, inside, values)
        if bounds in owned:
            sums.append(checksum(values, leaf.shape, tuple(start for start, _ in inside)))
        return values

    whole = tuple((0, size) for size in piece.shape)
    if not any(leaf.axes):
        owned = {whole}
        array = (
            part(whole)
            if jax.process_index() == 0
            else np.zeros(piece.shape, jnp.dtype(leaf.dtype))
        )
    else:
        where = NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in leaf.axes)))
        owned = first_owners(piece.shape, where)
        array = place(piece.shape, where, part)
    return array, total(sums)


def _begin(target: Path, state: dict[str, Any], units: list[Unit]) -> bool:
    """Makes the target ready. True: there is nothing left to do.

    Raises CheckpointError, and writes nothing, where the target holds another conversion, a damaged
    one or other files.
    """
    finished = False
    if jax.process_index() == 0:
        finished, begun = (target / MANIFEST).exists(), (target / STATE).exists()
        if finished:
            _require_same(target, read_manifest(target), state)
            _require_whole(target, units)
        elif begun:
            _require_same(target, read_object(target / STATE), state)
        else:
            _require_empty(target)
            _require_room(target, units)
        with writing(target):
            if not finished and not begun:
                write_json(target / STATE, state)
            (target / UNITS).mkdir(exist_ok=True)
            if finished:
                _remove_traces(target)
    return _agreed([finished])[0]


def _require_whole(target: Path, units: list[Unit]) -> None:
    """A conversion with a manifest must hold all that `load` and Orbax need; reading its arrays is
    left to `verify`.
    """
    checkpoint = ConvertedCheckpoint.open(target)
    checkpoint.check(piece.leaf for unit in units for piece in unit.pieces)
    raise_damaged(target, checkpoint.lost_files(), checkpoint.changed_texts())


def _require_empty(target: Path) -> None:
    if (target / UNITS).is_dir():
        read_manifest(target)  # raises: the manifest is lost
    # What a conversion leaves that was killed before it wrote down what it converts.
    ours = (LOCK, partial_of(target / STATE).name)
    if strangers := sorted(path.name for path in target.iterdir() if path.name not in ours):
        raise CheckpointError(
            f"{target}: is neither empty nor a conversion (it has {', '.join(strangers[:3])}); "
            "choose another target"
        )


def _require_room(target: Path, units: list[Unit]) -> None:
    needed, free = sum(unit.nbytes for unit in units), shutil.disk_usage(target).free
    if needed > free:
        raise CheckpointError(
            f"{target}: {needed:,} bytes are still to be written, {free:,} are free; make room "
            "and run it again"
        )


def _require_same(target: Path, held: dict[str, Any], state: dict[str, Any]) -> None:
    different = [key for key in state if held.get(key) != state[key]]
    if different:
        raise CheckpointError(
            f"{target}: holds a conversion with another {', '.join(different)}; choose another "
            "target, or remove this one to start again"
        )


def _require_shared(seen: Path, checkpoint: OfficialCheckpoint, source: dict[str, Any]) -> None:
    """Every process must see the source that process 0 reads, and the file `seen` that it has in
    the target.
    """
    if jax.process_count() == 1:
        return
    headers = [
        source["config"],
        *((name, file["bytes"], file["header"]) for name, file in source["files"].items()),
    ]
    digest = np.frombuffer(hashlib.sha256(repr(headers).encode()).digest(), np.uint32)
    if not np.array_equal(multihost_utils.broadcast_one_to_all(digest), digest):
        raise CheckpointError(
            f"{checkpoint.path}: process {jax.process_index()} finds another checkpoint here "
            "than process 0; all processes must read the same one"
        )
    if not seen.exists():
        raise CheckpointError(
            f"{seen.parent}: process {jax.process_index()} does not see here what process 0 "
            "wrote; the target must be on a file system that all processes share"
        )


def _left(target: Path, units: list[Unit]) -> list[Unit]:
    """The units still to be written; what was begun of them is removed. Raises CheckpointError when
    they do not fit on the disk.
    """
    done = _agreed([_checksums(target, unit) is not None for unit in units])
    left = [unit for unit, finished in zip(units, done, strict=True) if not finished]
    if jax.process_index() == 0:
        keep = {unit.name for unit in units} - {unit.name for unit in left}
        keep |= {f"{name}{DONE}" for name in keep}
        with writing(target):
            for path in (target / UNITS).iterdir():
                if path.name not in keep:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        _require_room(target, left)
    _together("dspark_convert_left")
    return left


def _checksums(target: Path, unit: Unit) -> dict[str, int] | None:
    """The checksums of a unit that is done, else None."""
    path = target / UNITS / f"{unit.name}{DONE}"
    if not path.is_file() or lost_files(target, unit.name):
        return None
    try:
        found, checksums = understand(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return checksums if found == unit else None


def _finish(
    target: Path, checkpoint: OfficialCheckpoint, state: dict[str, Any], units: list[Unit]
) -> None:
    if jax.process_index() == 0:
        if fingerprint(checkpoint) != state["source"]:
            raise CheckpointError(
                f"{checkpoint.path}: changed while it was converted; remove {target} and start "
                "again"
            )
        texts = {
            name: (checkpoint.path / name).read_bytes()
            for name in TEXTS
            if (checkpoint.path / name).exists()
        }
        with writing(target):
            for name, text in texts.items():
                write_bytes(target / name, text)
            write_json(
                target / MANIFEST,
                {
                    **state,
                    "source_path": str(checkpoint.path.absolute()),
                    "texts": {name: sha256(text) for name, text in texts.items()},
                    "units": [describe(unit, _checksums(target, unit)) for unit in units],
                },
            )
            _remove_traces(target)
    _together("dspark_convert_finish")


def _remove_traces(target: Path) -> None:
    """Removes what only an unfinished conversion needs. The manifest has it all."""
    if jax.process_index() == 0:
        for path in [*(target / UNITS).glob(f"*{DONE}"), target / STATE]:
            path.unlink(missing_ok=True)


def _trim_memory() -> None:
    """Gives freed memory back: glibc keeps blocks of many megabytes in its arenas, which over
    hundreds of units adds up to several units.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _together(name: str) -> None:
    """All processes reach this point before one goes on."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _agreed(done: list[bool]) -> list[bool]:
    """What process 0 sees, in all processes."""
    return (
        [bool(d) for d in multihost_utils.broadcast_one_to_all(np.array(done))]
        if jax.process_count() > 1
        else done
    )


def _added_up(sums: list[int]) -> list[int]:
    """The sums of all processes, modulo 2 ** 64; in halves, because JAX has no 64-bit integers by
    default.
    """
    if jax.process_count() == 1:
        return sums
    halves = np.array([[value & 0xFFFFFFFF, value >> 32] for value in sums], np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(halves)).astype(object)
    return [
        total(int(low) + (int(high) << 32) for low, high in rows)
        for rows in everyone.swapaxes(0, 1)
    ]
