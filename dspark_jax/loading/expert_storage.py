"""How the routed experts are held: dequantised or packed FP4. Chosen when a model is loaded, shown
by `dspark inspect`.

Accelerators hold them packed; their kernels unpack. On CPU dequantised experts save the time of
unpacking (benchmarks/moe_fp4.py) and take 7.5 times the memory in float32 (FP4 values are exact in
it), so they are dequantised where the whole model then fits:

    needed     every array of the model on this process's devices, one stream's cache on each, and
               the largest array once more, which is in memory twice while it is placed
    available  host_memory.available_memory()

needed <= SHARE * available: dequantised, else packed. What processes on one machine need adds up,
and one answer holds for all processes.

The environment variable DSPARK_EXPERT_STORAGE, "dequantised" or "packed", decides instead. It is
worth setting where bits must not depend on how much memory was left: experts wider than
pallas_kernels.xla.WIDEST_GEMM add their products in another order when packed. Several processes
must all have the same setting.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import socket
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.errors import ConfigError
from dspark_jax.loading import host_memory
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import ShapeSource, Source
from dspark_jax.runtime import sharding
from dspark_jax.runtime.backend import on_cpu, target

DEQUANTISED, PACKED = "dequantised", "packed"
VARIABLE = "DSPARK_EXPERT_STORAGE"
SHARE = 0.8  # of the available memory; the rest is for programs, activations and other processes
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ExpertStorage:
    """A choice and its reason.

    kind: "dequantised" or "packed". why: the reason, for people. dequantised_bytes, packed_bytes:
      what this process needs either way. available_bytes: what it could have. limit_bytes: how much
      of that it would take at most.
    """

    kind: str
    why: str
    dequantised_bytes: int
    packed_bytes: int
    available_bytes: int
    limit_bytes: int

    @property
    def packed(self) -> bool:
        return self.kind == PACKED

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def choose(build: Callable[[Source], nnx.Module], numerics: Numerics, cache: Any) -> ExpertStorage:
    """How to hold the experts of the model build(source). cache: shapes of the caches that a
      device is to have room for.

    Raises ConfigError for another value of the environment variable. On a mesh of several processes
      all must call it.
    """
    beside = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
    ) * _devices(numerics.mesh)
    dequantised, packed = (
        needed_bytes(build, numerics, kind == PACKED) + beside for kind in (DEQUANTISED, PACKED)
    )
    available = host_memory.available_memory()
    answer = functools.partial(
        ExpertStorage,
        dequantised_bytes=dequantised,
        packed_bytes=packed,
        available_bytes=available,
        limit_bytes=int(SHARE * available),
    )
    if not on_cpu():
        return answer(PACKED, f"the kernels for {target()} unpack them")
    if setting := os.environ.get(VARIABLE, ""):
        if setting not in (DEQUANTISED, PACKED):
            raise ConfigError(
                f"{VARIABLE}: {setting!r}; use {DEQUANTISED!r} or {PACKED!r}, or unset it to "
                "choose by memory"
            )
        return answer(setting, f"set by {VARIABLE}")
    if fits(memory_of_processes(numerics.mesh, dequantised, available)):
        return answer(DEQUANTISED, "the model then fits in memory")
    return answer(PACKED, "dequantised, the model would not fit in memory")


def needed_bytes(build: Callable[[Source], nnx.Module], numerics: Numerics, packed: bool) -> int:
    """Bytes of the model's arrays on this process's devices, and of the largest one once more, as
    it is read.
    """
    cut = functools.partial(sharding.parameter_sharding, numerics.mesh)
    module = build(ShapeSource(numerics.dtype, packed, cut))
    arrays = jax.tree.leaves(nnx.state(module))
    held = [math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays]
    return sum(held) * _devices(numerics.mesh) + max(held)


def _devices(mesh: Mesh) -> int:
    return sum(device.process_index == jax.process_index() for device in mesh.devices.flat)


def memory_of_processes(mesh: Mesh, needed: int, available: int) -> list[tuple[int, int, int]]:
    """(machine, needed, available) of every process of the mesh; the machine is a number made from
    its name. Bytes, or whole MiB where several processes exchange them.
    """
    machine = zlib.crc32(socket.gethostname().encode()) >> 1
    if not mesh.is_multi_process:
        return [(machine, needed, available)]
    mine = np.array([[jax.process_index(), machine, -(-needed // MIB), available // MIB]], np.int32)
    rows = NamedSharding(mesh, PartitionSpec((sharding.DATA, sharding.MODEL)))
    shared = jax.make_array_from_callback((mesh.size, mine.size), rows, lambda index: mine)
    of_all = np.unique(np.asarray(sharding.replicate(mesh, shared)), axis=0)
    return [tuple(map(int, row[1:])) for row in of_all]


def fits(processes: list[tuple[int, int, int]]) -> bool:
    """Whether on every machine all its processes fit. Each has measured what is available to all of
    them together.
    """
    for machine in {process[0] for process in processes}:
        _, needed, available = zip(*(process for process in processes if process[0] == machine))
        if sum(needed) > SHARE * min(available):
            return False
    return True
