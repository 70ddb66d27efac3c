"""A converted checkpoint: a directory of Orbax checkpoints that any mesh can load, whatever mesh
wrote it.

    config.json, tokenizer.json   as in the official checkpoint
    manifest.json                 what was converted, and which unit holds what, with checksums of
                                  arrays and of the files above; written last: a directory without
                                  it is not a checkpoint
    units/NAME/                   one Orbax PyTree, {leaf name: array}

A leaf is a parameter of one layer as the model holds it: dense weights in bfloat16 (exact, also for
what was FP8), float32 where the model holds float32, routed experts packed: codes and scales are
uint8 leaves. Leaves are not stacked over layers, so that the files do not depend on how the model
groups its layers. A unit holds the small leaves of a layer, or a range of a large one along an axis
that no mesh cuts, so that whoever writes or reads it needs little memory.

Orbax (OCDBT, Zarr, uncompressed) writes the arrays and any Orbax restores them; slices are read
with TensorStore, on which Orbax is built, so that a process reads exactly what its devices hold.
"""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.checksum import checksum
from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.official import LONGEST_LIST, raise_checkpoint_error, read_config
from dspark_jax.checkpoints.paths import (
    INDEX,
    OWN_FILES,
    SINGLE,
    checkpoint_directory,
    expanded,
    no_file,
)
from dspark_jax.checkpoints.placing import Bounds
from dspark_jax.checkpoints.units import Leaf, Piece, Unit, understand

FORMAT = 1
MANIFEST, UNITS = "manifest.json", "units"
STATE = "conversion.json"  # instead of the manifest as long as the conversion is unfinished
ORBAX_FILES = ("_METADATA", "manifest.ocdbt")  # without which nothing restores a unit
AGAIN = "remove the directory and convert the official checkpoint again"
UNREADABLE = (ValueError, NotImplementedError, OSError)  # what TensorStore raises for damaged files
CHUNK_BYTES = 8 << 20  # what is read from disk at least, however small the slice


def write_unit(path: Path, unit: Unit, arrays: dict[str, Any]) -> None:
    """Saves {leaf name: jax.Array} of the unit's pieces with Orbax, atomically: `path` appears when
    all is in it.
    """
    import orbax.checkpoint as ocp

    # A piece of experts is cut into one chunk an expert, other arrays along their longest axis.
    args = {
        piece.leaf.name: ocp.SaveArgs(
            chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if "experts" in piece.leaf.axes else ()
        )
        for piece in unit.pieces
    }
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    ) as checkpointer:
        with without_patterns(path.absolute()) as plain:
            checkpointer.save(plain, args=ocp.args.PyTreeSave(arrays, save_args=args))


@contextlib.contextmanager
def without_patterns(path: Path) -> Iterator[Path]:
    """`path`, by another name where Orbax would take it for a pattern: in "a[1]" it finds no file
    of its own again, and writes no array.
    """
    if not any(character in str(path.parent) for character in "*?["):
        yield path
        return
    if jax.process_count() > 1:
        raise ValueError(f"several processes cannot write below a folder named {path.parent.name}")
    with tempfile.TemporaryDirectory(prefix="dspark-") as directory:
        link = Path(directory) / "units"
        link.symlink_to(path.parent, target_is_directory=True)
        yield link / path.name


