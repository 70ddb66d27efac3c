"""Where every array lives and how devices work together: the mesh, the table from logical axes to
mesh axes, the collectives.

A mesh has two axes. Over "data" the streams are divided; over "model" the heads, output groups,
index heads, routed experts and the main model's vocabulary. Everything else is replicated. One
device is the mesh (1, 1).

Programs run under `on_mesh`: the code of the layers sees one device's part of every array, takes
sizes from what it sees, and communicates only where it calls `sum_over_model` or
`gather_over_model`. Called without `on_mesh`, it sees whole arrays and these return their argument;
training and tests of single parts do so.

Collectives of a step, all over "model" and no others (tests/runtime/test_sharding.py counts them in
the compiled text):
* embedding lookup: each device has a range of the vocabulary and gives zeros for the other ids
  (all-reduce);
* indexer scores: summed over index heads (all-reduce, one for each block of entries);
* attention's output projection: summed over output groups (all-reduce);
* routed experts, before the shared expert is added: summed over the experts' devices (all-reduce);
* main logits: joined from ranges of the vocabulary (all-gather);
* where a shard boundary cuts a quantisation block, as only tiny sizes do: the block's largest
  magnitude (all-reduce).

Rows of the data axis never wait for each other within a round, and their loops may end at different
counts. After a call of rounds they agree on the largest count; where they lie in several processes,
what the host needs to know is gathered (`fetch`).
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError
from dspark_jax.runtime.backend import require_device
from dspark_jax.runtime.scalars import plain

DATA, MODEL = "data", "model"

RULES = {
    "streams": DATA,
    "heads": MODEL,
    "groups": MODEL,
    "index_heads": MODEL,
    "experts": MODEL,
    "vocab": MODEL,
}

# What each logical axis of the parameters counts, as the config names it.
COUNTS = {
    "heads": "num_attention_heads",
    "groups": "o_groups",
    "index_heads": "index_n_heads",
    "experts": "n_routed_experts",
    "vocab": "vocab_size",
}


def make_mesh(data: int = 1, model: int = 1, devices=None) -> Mesh:
    """A mesh of data x model devices, the first ones of `devices` (None: all that there are, of all
    processes).

    The axes are Auto (`jax.make_mesh` makes Explicit ones by default): a program is one
    `jax.shard_map` over both axes, so there is nothing for shardings in types to decide, and small
    things on the host's side (commit, joining logits) need no annotations.

    Raises ConfigError for sizes that are no whole numbers of 1 or more, for more devices than there
    are, and for what is no list of devices.
    """
    if devices is None:
        require_device()
    devices = _checked_devices(jax.devices() if devices is None else devices)
    data, model = plain(data), plain(model)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in (data, model)):
        raise ConfigError(
            f"mesh: {data!r} and {model!r} are not two whole numbers, such as 1 and 4"
        )
    if data < 1 or model < 1:
        raise ConfigError(f"mesh: {data}x{model} is not a mesh; both sizes must be at least 1")
    if data * model > len(devices):
        raise ConfigError(
            f"mesh: {data}x{model} needs {data * model} devices; available: {len(devices)}"
        )
    return Mesh(
        np.array(devices[: data * model]).reshape(data, model),
        (DATA, MODEL),
        axis_types=(AxisType.Auto,) * 2,
    )


def _checked_devices(devices) -> list[jax.Device]:
    try:
        devices = list(devices)
    except TypeError:
        raise ConfigError(
            f"mesh: devices must be a list, such as jax.devices(), not {devices!r}"
        ) from None
    for device in devices:
        if not isinstance(device, jax.Device):
            raise ConfigError(
                f"mesh: {reprlib.repr(device)} is not a device; give a list, such as jax.devices()"
            )
    if len(set(devices)) < len(devices):
        raise ConfigError("mesh: a device is given twice")
    return devices


def parse_mesh(text: str) -> tuple[int, int]:
    """ "1x4" -> (1, 4): the sizes of the data and the model axis."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"mesh: {text!r} is not DATAxMODEL, such as 1x4")
    return int(parts[0]), int(parts[1])


@functools.cache
def single_device() -> Mesh:
    """The mesh (1, 1) of this process's first device."""
    return make_mesh(devices=jax.local_devices()[:1])


def check_mesh(mesh: Mesh, config: ModelConfig) -> None:
    """Raises ConfigError naming the axes of the mesh, or every size of the model that does not
    divide over it.
    """
    if not isinstance(mesh, Mesh) or mesh.axis_names != (DATA, MODEL):
        raise ConfigError(
            f"mesh: {mesh!r} is not a mesh with the axes {(DATA, MODEL)}; use "
            "dspark_jax.make_mesh(data, model)"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            "mesh: its axes must be Auto, and jax.make_mesh makes Explicit ones; use "
            "dspark_jax.make_mesh(data, model)"
        )
    check_divides(config, mesh.shape[MODEL], "mesh")


