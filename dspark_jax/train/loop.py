"""The training loop that both stages share: data parallel, resumable, the same numbers whether
interrupted or not.

A stage gives a loss over parameters and a batch that is a pure function of the step. The state
(parameters, optimiser state, step) is one safetensors file, replaced atomically.
"""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from dspark_jax.runtime.interrupts import watch_interrupts
from dspark_jax.train import quantise

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What a stage trains.

    loss(params, frozen, batch, quantised) -> (scalar, measures): measures is a tree of arrays,
    averaged over the data-parallel
      shards. frozen: arrays that it needs besides.
    batch(step) -> dictionary of arrays [B, ...]. storages: how the checkpoint stores each
    parameter, see quantise.py. after(params, measures, step) -> params: what changes outside the
    gradient (router balance).
    steps: how many; quantise_from: the step from which parameters pass through their storage, and
      `quantised` is True.
    """

    name: str
    loss: Callable[[Params, Any, dict, bool], tuple[jax.Array, dict]]
    batch: Callable[[int], dict[str, np.ndarray]]
    optimiser: optax.GradientTransformation
    storages: dict[str, str]
    steps: int
    quantise_from: int
    after: Callable[[Params, dict, jax.Array], Params] = lambda params, measures, step: params
    frozen: Any = ()


@dataclasses.dataclass
class State:
    """Everything that a resumed run needs. step: how many steps are done."""

    params: Params
    optimiser: Any
    step: int = 0


def save(path: Path, state: State) -> None:
    """Writes `path` atomically."""
    arrays = {f"param.{name}": np.asarray(value) for name, value in state.params.items()}
    arrays |= {
        f"optimiser.{i}": np.asarray(leaf)
        for i, leaf in enumerate(jax.tree.leaves(state.optimiser))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    save_file({**arrays, "step": np.array(state.step)}, temporary)
    os.replace(temporary, path)


def load(path: Path, like: State) -> State:
    """Reads what `save` wrote; `like` gives the structure. ValueError when the file is of another
    model or optimiser.
    """
    params, (leaves, treedef) = load_params(path, like.params), jax.tree.flatten(like.optimiser)
    arrays = load_file(path)
    optimiser = [arrays.get(f"optimiser.{i}") for i in range(len(leaves))]
    if any(
        new is None or new.shape != np.shape(old)
        for new, old in zip(optimiser, leaves, strict=True)
    ):
        raise ValueError(
            f"{path}: made by another optimiser; give another --run folder or delete the file"
        )
    return State(
        params, jax.tree.unflatten(treedef, map(jnp.asarray, optimiser)), int(arrays["step"])
    )


def load_params(path: Path, like: Params) -> Params:
    """The parameters alone. FileNotFoundError names the stage to run, ValueError the parameters
    that do not fit.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the stage `{path.stem}` first")
    arrays = load_file(path)
    found = {name: arrays.get(f"param.{name}") for name in like}
    wrong = [
        name for name, old in like.items() if found[name] is None or found[name].shape != old.shape
    ]
    if wrong:
        raise ValueError(
            f"{path}: made by another model, these parameters differ: {', '.join(wrong)}; give "
            "another --run folder"
        )
    return jax.tree.map(jnp.asarray, found)


@functools.cache
def make_step(task: Task, mesh: Mesh, quantised: bool) -> Callable:
    """Compiled (params, optimiser state, frozen, batch, step) -> (params, optimiser state,
    measures). Donates the first two.
    """
    spread, same = PartitionSpec("data"), PartitionSpec()

    def gradients(params, frozen, batch):
        def loss(raw):
            return task.loss(
                quantise.parameters(raw, task.storages) if quantised else raw,
                frozen,
                batch,
                quantised,
            )

        (value, measures), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.lax.pmean((grads, {**measures, "loss": value}), "data")

    shared = jax.shard_map(
        gradients, mesh=mesh, in_specs=(same, same, spread), out_specs=same, check_vma=False
    )

    def step_once(params, optimiser, frozen, batch, step):
        grads, measures = shared(params, frozen, batch)
        updates, optimiser = task.optimiser.update(_spread(grads, mesh), optimiser, params)
        params = task.after(optax.apply_updates(params, updates), measures, step)
        return params, optimiser, measures

    return jax.jit(step_once, donate_argnums=(0, 1), out_shardings=NamedSharding(mesh, same))


def _spread(grads: Params, mesh: Mesh) -> Params:
    """Cuts stacks of experts [layers, E, N, K] over the devices: the optimiser's work on them is
    shared, not repeated.
    """

    def cut(w):
        if w.ndim < 4 or w.shape[1] % mesh.size:
            return w
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(None, "data")))

    return jax.tree.map(cut, grads)


def data_mesh() -> Mesh:
    """All devices along "data"."""
    return Mesh(np.array(jax.devices()), ("data",))


def fit(
    task: Task,
    params: Params,
    path: Path,
    report: Callable[[int, dict], None],
    save_every: float = 120.0,
    stop: int | None = None,
) -> Params:
    """Trains `task` from `path` if it exists, else from `params`; -> the final parameters (not
    passed through their storage).

    report(step, measures) is called after every step with host arrays. Saves every `save_every`
    seconds, at the end, on Ctrl-C.
    stop: end before this step and save, as if interrupted.
    """
    mesh = data_mesh()
    state = State(
        jax.tree.map(jnp.copy, params), jax.jit(task.optimiser.init)(params)
    )  # a copy: steps give their input away
    if path.exists():
        state = load(path, state)
    same = NamedSharding(mesh, PartitionSpec())
    state.params, state.optimiser = jax.device_put((state.params, state.optimiser), same)
    frozen = jax.device_put(task.frozen, same)
    steps = {False: make_step(task, mesh, False), True: make_step(task, mesh, True)}
    end, saved = min(task.steps, task.steps if stop is None else stop), time.monotonic()
    # In the middle of a step its arrays are given away: a step is finished first.
    with watch_interrupts(at_once=False) as interrupt:
        while state.step < end and not interrupt.seen:
            batch = jax.device_put(
                task.batch(state.step), NamedSharding(mesh, PartitionSpec("data"))
            )
            run = steps[state.step >= task.quantise_from]
            params, optimiser, measures = run(
                state.params, state.optimiser, frozen, batch, jnp.asarray(state.step)
            )
            state = State(params, optimiser, state.step + 1)
            measures = jax.device_get(measures)
            if not np.isfinite(measures["loss"]):
                raise FloatingPointError(
                    f"{task.name}: the loss is {measures['loss']} at step {state.step}; lower "
                    "the rates"
                )
            report(state.step, measures)
            if time.monotonic() - saved > save_every:
                save(path, state)
                saved = time.monotonic()
    save(path, state)
    if interrupt.seen:
        raise KeyboardInterrupt
    return state.params


class Log:
    """Appends one JSON object a step to a file."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, **values) -> None:
        rounded = {
            k: v if isinstance(v, (int, str)) else round(float(v), 4) for k, v in values.items()
        }
        self._file.write(json.dumps(rounded) + "\n")
        self._file.flush()
