"""calibration.json, beside a checkpoint: what makes probabilities of its drafter's scores. `dspark
calibrate` writes it (decode/calibrate.py), `load` reads it, and the gate goes by it. docs/gate.md
has the schema.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dspark_jax._version import __version__
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.paths import expanded, no_file
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.model.dspark import DSpark
from dspark_jax.runtime import files

FILE = "calibration.json"
FORMAT, VERSION = "dspark calibration", 1
_SMALL = 1 << 16  # elements; tensors of the drafter up to this size say which drafter it is


class Scale(NamedTuple):
    """Draft k's score s, a raw logit, becomes s / temperatures[k] + offsets[k], the logit of the
    probability that it is right, given those before it.

    temperatures: [K], above 0. offsets: [K], logits.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]


def raw(block: int) -> Scale:
    """The scale that changes nothing."""
    return Scale((1.0,) * block, (0.0,) * block)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """greedy: for streams at temperature 0. sampled: for those above it; fitted at 1."""

    greedy: Scale
    sampled: Scale

    def of(self, temperature: float) -> Scale:
        """The scale for streams of this sampling temperature."""
        return self.sampled if temperature > 0 else self.greedy


def drafter_identity(module: DSpark) -> str:
    """Eight hexadecimal digits that tell one drafter from another: a checksum of its small tensors,
    the confidence head among them. It does not depend on the mesh, nor on the dtype.
    """
    state = nnx.state(module.drafter)
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    total = 0
    for variable in leaves:
        declared, array = variable.get_metadata("declared"), variable.get_raw_value()
        if any(declared.axes) or declared.tensor == "head.weight" or array.size > _SMALL:
            continue  # cut on some mesh, or another part's
        total = zlib.crc32(np.asarray(jax.device_get(array)).astype(np.float32).tobytes(), total)
    return f"{total:08x}"


def write(path: str | Path, module: DSpark, block: int, fitted: dict[str, dict[str, Any]]) -> None:
    """fitted: "greedy" and "sampled", each a dict with `temperatures`, `offsets` and whatever is to
    be kept beside them. A file that is there is replaced in one step. Raises OSError.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": f"dspark-jax {__version__}",
        "drafter": drafter_identity(module),
        "block_size": block,
        **fitted,
    }
    files.write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def find(asked, directory: Path, module: DSpark, block: int) -> Calibration | None:
    """The calibration for `load`. asked: None: the file beside the checkpoint, if there is one;
    False: none; else the path of a file.

    One that was made for another drafter is not used. Beside the checkpoint that is a warning,
    since the checkpoint may have been replaced; where it was asked for, a ConfigError. Raises
    CheckpointError for a file that is damaged.
    """
    if asked is False:
        return None
    path = directory / FILE if asked is None else _asked_path(asked)
    if asked is None and not os.path.lexists(path):
        return None
    content = _read(path)
    calibration, other = _checked(path, content), None
    if content["drafter"] != drafter_identity(module):
        other = "another drafter than this checkpoint's"
    elif len(calibration.greedy.temperatures) != block:
        other = f"a draft block of {len(calibration.greedy.temperatures)}, not of {block}"
    if other is None:
        return calibration
    said = f"{path}: made for {other}"
    if asked is not None:
        raise ConfigError(f"{said}; run dspark calibrate")
    warnings.warn(f"{said}, so it is not used; run dspark calibrate, or remove it", stacklevel=3)
    return None


def _asked_path(asked) -> Path:
    if asked is True:
        raise ConfigError("calibration: True is no path; None takes the checkpoint's, False none")
    return expanded(asked)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    if (other := no_file(path)) is not None:
        raise CheckpointError(f"{path}: this is {other}")
    try:
        return read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _checked(path: Path, content) -> Calibration:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: this is not a calibration that dspark calibrate wrote")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {content.get('version')!r}, this library reads {VERSION}; run dspark "
            "calibrate"
        )
    if not isinstance(content.get("drafter"), str):
        raise CheckpointError(f"{path}: drafter: {content.get('drafter')!r} is not a checksum")
    block = content.get("block_size")
    return Calibration(
        *(scale(f"{path}: {name}", content.get(name), block) for name in ("greedy", "sampled"))
    )


def scale(where: str, values, block: int) -> Scale:
    """{"temperatures": [...], "offsets": [...]}, of `block` numbers each, as a Scale. Raises
    CheckpointError, beginning with `where`, for what is none.
    """
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: expected an object with temperatures and offsets")
    columns = []
    for name in Scale._fields:
        column = values.get(name)
        if not isinstance(column, list) or len(column) != block or not all(map(_finite, column)):
            raise CheckpointError(f"{where}: {name}: expected {block} finite numbers")
        if name == "temperatures" and min(column) <= 0:
            raise CheckpointError(f"{where}: {name}: {min(column)} is not above 0")
        columns.append(tuple(map(float, column)))
    return Scale(*columns)


def _finite(value) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < 1e30 and math.isfinite(value)
