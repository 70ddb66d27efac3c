"""The training loop that both stages share: data parallel, resumable, the same numbers whether
interrupted or not.

A stage gives a loss over parameters and a batch that is a pure function of the step. The state
(parameters, optimiser state, step) is kept by states.py.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.errors import ConfigError, NumericsError
from dspark_jax.loading.host_memory import available_memory
from dspark_jax.runtime import files
from dspark_jax.runtime.interrupts import deferred_interrupts, watch_interrupts
from dspark_jax.train import quantise, states
from dspark_jax.train.states import Params, State


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


def data_mesh(devices: int | None = None) -> Mesh:
    """The first devices (None: all) along "data"."""
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def fit(
    task: Task,
    params: Params,
    path: Path,
    report: Callable[[int, dict], None],
    save_every: float = 120.0,
    stop: int | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """Trains `task` from the newest state in the folder `path`, where there is one, else from
    `params`; -> the final parameters (not passed through their storage).

    report(step, measures) is called after every step with host arrays. Saves every `save_every`
    seconds, at the end, on Ctrl-C.
    stop: end before this step and save, as if interrupted. mesh: see `data_mesh`.

    Raises ConfigError where a step does not fit in memory, NumericsError where the loss is no
    number.
    """
    mesh = mesh or data_mesh()
    state = State(
        jax.tree.map(jnp.copy, params), jax.jit(task.optimiser.init)(params)
    )  # a copy: steps give their input away
    if states.newest(path) is not None:
        state = states.load(path, state)
    same = NamedSharding(mesh, PartitionSpec())
    state.params, state.optimiser = jax.device_put((state.params, state.optimiser), same)
    frozen = jax.device_put(task.frozen, same)
    end, saved = min(task.steps, task.steps if stop is None else stop), time.monotonic()
    if state.step >= end:
        return state.params

    def arguments(state):
        spread = NamedSharding(mesh, PartitionSpec("data"))
        batch = jax.device_put(task.batch(state.step), spread)
        return state.params, state.optimiser, frozen, batch, jnp.asarray(state.step)

    with naming_what_to_lower(), deferred_interrupts():
        needed = {state.step >= task.quantise_from, end > task.quantise_from}
        programs = {kind: make_step(task, mesh, kind).lower(*arguments(state)) for kind in needed}
        programs = {
            kind: fitting(lowered.compile(), mesh.size) for kind, lowered in programs.items()
        }
    # In the middle of a step its arrays are given away: a step is finished first.
    with watch_interrupts(at_once=False) as interrupt:
        while state.step < end and not interrupt.seen:
            with naming_what_to_lower():
                run = programs[state.step >= task.quantise_from]
                params, optimiser, measures = run(*arguments(state))
                measures = jax.device_get(measures)
            state = State(params, optimiser, state.step + 1)
            if not np.isfinite(measures["loss"]):
                raise NumericsError(
                    f"{task.name}: the loss is {measures['loss']} at step {state.step}; lower "
                    "the rates"
                )
            report(state.step, measures)
            if time.monotonic() - saved > save_every:
                states.save(path, state)
                saved = time.monotonic()
        states.save(path, state)
    if interrupt.seen:
        raise KeyboardInterrupt
    return state.params


LOWER = "lower --rows, --length or, of a drafter, --anchors"


@contextlib.contextmanager
def naming_what_to_lower() -> Iterator[None]:
    """Where a device has no more memory, what jax says of it becomes a ConfigError that helps."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0][:200]
        raise ConfigError(f"a training step does not fit in memory ({first}); {LOWER}") from error


def fitting(program, devices: int):
    """The compiled step. Raises ConfigError where a CPU's memory is too small for it: there the
    system would end the process without a word. devices: how many of them share the memory.
    """
    if jax.default_backend() == "cpu" and (sizes := program.memory_analysis()) is not None:
        needed, left = sizes.temp_size_in_bytes * devices, available_memory()
        if needed > left:
            raise ConfigError(
                f"a training step does not fit in memory: it needs {needed / 1e9:.1f} GB beside "
                f"what is loaded, {left / 1e9:.1f} GB are available; {LOWER}"
            )
    return program


class Log:
    """Appends one JSON object a step to a file. What it holds of steps that are to come again is
    dropped.
    """

    def __init__(self, path: Path, done: int = 0):
        """done: the steps that the run goes on from."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= done]
        with files.naming(path):
            files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = path.open("a")

    def write(self, **values) -> None:
        with files.naming(self._path):
            self._file.write(json.dumps({k: rounded(v) for k, v in values.items()}) + "\n")
            self._file.flush()


def read_log(path: Path) -> list[dict]:
    """Whole lines of a log; none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def rounded(value):
    """Four places, as JSON can say it: None for what is no number."""
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if value is None or isinstance(value, (int, str)):
        return value
    return round(float(value), 4) if np.isfinite(value) else None