def open_piece(unit: Path, piece: Piece):
    """The piece as a TensorStore, its shape and dtype checked. Raises one of UNREADABLE."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{unit.absolute()}/"}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{piece.leaf.name}/"},
    }
    store = ts.open(spec, open=True, read=True).result()
    if store.shape != piece.shape or store.dtype.numpy_dtype != jnp.dtype(piece.leaf.dtype):
        raise ValueError(
            f"it is {store.dtype.name} {list(store.shape)}, the manifest says "
            f"{piece.leaf.dtype} {list(piece.shape)}"
        )
    return store


def faults(unit: Path, pieces: Iterable[Piece], checksums: dict[str, int]) -> list[str]:
    """Reads pieces of a unit again; what is not what was to be written (checksums by leaf name)."""
    found = []
    for piece in pieces:
        name, where = piece.leaf.name, f"{UNITS}/{unit.name}"
        try:
            values = open_piece(unit, piece).read().result()
        except UNREADABLE as error:
            found.append(f"{name}: cannot be read in {where}: {_first_line(error)}")
            continue
        if checksum(values, piece.leaf.shape, piece.origin) != checksums[name]:
            found.append(f"{name}: {where} does not hold what was written")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a conversion wrote down."""
    try:
        if (other := no_file(path)) is not None:
            raise ValueError(f"this is {other}")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not understood ({error}); {AGAIN}") from error
    return value


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the conversion at `path`. Without one, raises CheckpointError that says what
    `path` is instead.
    """
    if not (path / MANIFEST).exists():
        raise CheckpointError(f"{path}: {_without_manifest(path)}")
    return read_object(path / MANIFEST)


def _without_manifest(path: Path) -> str:
    if not path.exists():
        return "no such directory"
    if not path.is_dir():
        return "a file; a converted checkpoint is a directory"
    if (path / STATE).exists():
        return (
            f"an unfinished conversion (no {MANIFEST}); run `dspark convert` again, it goes on "
            "where it stopped"
        )
    if (path / UNITS).is_dir():
        return f"a conversion that has lost its {MANIFEST}, which says what its arrays are; {AGAIN}"
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return "an official checkpoint, not a converted one; `dspark convert` makes one of it"
    return f"not a converted checkpoint (it has no {MANIFEST})"


def raise_damaged(path: Path, units: list[str], texts: list[str]) -> None:
    """One error for what is wrong with a conversion's units and with the texts beside them, none
    when nothing is.
    """
    remedy = AGAIN if units else "copy the files of the official checkpoint here"
    raise_checkpoint_error(f"{path}: damaged; {remedy}", [*units[:LONGEST_LIST], *texts])


def lost_files(path: Path, unit: str) -> list[str]:
    """What a unit of the conversion at `path` lacks: its directory, or Orbax's own metadata in
    it.
    """
    place = path / UNITS / unit
    if not place.is_dir():
        return [f"{UNITS}/{unit}: missing"]
    return [
        f"{UNITS}/{unit}: {name} is missing" for name in ORBAX_FILES if not (place / name).is_file()
    ]


def is_converted(path: str | Path) -> bool:
    """Whether `path` is the place of a conversion, finished or not, whole or not."""
    path = expanded(path)
    path = path.parent if os.path.isfile(path) and path.name in OWN_FILES else path
    # Of what cannot be looked at, these functions say no, and `open` says why.
    official = any(os.path.exists(path / name) for name in (SINGLE, INDEX))
    return os.path.isdir(path / UNITS) or (
        not official and any(os.path.exists(path / name) for name in (MANIFEST, STATE))
    )


class ConvertedCheckpoint:
    """An open converted checkpoint. Made by `open`.

    units: by name. checksums: (unit, leaf) -> checksum of what was written of the leaf there.
    source: what was converted, as `convert.fingerprint` describes it. source_path: the directory it
      was in, or None where an older version did not record it.
    texts: SHA-256 of config.json and, unless an older version left it out, tokenizer.json.
    """

    def __init__(
        self,
        path: Path,
        units: dict[str, Unit],
        checksums: dict[tuple[str, str], int],
        source: dict[str, Any],
        source_path: str | None,
        texts: dict[str, str],
    ):
        self.path, self.units, self.checksums = path, units, checksums
        self.source, self.source_path, self.texts = source, source_path, texts
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for unit in units.values():
            for piece in unit.pieces:
                self._pieces.setdefault(piece.leaf.name, []).append((unit.name, piece))

    @classmethod
    def open(cls, path: str | Path) -> "ConvertedCheckpoint":
        """Reads the manifest. Raises CheckpointError when the conversion is unfinished or files are
        missing.
        """
        path = checkpoint_directory(path)
        manifest = read_manifest(path)
        try:
            if manifest["format"] != FORMAT:
                raise CheckpointError(
                    f"{path}: format {manifest['format']} of converted checkpoints, this version "
                    f"knows {FORMAT}; {AGAIN}"
                )
            understood = [understand(described) for described in manifest["units"]]
            source = manifest["source"], manifest.get("source_path")
            texts = {"config.json": manifest["source"]["config"], **manifest.get("texts", {})}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}/{MANIFEST}: not understood ({type(error).__name__}: {error}); {AGAIN}"
            ) from error
        units = {unit.name: unit for unit, _ in understood}
        raise_damaged(
            path,
            [f"{UNITS}/{name}: missing" for name in units if not (path / UNITS / name).is_dir()],
            [],
        )
        checksums = {
            (unit.name, leaf): value for unit, sums in understood for leaf, value in sums.items()
        }
        return cls(path, units, checksums, *source, texts)

    @property
    def config_dict(self) -> dict[str, Any]:
        return read_config(self.path)

    def leaves(self) -> dict[str, Leaf]:
        return {name: pieces[0][1].leaf for name, pieces in self._pieces.items()}

    def check(self, expected: Iterable[Leaf]) -> None:
        """The leaves must be those of the model, and whole; else one CheckpointError that lists
        every one that is not.
        """
        expected, held = {leaf.name: leaf for leaf in expected}, self.leaves()
        found = [f"missing: {name}" for name in expected if name not in held]
        found += [f"unexpected: {name}" for name in held if name not in expected]
        for name, leaf in held.items():
            want = expected.get(name, leaf)
            if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
                found.append(
                    f"wrong: {name}: is {leaf.dtype} {list(leaf.shape)}, expected {want.dtype} "
                    f"{list(want.shape)}"
                )
            elif not _cover([piece for _, piece in self._pieces[name]]):
                found.append(f"incomplete: {name}")
        raise_checkpoint_error(
            f"{self.path}: not what the model needs; {AGAIN}", found[:LONGEST_LIST]
        )

    def lost_files(self) -> list[str]:
        """What the units lack."""
        return [lost for name in self.units for lost in lost_files(self.path, name)]

    def changed_texts(self) -> list[str]:
        """Which of the texts beside the units differ from those of the official checkpoint."""
        found = []
        for name, recorded in self.texts.items():
            if (other := no_file(self.path / name)) is not None:
                found.append(f"{name}: this is {other}")
                continue
            try:
                if sha256((self.path / name).read_bytes()) != recorded:
                    found.append(f"{name}: is not what was converted")
            except OSError as error:
                found.append(f"{name}: cannot be read ({error.strerror})")
        return found

    def read(self, name: str, bounds: Bounds) -> np.ndarray:
        """A slice of a leaf in its stored dtype. Reads the chunks that the slice touches, and no
        others.
        """
        leaf = self._pieces[name][0][1].leaf
        out = np.empty([stop - start for start, stop in bounds], jnp.dtype(leaf.dtype))
        for unit, piece in self._pieces[name]:
            start, stop = (
                max(piece.start, bounds[piece.axis][0]),
                min(piece.stop, bounds[piece.axis][1]),
            )
            if start < stop:
                at = [slice(*b) for b in bounds]
                at[piece.axis] = slice(start - piece.start, stop - piece.start)
                to = [slice(None)] * len(bounds)
                to[piece.axis] = slice(start - bounds[piece.axis][0], stop - bounds[piece.axis][0])
                try:
                    out[tuple(to)] = (
                        open_piece(self.path / UNITS / unit, piece)[tuple(at)].read().result()
                    )
                except UNREADABLE as error:
                    raise CheckpointError(
                        f"{self.path}: {UNITS}/{unit}: {name} cannot be read "
                        f"({_first_line(error)}); {AGAIN}"
                    ) from error
        return out

    def verify(self, unit: str) -> list[str]:
        """Reads a whole unit again and compares it with the recorded checksums; returns what is
        wrong, by name.
        """
        pieces = self.units[unit].pieces
        sums = {piece.leaf.name: self.checksums[unit, piece.leaf.name] for piece in pieces}
        return faults(self.path / UNITS / unit, pieces, sums)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cover(pieces: list[Piece]) -> bool:
    """Whether pieces of one leaf are the whole of it."""
    pieces = sorted(pieces, key=lambda piece: piece.start)
    ends = [0, *(piece.stop for piece in pieces)]
    return (
        len({(piece.leaf, piece.axis) for piece in pieces}) == 1
        and [piece.start for piece in pieces] == ends[:-1]
        and ends[-1] == pieces[0].leaf.shape[pieces[0].axis]
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def quiet_orbax() -> None:
    """Silences Orbax, which logs every save of every unit; a conversion has thousands."""
    logging.getLogger("absl").setLevel(logging.ERROR)
