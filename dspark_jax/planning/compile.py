"""Compiles the full-size programs for a TPU topology on a machine without one, from shapes alone:
no weights, no device.

What the compiler says about memory here is what it would say there.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from dspark_jax.config import ModelConfig
from dspark_jax.decode import gate, gate_config
from dspark_jax.decode import round as rounds
from dspark_jax.decode.engine import as_data, prefill_program, rounds_program
from dspark_jax.errors import ConfigError
from dspark_jax.model.dspark import DSpark, make_limits, new_cache
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import ShapeSource
from dspark_jax.runtime.backend import compiling_for
from dspark_jax.runtime.sharding import (
    cache_shardings,
    make_mesh,
    parameter_sharding,
    replicated,
    stream_spec,
)

PROGRAMS = ("prefill chunk", "rounds, sequential", "rounds, block")
_SHORT = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
# A TPU compiler without a TPU asks the machine for these, and finds nothing.
_NO_MACHINE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}


def topology_devices(topology: str) -> list:
    """The devices of a TPU topology such as "v5p:2x2x1". Raises ConfigError without the extra
    `tpu-aot`.
    """
    from jax.experimental import topologies

    for name, value in _NO_MACHINE.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # which type depends on what is missing
        raise ConfigError(
            f"--compile cannot reach a TPU compiler for {topology} ({error}); install the extra: "
            "pip install 'dspark-jax[tpu-aot]'"
        ) from error


def compile_programs(
    config: ModelConfig,
    topology: str,
    mesh_sizes: tuple[int, int],
    context: int,
    streams: int,
    only: Collection[str] = PROGRAMS,
) -> dict:
    """Compiles programs of PROGRAMS; name -> seconds, bytes per device, and the number of copies of
    a cache in the compiled text.
    """
    mesh = make_mesh(*mesh_sizes, devices=topology_devices(topology))
    with compiling_for("tpu"):
        shapes = _Shapes(config, mesh, context, streams)
        return {
            name: _compile(*program, shapes.cache_parts())
            for name, program in shapes.programs().items()
            if name in only
        }


class _Shapes:
    """Abstract arguments of the programs, placed on the mesh."""

    def __init__(self, config: ModelConfig, mesh, context: int, streams: int):
        self.config, self.mesh, self.streams = config, mesh, streams
        numerics = Numerics("bfloat16", True, mesh)
        source = ShapeSource(
            "bfloat16", packed_experts=True, sharding=functools.partial(parameter_sharding, mesh)
        )
        self.graphdef, self.state = nnx.split(DSpark(config, numerics, source))
        self.limits = make_limits(config, context, None)
        cache = jax.eval_shape(
            lambda: new_cache(config, streams, context, self.limits.rows, jnp.bfloat16)
        )
        self.cache = jax.tree.map(self._placed, cache, cache_shardings(mesh, cache))

    def _placed(self, leaf, where=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where or replicated(self.mesh))

    def cache_parts(self) -> set[str]:
        """What the parts of the cache on one device are called in compiled text,
        "bf16[2,8,16384,512]" say.
        """

        def name(leaf):
            sizes = leaf.sharding.shard_shape(leaf.shape)
            return f"{_SHORT[leaf.dtype.name]}[{','.join(map(str, sizes))}]"

        return {name(leaf) for leaf in jax.tree.leaves(self.cache) if leaf.ndim > 1}

    def programs(self) -> dict:
        """Name -> (function, donated argument, arguments): those that `generate` runs."""
        ints = lambda *shape: self._placed(jax.ShapeDtypeStruct(shape, jnp.int32))
        prefill = (
            self.state,
            self.cache,
            ints(self.streams, self.limits.prefill_chunk),
            ints(self.streams),
            ints(self.streams),
            ints(8),
        )
        programs = {PROGRAMS[0]: (prefill_program(self.graphdef, self.mesh), 1, prefill)}
        config = jax.tree.map(
            lambda number: self._placed(as_data(number)), gate_config.GateConfig()
        )
        arguments = (self.state, config, self._round_state(), ints(8), ints())
        for name in PROGRAMS[1:]:
            mode = name.removeprefix("rounds, ")
            programs[name] = (
                rounds_program(self.graphdef, self.mesh, self.limits, mode),
                2,
                arguments,
            )
        return programs

    def _round_state(self) -> rounds.RoundState:
        rows = NamedSharding(self.mesh, stream_spec(self.mesh, self.streams))
        vector = lambda dtype: self._placed(jax.ShapeDtypeStruct((self.streams,), dtype), rows)
        gate_state = jax.tree.map(
            lambda leaf: self._placed(leaf, rows),
            jax.eval_shape(lambda: gate.init(gate_config.GateConfig(), self.streams)),
        )
        return rounds.RoundState(
            self.cache,
            vector(jnp.int32),
            vector(jnp.float32),
            vector(jnp.int32),
            vector(jnp.bool_),
            vector(jnp.int32),
            gate_state,
        )


def _compile(function, donated: int, arguments, cache_parts: set[str]) -> dict:
    started = time.perf_counter()
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {
        "seconds": time.perf_counter() - started,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "peak_bytes": peak,
        "cache_copies": count_copies(compiled.as_text(), cache_parts),
    }


def count_copies(text: str, shapes: set[str]) -> int:
    """How many instructions of a compiled program copy an array of one of these shapes within the
    device's memory.

    Moves to and from the chip's own memory, which is space 1 in the text, are how small arrays are
    read and written: not counted.
    """
    copies = re.findall(r"= \(?((\w+\[[\d,]*\])[^\n=]*) copy(?:-start)?\(", text)
    return sum(shape in shapes and "S(1)" not in types for types, shape in copies)
