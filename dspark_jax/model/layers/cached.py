"""Attention of a few new rows over a stream's memory (spec section 10): write their slots, then
attend.

All rows of a call are written before any row attends. A row at position p masks the window by
position and sees exactly the compressed entries below (p + 1) // ratio, so what later rows wrote
does not reach it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.model.cache import LayerCache, entry_block, in_window, write
from dspark_jax.model.layers.attention import Running, absorb, finish, start
from dspark_jax.model.layers.compressor import Compressor
from dspark_jax.model.layers.rope import rotation


class Rows(NamedTuple):
    """The new rows of a call.

    positions: [B, T] int32. mask: bool [B, T], the first `valid` rows. valid: [B] int32.
    plain, compressed: (cos, sin) of the positions in the two rotary tables, each [B, T, rope / 2].
    """

    positions: jax.Array
    mask: jax.Array
    valid: jax.Array
    plain: tuple[jax.Array, jax.Array]
    compressed: tuple[jax.Array, jax.Array]


def new_rows(config: ModelConfig, position: jax.Array, width: int, valid: jax.Array) -> Rows:
    """`width` rows from position [B] on, of which the first valid [B] count."""
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = position[:, None] + offsets
    tables = [rotation(config, compressed, positions) for compressed in (False, True)]
    return Rows(positions, offsets < valid[:, None], valid, *tables)


def attend_cached(
    block, config: ModelConfig, x: jax.Array, rows: Rows, cache: LayerCache, layer
) -> tuple[jax.Array, LayerCache]:
    """x [B, T, D] -> attention output [B, T, D] and the cache with the rows' slots written in
    place. layer: index into the cache.
    """
    attn, ratio = block.attn, block.kind.ratio
    turn = rows.compressed if ratio else rows.plain
    low, q = attn.queries(x, turn)
    size = cache.window.shape[2]
    cache = cache.replace(
        window=write(cache.window, layer, rows.positions % size, rows.mask, attn.keys(x, turn))
    )
    running = absorb(
        start(attn.sink[...], q),
        q,
        cache.window[layer],
        in_window(rows.positions, size, config.sliding_window),
    )
    if ratio:
        cache = _compress(block, x, rows, cache, layer)
        if block.indexer is None:
            running = _absorb_all(running, q, config, rows, cache.entries, layer, ratio)
        else:
            chosen, found, poison = _choose(
                block.indexer, config, x, low, rows, cache.index_entries, layer, ratio
            )
            running = running._replace(total=running.total + poison[..., None])
            running = _absorb_chosen(
                running, q, config, rows, cache.entries, layer, ratio, chosen, found
            )
    return attn.output(finish(running, attn.numerics.dtype), turn), cache


def _compress(block, x, rows: Rows, cache: LayerCache, layer) -> LayerCache:
    inputs, entries = _advance(
        block.compressor, block.attn.quantise_key, x, rows, cache.inputs, cache.entries, layer
    )
    cache = cache.replace(inputs=inputs, entries=entries)
    if block.indexer is None:
        return cache
    indexer = block.indexer
    inputs, entries = _advance(
        indexer.compressor,
        indexer.quantise,
        x,
        rows,
        cache.index_inputs,
        cache.index_entries,
        layer,
    )
    return cache.replace(index_inputs=inputs, index_entries=entries)


def _advance(compressor: Compressor, quantise, x, rows: Rows, inputs, entries, layer):
    """Writes the rows' compressor inputs, then pools and writes every entry whose last token is
    among the rows.
    """
    ratio, size, capacity = compressor.ratio, inputs.shape[2], entries.shape[2]
    inputs = write(
        inputs, layer, rows.positions % size, rows.mask, compressor.project(x, rows.positions)
    )
    most = (rows.positions.shape[1] - 1) // ratio + 1
    first = rows.positions[:, :1] // ratio + jnp.arange(most)
    tokens = (first[..., None] + 1) * ratio - compressor.members + jnp.arange(compressor.members)
    batch = jnp.arange(first.shape[0])[:, None, None]
    pooled = quantise(compressor.pool(inputs[layer, batch, tokens % size], first))
    complete = (first + 1) * ratio <= rows.positions[:, :1] + rows.valid[:, None]
    return inputs, write(entries, layer, first, complete & (first < capacity), pooled)


def _seen(rows: Rows, ratio: int) -> jax.Array:
    """[B, T]: how many compressed entries a row sees."""
    return (rows.positions + 1) // ratio


def _blocks(rows: Rows, ratio: int, block: int) -> jax.Array:
    """How many blocks of entries the longest stream has: the work grows with its length, not with
    the capacity.
    """
    longest = jnp.max((rows.positions[:, 0] + rows.valid) // ratio)
    return (longest + block - 1) // block


def _absorb_all(running: Running, q, config, rows: Rows, entries, layer, ratio: int) -> Running:
    block = entry_block(config)
    seen = _seen(rows, ratio)[..., None]

    def step(i, running):
        keys = _entries_at(entries, layer, i * block, block)
        return absorb(running, q, keys, i * block + jnp.arange(block) < seen)

    return jax.lax.fori_loop(0, _blocks(rows, ratio, block), step, running)


def _entries_at(entries, layer, first, block: int):
    n, batch, _, width = entries.shape
    return jax.lax.dynamic_slice(entries, (layer, 0, first, 0), (1, batch, block, width))[0]


def _choose(indexer, config, x, low, rows: Rows, entries, layer, ratio: int):
    """Ids [B, T, K] of the best-scoring entries that a row sees, and bool [B, T, K]: whether there
    was one. Ties: the lower id.

    Third: NaN [B, T] for a row with a score that is NaN, else 0; what it would choose has no
      meaning. NaNs come first in top_k.

    The best K so far are merged with one block of scores at a time. They stand before the block,
    with lower ids among equals first, and top_k prefers what stands first.
    """
    block = entry_block(config)
    best = min(config.index_topk, entries.shape[2])
    q, weights = indexer.queries(low, rows.compressed), indexer.head_weights(x)
    seen = _seen(rows, ratio)[..., None]

    def step(i, state):
        scores, ids = state
        new_ids = i * block + jnp.arange(block)
        new = indexer.scores(q, weights, _entries_at(entries, layer, i * block, block))
        new = jnp.where(new_ids < seen, new, -jnp.inf)
        scores, picked = jax.lax.top_k(jnp.concatenate([scores, new], axis=-1), best)
        ids = jnp.concatenate([ids, jnp.broadcast_to(new_ids, new.shape)], axis=-1)
        return scores, jnp.take_along_axis(ids, picked, axis=-1)

    shape = (*x.shape[:2], best)
    empty = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    scores, ids = jax.lax.fori_loop(0, _blocks(rows, ratio, block), step, empty)
    return ids, scores > -jnp.inf, jnp.where(jnp.isnan(scores).any(axis=-1), jnp.nan, 0)


def _absorb_chosen(
    running: Running, q, config, rows: Rows, entries, layer, ratio: int, chosen, found
) -> Running:
    """Each row attends to its own chosen entries, a block of them at a time."""
    block = entry_block(config)
    pad = [(0, 0), (0, 0), (0, -chosen.shape[-1] % block)]
    chosen, found = jnp.pad(chosen, pad), jnp.pad(found, pad)
    batch = jnp.arange(chosen.shape[0])[:, None, None]

    def step(i, running):
        ids = jax.lax.dynamic_slice_in_dim(chosen, i * block, block, axis=2)
        visible = jax.lax.dynamic_slice_in_dim(found, i * block, block, axis=2)
        return absorb(running, q, entries[layer, batch, ids], visible)

    trips = jnp.minimum(_blocks(rows, ratio, block), chosen.shape[-1] // block)
    return jax.lax.fori_loop(0, trips, step, running)
