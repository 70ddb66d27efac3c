"""The compiled programs that streams run through, each for all devices of a mesh.

Each is compiled once per structure of the model and number of streams: prompt lengths, draft
lengths, and the numbers of gates, samplers and stop tokens are data.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from dspark_jax.decode import round as rounds
from dspark_jax.decode.report import packed
from dspark_jax.decode.state import Variant
from dspark_jax.model.cache import Cache
from dspark_jax.model.dspark import Limits
from dspark_jax.runtime.backend import jit
from dspark_jax.runtime.sharding import (
    cache_shardings,
    cache_specs,
    max_over_data,
    on_mesh,
    parameter_specs,
    stream_spec,
)

# A model's structure, see `Model.structure`.
Structure = tuple[nnx.GraphDef, jax.tree_util.PyTreeDef]


class Programs:
    """begin: a chunk of prompts. run: a call of rounds. seat: a cache of one stream into one of
    several. Each reuses the cache that it writes to.

    warm: the sizes that begin and run have been compiled for.
    """

    def __init__(
        self,
        structure: Structure,
        mesh: Mesh,
        limits: Limits,
        variant: Variant,
        likely: int | None,
        scored: bool,
    ):
        self.begin = _jitted_prefill(structure, mesh, likely, scored)
        self.run = _jitted_rounds(structure, mesh, limits, variant)
        self.seat = _jitted_seat(mesh)
        self.warm: set = set()


@functools.cache
def programs(
    structure: Structure,
    mesh: Mesh,
    limits: Limits,
    variant: Variant,
    likely: int | None = None,
    scored: bool = False,
) -> Programs:
    """Those of a model, shared by all that have its structure. likely, scored: of the prefill, see
    `rounds.begin`.
    """
    return Programs(structure, mesh, limits, variant, likely, scored)


def prefill_program(graphdef: nnx.GraphDef, mesh: Mesh, likely: int | None, scored: bool):
    """`rounds.begin` over the mesh: (state, cache, settings, chunk) -> cache, Begun. The same in
    every mode.
    """

    def device(state, *arguments):
        return rounds.begin(nnx.merge(graphdef, state), likely, scored, *arguments)

    def program(state, cache, settings, chunk):
        rows, cached = stream_spec(mesh, chunk.valid.shape[0]), cache_specs(mesh, cache)
        return on_mesh(mesh, device, (parameter_specs(state), cached, rows, rows), (cached, rows))(
            state, cache, settings, chunk
        )

    return program


def rounds_program(graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, variant: Variant):
    """`rounds.run` over the mesh: (state, gate config, settings, cache, round state without it,
    most, waiting) -> cache, round state without it, what they say (`report.packed`).

    What comes back is cut as what came in, else the next call would compile once more.
    """

    def device(state, config, settings, cache, small, *limit):
        before = small.replace(cache=cache)
        after, outputs, count = rounds.run(
            nnx.merge(graphdef, state), limits, variant, config, settings, before, *limit
        )
        small = after.replace(cache=None)
        return after.cache, small, packed(outputs, small, max_over_data(count))

    def program(state, config, settings, cache, small, most, waiting):
        streams, whole = small.anchor.shape[0], PartitionSpec()
        rows, cached = stream_spec(mesh, streams), cache_specs(mesh, cache)
        return on_mesh(
            mesh,
            device,
            (parameter_specs(state), whole, rows, cached, rows, whole, whole),
            (cached, rows, rows),
        )(state, config, settings, cache, small, most, waiting)

    return program


def seat_program(mesh: Mesh):
    """(cache, source, slots [R]) -> the cache in which, on row r of the data axis, the stream of
    `source` has the place slots[r] of that row; a number beyond its places leaves the row alone.

    source holds a stream for each of the R rows, or one for all.
    """

    def program(cache, source, slots):
        into, out_of = cache_specs(mesh, cache), cache_specs(mesh, source)
        row = stream_spec(mesh, slots.shape[0])
        return on_mesh(mesh, _seat, (into, out_of, row), into)(cache, source, slots)

    return program


def _seat(cache: Cache, source: Cache, slots: jax.Array) -> Cache:
    def put(whole, one):
        axis = min(whole.ndim - 1, 1)
        old = jax.lax.dynamic_slice_in_dim(whole, slots[0], 1, axis)
        new = jnp.where(slots[0] < whole.shape[axis], one, old)
        return jax.lax.dynamic_update_slice_in_dim(whole, new, slots[0], axis)

    return jax.tree.map(put, cache, source)


def one_stream(mesh: Mesh, cache: Cache, place: int) -> Cache:
    """The cache of the stream at this place, by itself, on every row of the mesh. A cache that has
    no other stream is handed on as it is.
    """
    if cache.position.shape[0] == 1:
        return cache
    shapes = jax.eval_shape(_take, cache, np.int32(place))
    where = cache_shardings(mesh, shapes)
    return _jitted_take(tuple(jax.tree.leaves(where)), jax.tree.structure(where))(
        cache, np.int32(place)
    )


def _take(cache: Cache, place: Any) -> Cache:
    def of(leaf):
        return jax.lax.dynamic_slice_in_dim(leaf, place, 1, min(leaf.ndim - 1, 1))

    return jax.tree.map(of, cache)


@functools.cache
def _jitted_take(where: tuple, structure):
    return jax.jit(_take, out_shardings=structure.unflatten(where))


def _of_arrays(structure: Structure, program):
    """A program of a state as one of the state's arrays."""

    @functools.wraps(program)
    def of_arrays(arrays, *arguments):
        return program(structure[1].unflatten(arrays), *arguments)

    return of_arrays


@functools.cache
def _jitted_prefill(structure: Structure, mesh: Mesh, likely: int | None, scored: bool):
    program = prefill_program(structure[0], mesh, likely, scored)
    return jit(_of_arrays(structure, program), donate_argnums=1)


@functools.cache
def _jitted_rounds(structure: Structure, mesh: Mesh, limits: Limits, variant: Variant):
    program = rounds_program(structure[0], mesh, limits, variant)
    return jit(_of_arrays(structure, program), donate_argnums=3)


@functools.cache
def _jitted_seat(mesh: Mesh):
    return jit(seat_program(mesh), donate_argnums=0)
