"""From routed (row, expert) pairs to tiles of rows that share one expert, and back.

Every backend but the reference runs the same schedule: the pairs of rows that count (mask) and of
experts held here are sorted by expert, each expert's pairs are cut into tiles of `tile` rows, and
tile i is one GEMM against expert `tile_expert[i]`. The number of tiles is bounded statically
(`max_tiles`) and counted dynamically (`n_tiles`), so an idle expert, a padded row or a foreign
expert costs nothing. Moving rows into tiles and back are gathers in both directions, also in the
gradients: nothing is ever added in an order that depends on the data.

Symbols: T rows, A routes of a row, P = T * A pairs (pair = row * A + route), E experts held here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """Where every pair is computed."""

    # [max_tiles] int32, the row of the tables that the tile uses (beyond n_tiles, the last active
    # tile's)
    tile_expert: jax.Array
    n_tiles: jax.Array  # [] int32, tiles that hold work
    pair_of_slot: jax.Array  # [max_tiles, tile] int32, in 0..P-1 (meaningless where not slot_used)
    slot_used: jax.Array  # [max_tiles, tile] bool
    slot_of_pair: jax.Array  # [P] int32, in 0..max_tiles*tile-1 (meaningless where not pair_held)
    pair_held: jax.Array  # [P] bool: the row counts and the expert is here


LARGEST_COMPARISON = 512  # pairs up to which comparing all with all beats sorting, on a GPU by far


def max_tiles(pairs: int, experts: int, tile: int) -> int:
    """The most tiles that `pairs` pairs over `experts` experts can need: one pair on every expert,
    the rest on one of them.
    """
    active = min(pairs, experts)
    return active + (pairs - active) // tile


def _ranks(expert: jax.Array) -> jax.Array:
    """expert [P] to [P]: how many pairs before this one have the same expert."""
    pairs = expert.size
    iota = jnp.arange(pairs, dtype=jnp.int32)
    if pairs <= LARGEST_COMPARISON:
        same = (expert[:, None] == expert) & (iota[:, None] > iota)
        return jnp.sum(same, axis=1, dtype=jnp.int32)
    sorted_expert, order = jax.lax.sort((expert, iota), num_keys=2)
    starts = jnp.where(
        jnp.concatenate([jnp.ones(1, bool), sorted_expert[1:] != sorted_expert[:-1]]), iota, 0
    )
    _, rank = jax.lax.sort((order, iota - jax.lax.cummax(starts)), num_keys=1)
    return rank


class Held(NamedTuple):
    """Which experts are here: global ids first .. first + count - 1, in rows offset .. offset +
    count - 1 of the tables.
    """

    first: int | jax.Array
    count: int
    offset: int | jax.Array = 0


def schedule(ids: jax.Array, mask: jax.Array, here: Held, tile: int) -> Schedule:
    """ids [T, A] global expert ids, mask [T]: which rows count."""
    experts = here.count
    pairs = ids.size
    local = ids.reshape(-1) - here.first
    held = jnp.repeat(mask, ids.shape[1]) & (local >= 0) & (local < experts)
    expert = jnp.where(held, local, experts).astype(jnp.int32)  # the sentinel is a group of its own

    count = jnp.sum(
        expert[:, None] == jnp.arange(experts, dtype=jnp.int32), axis=0, dtype=jnp.int32
    )
    tile_end = jnp.cumsum((count + tile - 1) // tile)
    n_tiles = tile_end[-1]
    tiles = max_tiles(pairs, experts, tile)
    index = jnp.minimum(jnp.arange(tiles, dtype=jnp.int32), jnp.maximum(n_tiles - 1, 0))
    tile_expert = jnp.minimum(
        jnp.sum(tile_end <= index[:, None], axis=1, dtype=jnp.int32), experts - 1
    )

    first_tile = (tile_end - (count + tile - 1) // tile)[jnp.minimum(expert, experts - 1)]
    slot_of_pair = jnp.where(held, first_tile * tile + _ranks(expert), 0)
    # Every slot has at most one pair, so the order of these writes does not matter.
    target = jnp.where(held, slot_of_pair, tiles * tile)
    owner = (
        jnp.full(tiles * tile, -1, jnp.int32)
        .at[target]
        .set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    )
    owner = owner.reshape(tiles, tile)
    return Schedule(
        tile_expert + here.offset, n_tiles, jnp.maximum(owner, 0), owner >= 0, slot_of_pair, held
    )


def _zero(x):
    # The cotangent of an integer or bool array.
    return jnp.zeros(x.shape, jax.dtypes.float0)


@jax.custom_vjp
def to_tiles(values: jax.Array, plan: Schedule) -> jax.Array:
    """Per-row [T, C] or per-pair [P, C] values to [max_tiles, tile, C]; unused slots are zero
    whatever the rows hold.
    """
    routes = plan.slot_of_pair.size // values.shape[0]
    gathered = values[plan.pair_of_slot // routes]
    return jnp.where(plan.slot_used[..., None], gathered, 0)


def _to_tiles_fwd(values, plan):
    return to_tiles(values, plan), (values.shape[0], plan)


def _to_tiles_bwd(residual, g):
    rows, plan = residual
    routes = plan.slot_of_pair.size // rows
    per_pair = _from_tiles(g, plan).reshape(rows, routes, -1)
    total = per_pair[:, 0]
    for route in range(1, routes):
        total = total + per_pair[:, route]
    return total, jax.tree.map(_zero, plan)


def _from_tiles(tiles, plan):
    flat = tiles.reshape(-1, tiles.shape[-1])
    return jnp.where(plan.pair_held[:, None], flat[plan.slot_of_pair], 0)


@jax.custom_vjp
def from_tiles(tiles: jax.Array, plan: Schedule) -> jax.Array:
    """[max_tiles, tile, C] to per-pair [P, C]; pairs that were not computed are zero."""
    return _from_tiles(tiles, plan)


def _from_tiles_fwd(tiles, plan):
    return _from_tiles(tiles, plan), plan


def _from_tiles_bwd(plan, g):
    return jnp.where(plan.slot_used[..., None], g[plan.pair_of_slot], 0), jax.tree.map(_zero, plan)


to_tiles.defvjp(_to_tiles_fwd, _to_tiles_bwd)
from_tiles.defvjp(_from_tiles_fwd, _from_tiles_bwd)


def sum_routes(per_pair: jax.Array, rows: int) -> jax.Array:
    """[P, D] to [T, D], adding a row's routes in route order."""
    parts = per_pair.reshape(rows, -1, per_pair.shape[-1])
    total = parts[:, 0]
    for route in range(1, parts.shape[1]):
        total = total + parts[:, route]
    return total
