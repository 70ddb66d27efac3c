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
from dspark_jax.decode.engine import as_data
from dspark_jax.decode.programs import prefill_program, rounds_program
from dspark_jax.decode.sampling import Choice
from dspark_jax.decode.state import Chunk, RoundState, Settings, Variant
from dspark_jax.errors import ConfigError
from dspark_jax.model.dspark import DSpark, make_limits, new_cache
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import ShapeSource
from dspark_jax.runtime.backend import compiling_for
from dspark_jax.runtime.sharding import (
    DATA,
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
    """Abstract arguments of the programs, placed on the mesh. A prompt is prefilled by itself on
    each row of the data axis; the rounds are of all streams.
    """

    def __init__(self, config: ModelConfig, mesh, context: int, streams: int):
        self.config, self.mesh, self.streams = config, mesh, streams
        numerics = Numerics("bfloat16", True, mesh)
        source = ShapeSource(
            "bfloat16", packed_experts=True, sharding=functools.partial(parameter_sharding, mesh)
        )
        self.graphdef, self.state = nnx.split(DSpark(config, numerics, source))
        self.limits = make_limits(config, context, None)
        self.cache, self.stage = (self._cache(n) for n in (streams, mesh.shape[DATA]))

    def _cache(self, streams: int):
        cache = jax.eval_shape(
            lambda: new_cache(
                self.config, streams, self.limits.max_seq_len, self.limits.rows, jnp.bfloat16
            )
        )
        return jax.tree.map(self._placed, cache, cache_shardings(self.mesh, cache))

    def _placed(self, leaf, where=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where or replicated(self.mesh))

    def _of_streams(self, streams: int, *shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        where = NamedSharding(self.mesh, stream_spec(self.mesh, streams))
        return jax.ShapeDtypeStruct((streams, *shape), dtype, sharding=where)

    def cache_parts(self) -> set[str]:
        """What the parts of the caches on one device are called in compiled text,
        "bf16[2,8,16384,512]" say.
        """

        def name(leaf):
            sizes = leaf.sharding.shard_shape(leaf.shape)
            return f"{_SHORT[leaf.dtype.name]}[{','.join(map(str, sizes))}]"

        leaves = jax.tree.leaves((self.cache, self.stage))
        return {name(leaf) for leaf in leaves if leaf.ndim > 1}

    def programs(self) -> dict:
        """Name -> (function, donated argument, arguments): those that `generate` runs."""
        prefill = prefill_program(self.graphdef, self.mesh, likely=None, scored=False)
        programs = {PROGRAMS[0]: (prefill, 1, self._prefill_arguments())}
        config = jax.tree.map(
            lambda number: self._placed(as_data(number)), gate_config.GateConfig()
        )
        limits = (self._placed(jax.ShapeDtypeStruct((), dtype)) for dtype in (jnp.int32, jnp.bool_))
        settings = self._settings(self.streams)
        arguments = (self.state, config, settings, self.cache, self._round_state(), *limits)
        for name in PROGRAMS[1:]:
            variant = Variant(name.removeprefix("rounds, "))
            program = rounds_program(self.graphdef, self.mesh, self.limits, variant)
            programs[name] = (program, 3, arguments)
        return programs

    def _prefill_arguments(self) -> tuple:
        rows, size = self.mesh.shape[DATA], self.limits.prefill_chunk
        chunk = Chunk(
            fresh=self._of_streams(rows, dtype=jnp.bool_),
            tokens=self._of_streams(rows, size),
            valid=self._of_streams(rows),
            following=self._of_streams(rows, size),
            remaining=self._of_streams(rows),
        )
        return self.state, self.stage, self._settings(rows), chunk

    def _settings(self, streams: int) -> Settings:
        bias = self._of_streams(streams, self.config.vocab_size, dtype=jnp.float32)
        scale = self._of_streams(streams, self.config.dspark_block_size, dtype=jnp.float32)
        return Settings(Choice(bias, None), self._of_streams(streams, 8), scale, scale)

    def _round_state(self) -> RoundState:
        rows = NamedSharding(self.mesh, stream_spec(self.mesh, self.streams))
        gate_state = jax.tree.map(
            lambda leaf: self._placed(leaf, rows),
            jax.eval_shape(lambda: gate.init(gate_config.GateConfig(), self.streams)),
        )
        return RoundState(
            cache=None,
            anchor=self._of_streams(self.streams),
            margin=self._of_streams(self.streams, dtype=jnp.float32),
            remaining=self._of_streams(self.streams),
            done=self._of_streams(self.streams, dtype=jnp.bool_),
            faulty=self._of_streams(self.streams),
            gate=gate_state,
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
