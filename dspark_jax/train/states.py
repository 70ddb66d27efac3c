"""States of a training run on disk: Orbax checkpoints, one folder a step; the newest stays.

    RUN/NAME/120/     {"params": {path: array}, "optimiser": {number of the leaf: array}}

Orbax writes beside the place and renames, so a run that is killed leaves the state before.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.orbax_io import without_patterns
from dspark_jax.errors import CheckpointError, ConfigError

Params = dict[str, jax.Array]


@dataclass
class State:
    """Everything that a resumed run needs. step: how many steps are done."""

    params: Params
    optimiser: Any
    step: int = 0


def newest(path: Path) -> int | None:
    """The step of the newest state in a folder."""
    steps = [int(each.name) for each in path.glob("*") if each.name.isdecimal()]
    return max(steps, default=None)


def save(path: Path, state: State) -> None:
    """Writes a state into the folder `path`; older ones are removed when it is whole.

    Raises CheckpointError where that fails, on a full disk say; the older ones stay.
    """
    leaves = jax.tree.leaves(state.optimiser)
    tree = {"params": state.params, "optimiser": {str(i): leaf for i, leaf in enumerate(leaves)}}
    place = path.absolute() / str(state.step)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            with _orbax(place) as (checkpointer, plain):
                checkpointer.save(plain, jax.tree.map(np.asarray, tree))
    except (OSError, ValueError) as error:  # ValueError: TensorStore's, of a full disk too
        for left in path.glob(f"{place.name}.*"):  # what Orbax had begun
            shutil.rmtree(left, ignore_errors=True)
        raise CheckpointError(
            f"{place}: the state cannot be written ({_reason(error)}); {_free(path):,} bytes are "
            "free. The state before is kept: make room, and the same command goes on from there"
        ) from error
    for each in path.glob("*"):  # older states, and what Orbax left of one that it did not finish
        if each.name != place.name and each.name.partition(".")[0].isdecimal():
            shutil.rmtree(each, ignore_errors=True)


def load(path: Path, like: State) -> State:
    """The newest state of a folder; `like` gives the structure. Raises ConfigError where it is of
    another model or optimiser.
    """
    arrays, step = _restore(path)
    leaves, treedef = jax.tree.flatten(like.optimiser)
    optimiser = [arrays["optimiser"].get(str(i)) for i in range(len(leaves))]
    if any(new is None or np.shape(new) != np.shape(old) for new, old in zip(optimiser, leaves)):
        raise ConfigError(f"{path}: made by another optimiser; give another --run, or remove it")
    params = _fitting(path, arrays["params"], like.params)
    return State(params, jax.tree.unflatten(treedef, map(jnp.asarray, optimiser)), step)


def load_params(path: Path, like: Params) -> Params:
    """The parameters alone. Raises ConfigError that names those that do not fit."""
    return _fitting(path, _restore(path)[0]["params"], like)


def _fitting(path: Path, found: dict[str, np.ndarray], like: Params) -> Params:
    wrong = [
        name for name, old in like.items() if name not in found or found[name].shape != old.shape
    ]
    if wrong:
        raise ConfigError(
            f"{path}: made by another model, these parameters differ: {', '.join(wrong)}; give "
            "another --run, or remove it"
        )
    return {name: jnp.asarray(found[name]) for name in like}


def _restore(path: Path) -> tuple[dict, int]:
    step = newest(path)
    if step is None:
        raise ConfigError(f"{path}: there is no state in it; run the stage `{path.name}` first")
    place = path.absolute() / str(step)
    try:
        with _orbax(place) as (checkpointer, plain):
            return checkpointer.restore(plain), step
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{place}: the state cannot be read ({_reason(error)}); remove it to begin again"
        ) from error


@contextlib.contextmanager
def _orbax(place: Path):
    """-> its checkpointer, and `place` by a name that it does not take for a pattern. Within it
    Orbax says nothing: what fails is raised.
    """
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with without_patterns(place) as plain, ocp.PyTreeCheckpointer() as checkpointer:
            yield checkpointer, plain
    finally:
        logger.setLevel(before)


def _reason(error: Exception) -> str:
    full = os.strerror(errno.ENOSPC)
    if full in str(error):  # after several lines of where
        return full
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _free(path: Path) -> int:
    existing = next(each for each in [path, *path.absolute().parents] if each.exists())
    return shutil.disk_usage(existing).free
