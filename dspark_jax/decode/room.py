"""Whether the streams of a request fit into memory, before anything is compiled for them."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.decode.request import Request
from dspark_jax.errors import ConfigError
from dspark_jax.loading.host_memory import available_memory
from dspark_jax.loading.load import Model
from dspark_jax.model.dspark import Limits, new_cache
from dspark_jax.runtime.backend import on_cpu

SHARE = 0.9  # of what is available; the rest is for what a step computes
_GIB = 1 << 30


def check_room(model: Model, request: Request) -> None:
    """Raises ConfigError, saying how many would fit, where the caches of so many streams do not."""
    free = free_memory(model)
    if free is None:
        return
    one = _cache_bytes(model.config, model.limits, model.numerics.dtype)
    if caches_of(request.streams) * one > SHARE * free:
        most = int(SHARE * free // one)
        advice = f"at most {max(1, most - 1)} fit" if most else "not even one fits"
        raise ConfigError(
            f"streams: {request.streams} streams on each device need "
            f"{caches_of(request.streams) * one / _GIB:.3g} GiB for their caches, of max_seq_len "
            f"{model.limits.max_seq_len}, and {free / _GIB:.3g} GiB are available: {advice}; ask "
            "for fewer streams, or load with a smaller max_seq_len"
        )


def caches_of(streams: int) -> int:
    """Caches of one stream that a device holds: beside several, the one that prompts are prefilled
    in.
    """
    return streams + (streams > 1)


def free_memory(model: Model) -> int | None:
    """Bytes that each device of the mesh still has for itself; None where it does not tell."""
    devices = [d for d in model.mesh.devices.flat if d.process_index == jax.process_index()]
    if on_cpu():  # they share the machine's
        return available_memory() // len(devices)
    told = [device.memory_stats() or {} for device in devices]
    free = [stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0) for stats in told]
    return None if min(free) == math.inf else int(min(free))


@functools.cache
def _cache_bytes(config: ModelConfig, limits: Limits, dtype: str) -> int:
    """Of the cache of one stream."""
    shapes = jax.eval_shape(
        lambda: new_cache(config, 1, limits.max_seq_len, limits.rows, jnp.dtype(dtype))
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
