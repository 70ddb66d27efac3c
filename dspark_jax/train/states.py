"""States of a training run on disk: Orbax checkpoints, one folder a step; the newest stays.

    RUN/NAME/120/     {"params": {path: array}, "optimiser": {number of the leaf: array}}

Orbax writes beside the place and renames, so a run that is killed leaves the state before.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    import orbax.checkpoint as ocp

    leaves = jax.tree.leaves(state.optimiser)
    tree = {"params": state.params, "optimiser": {str(i): leaf for i, leaf in enumerate(leaves)}}
    place = path.absolute() / str(state.step)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(place, jax.tree.map(np.asarray, tree))
    except (OSError, ValueError) as error:  # ValueError: TensorStore's, of a full disk too
        raise CheckpointError(
            f"{place}: the state cannot be written ({_first_line(error)}); "
            f"{_free(path):,} bytes are free. The state before is kept: make room, and the same "
            "command goes on from there"
        ) from error
    for each in path.glob("*"):
        if each.name != place.name:
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
    import orbax.checkpoint as ocp

    step = newest(path)
    if step is None:
        raise ConfigError(f"{path}: there is no state in it; run the stage `{path.name}` first")
    place = path.absolute() / str(step)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(place), step
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{place}: the state cannot be read ({_first_line(error)}); remove it to begin again"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _free(path: Path) -> int:
    existing = next(each for each in [path, *path.absolute().parents] if each.exists())
    return shutil.disk_usage(existing).free