def check_divides(config: ModelConfig, shards: int, where: str) -> None:
    """Raises ConfigError, beginning with `where`, naming every size of the model that does not
    divide over `shards` devices.
    """
    wrong = [
        f"{key} is {getattr(config, key)}"
        for key in COUNTS.values()
        if getattr(config, key) % shards
    ]
    if wrong:
        raise ConfigError(
            f"{where}: the model axis has {shards} devices, over which these do not divide: "
            f"{', '.join(wrong)}"
        )


def check_streams(streams: int, rows: int, where: str) -> None:
    """Raises ConfigError, beginning with `where`, where several streams do not divide over the
    `rows` rows of the data axis.
    """
    if streams > 1 and streams % rows:
        raise ConfigError(
            f"{where}: {streams} streams do not divide over the {rows} devices of the data axis; "
            "use 1 or a multiple"
        )


def check_processes(mesh: Mesh) -> None:
    """Raises ConfigError, in all of the processes that run together alike, where one of them has no
    device in the mesh.
    """
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ConfigError(
            f"mesh: {mesh.shape[DATA]}x{mesh.shape[MODEL]} has no device of process "
            f"{', '.join(map(str, sorted(idle)))}; there are {jax.device_count()} devices in "
            f"{jax.process_count()} processes, use all of them"
        )


def parameter_spec(declared) -> PartitionSpec:
    """How the array of a parameters.Declaration is cut; the leading axis of stacked layers is
    whole.
    """
    axes = declared.held(declared.axes)
    axes = [RULES.get(axis) for axis in ((None, *axes) if declared.stacked else axes)]
    # One spelling for each way of cutting: jit takes P() and P(None) for different arguments.
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def parameter_specs(state: nnx.State):
    """How the parameters of a module are cut; one without a declaration is on every device."""

    def of(variable):
        declared = variable.get_metadata().get("declared")
        return PartitionSpec() if declared is None else parameter_spec(declared)

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def stream_axis(mesh: Mesh, streams: int) -> str | None:
    """The mesh axis that `streams` streams are divided over; None: a single stream is computed by
    every row of the mesh alike.

    Raises ConfigError if they do not divide.
    """
    check_streams(streams, mesh.shape[DATA], "mesh")
    return None if streams == 1 else RULES["streams"]


def stream_spec(mesh: Mesh, streams: int, axis: int = 0) -> PartitionSpec:
    """How an array is cut that has one axis over streams."""
    name = stream_axis(mesh, streams)
    return PartitionSpec(*[None] * axis, name) if name else PartitionSpec()


def cache_specs(mesh: Mesh, cache):
    """How a Cache (arrays or shapes) is cut: by streams, the only axis of the position and the
    second one of every other leaf.
    """
    streams = cache.position.shape[0]
    return jax.tree.map(lambda leaf: stream_spec(mesh, streams, min(leaf.ndim - 1, 1)), cache)


def cache_shardings(mesh: Mesh, cache):
    """A NamedSharding for every leaf of a Cache (arrays or shapes)."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_specs(mesh, cache))


def parameter_sharding(mesh: Mesh, declared) -> NamedSharding:
    """Of the array of a parameters.Declaration."""
    return NamedSharding(mesh, parameter_spec(declared))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def on_mesh(mesh: Mesh, function: Callable, in_specs, out_specs) -> Callable:
    """function as each device runs it on its own part of the arguments. Specs: trees of
    PartitionSpecs or prefixes of them.

    A result must be the same on devices that hold the same part of it; collectives see to it.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def model_shards() -> int:
    """Over how many devices arrays are cut; 1 outside `on_mesh`, where they are whole."""
    try:
        return jax.lax.axis_size(MODEL)
    except NameError:
        return 1


def model_index() -> jax.Array | int:
    """Which of these parts this device holds."""
    return jax.lax.axis_index(MODEL) if model_shards() > 1 else 0


def sum_over_model(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, MODEL) if model_shards() > 1 else x


def max_over_data(x: jax.Array) -> jax.Array:
    """The largest x of the rows of the data axis, whose loops of rounds may end at different
    counts.
    """
    return jax.lax.pmax(x, DATA) if jax.lax.axis_size(DATA) > 1 else x


def gather_over_model(x: jax.Array) -> jax.Array:
    """The parts of the last axis, joined."""
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True) if model_shards() > 1 else x


def replicate(mesh: Mesh, x):
    """x, an array, a tree of arrays or the shape of one, whole on every device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh))
    return _replicating(mesh)(x)


@functools.cache
def _replicating(mesh: Mesh):
    return jax.jit(lambda x: x, out_shardings=replicated(mesh))


def fetch(mesh: Mesh, tree):
    """The values of a tree of arrays on the host. Where streams lie with other processes, theirs
    are gathered first.
    """
    apart = mesh.is_multi_process and mesh.shape[DATA] > 1
    return jax.device_get(replicate(mesh, tree) if apart else tree)
