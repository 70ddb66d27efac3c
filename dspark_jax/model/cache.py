"""What a stream remembers: everything addressed by absolute position, nothing ever shifted (README,
"Extend and commit").

A slot holds the newest position congruent to it, so a row knows from its own position alone which
position each slot holds, and masks what it must not see. Rows that were never committed lie beyond
`position`; they are overwritten before anything could read them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.model.segments import LayerKind, segments


@struct.dataclass
class LayerCache:
    """The memory of n stacked layers of one kind. Leaves that the kind does not need are None.

    window: [n, B, W + rows, C] compute dtype; rotated keys (= values), slot = position % (W +
      rows).
    inputs: [n, B, members + rows, 2, O*C] float32; what the compressor pools (value, gate score),
      slot = position % size.
    entries: [n, B, S, C] compute dtype; compressed entries, slot = position // ratio.
    index_inputs, index_entries: the same two of the indexer, of width di.
    """

    window: jax.Array
    inputs: jax.Array | None = None
    entries: jax.Array | None = None
    index_inputs: jax.Array | None = None
    index_entries: jax.Array | None = None


@struct.dataclass
class Cache:
    """The memory of B streams.

    position: [B] int32; how many tokens are committed, which is also where the next row goes.
    layers: for each segment of equal layers, for each layer of its unit, a LayerCache.
    drafter: what the drafter remembers, a pytree of its own (drafter.py); axis 1 of every leaf is
      the streams.
    """

    position: jax.Array
    layers: tuple[tuple[LayerCache, ...], ...]
    drafter: Any


def entry_block(config: ModelConfig) -> int:
    """How many compressed entries are worked on at a time: the indexer's choice fits in one block,
    within 64 to 512.
    """
    return min(512, max(64, -(-config.index_topk // 64) * 64))


def entry_capacity(config: ModelConfig, ratio: int, max_seq_len: int) -> int:
    """Slots for compressed entries: all that `max_seq_len` tokens can make, rounded up to whole
    blocks.
    """
    block = entry_block(config)
    return max(1, -(-(max_seq_len // ratio) // block)) * block


def new_layer_cache(
    config: ModelConfig,
    kind: LayerKind,
    layers: int,
    batch: int,
    max_seq_len: int,
    rows: int,
    dtype,
) -> LayerCache:
    def zeros(*shape, dtype=dtype):
        return jnp.zeros((layers, batch, *shape), dtype)

    def compressed(width):
        halves = 2 if kind.overlapped else 1
        inputs = zeros(halves * kind.ratio + rows, 2, halves * width, dtype=jnp.float32)
        return inputs, zeros(entry_capacity(config, kind.ratio, max_seq_len), width)

    window = zeros(config.sliding_window + rows, config.head_dim)
    if not kind.ratio:
        return LayerCache(window)
    index = compressed(config.index_head_dim) if kind.overlapped else (None, None)
    return LayerCache(window, *compressed(config.head_dim), *index)


def new_layers(
    config: ModelConfig, batch: int, max_seq_len: int, rows: int, dtype
) -> tuple[tuple[LayerCache, ...], ...]:
    """The main model's part of an empty cache; see `dspark.new_cache`."""
    return tuple(
        tuple(
            new_layer_cache(config, kind, s.repeats, batch, max_seq_len, rows, dtype)
            for kind in s.unit
        )
        for s in segments(config)
    )


def commit(cache: Cache, n: jax.Array) -> Cache:
    """Adds n [B] (0 <= n <= the valid rows of the last extend) to the position, and does nothing
    else.
    """
    return cache.replace(position=cache.position + n)


def held_position(newest: jax.Array, size: int) -> jax.Array:
    """newest [...] -> [..., size]: the position that each slot of a ring holds for a row at
    position `newest`; negative: none yet.

    Slots written by later rows are taken for positions a whole ring back, which lie outside every
    window.
    """
    newest = newest[..., None]
    return newest - (newest - jnp.arange(size)) % size


def in_window(newest: jax.Array, size: int, window: int) -> jax.Array:
    """bool [..., size]: which slots of a ring hold one of the `window` positions up to `newest`."""
    held = held_position(newest, size)
    return (held >= 0) & (held > newest[..., None] - window)


def write(
    ring: jax.Array, layer: jax.Array, slots: jax.Array, keep: jax.Array, values: jax.Array
) -> jax.Array:
    """Writes values [B, T, ...] of one layer into ring [n, B, S, ...] at slots [B, T] in place;
    rows with keep False are dropped.
    """
    batch = jnp.arange(slots.shape[0])[:, None]
    slots = jnp.where(keep, slots, ring.shape[2])
    return ring.at[layer, batch, slots].set(values.astype(ring.dtype), mode="drop")
