"""What the tests of target state share: feeding streams, the committed part of a cache, and
comparison of bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.model.segments import segments


def with_limits(model: dspark.Model, **limits) -> dspark.Model:
    """The same weights run with other limits; `rows` sets the size of every ring."""
    return dataclasses.replace(model, limits=dataclasses.replace(model.limits, **limits))


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def differing(a, b) -> np.ndarray:
    """a, b [B, ...] -> bool [B]: in which streams at least one bit differs."""
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    return (a.view(np.uint32) != b.view(np.uint32)).any(axis=tuple(range(1, a.ndim)))


def committed(cache, config) -> dict[str, np.ndarray]:
    """Everything in a cache that belongs to committed positions and that a later row or draft may
    read.

    Each array is [B, ...] in order of position, zero where a stream has nothing; what lies in other
    slots has no meaning.
    """
    position = np.asarray(cache.position)
    rings = _newest(cache.drafter.rings, position, config.sliding_window)
    state = {"position": position, "drafter": rings}
    for s, (plan, members) in enumerate(zip(segments(config), cache.layers)):
        for m, (kind, layer) in enumerate(zip(plan.unit, members)):
            pooled = kind.ratio * (2 if kind.ratio == 4 else 1)
            state[f"{s}.{m}.window"] = _newest(layer.window, position, config.sliding_window)
            for name in ("inputs", "index_inputs", "entries", "index_entries"):
                array = getattr(layer, name)
                if array is None:
                    continue
                inputs = name.endswith("inputs")
                state[f"{s}.{m}.{name}"] = (
                    _newest(array, position, pooled)
                    if inputs
                    else _first(array, position // kind.ratio)
                )
    return state


def _newest(ring, position, count: int) -> np.ndarray:
    """ring [n, B, S, ...] -> [B, n, count, ...]: what it holds of the `count` positions before
    `position`.
    """
    ring = np.asarray(ring)
    held = position[:, None] - count + np.arange(count)
    values = ring[:, np.arange(len(position))[:, None], held % ring.shape[2]]
    return np.moveaxis(np.where(_like(held >= 0, values), values, np.float32(0)), 1, 0)


def _first(entries, count) -> np.ndarray:
    """entries [n, B, S, C] -> [B, n, S, C], zero from slot count [B] on."""
    entries = np.asarray(entries)
    return np.moveaxis(
        np.where(
            _like(np.arange(entries.shape[2]) < count[:, None], entries), entries, np.float32(0)
        ),
        1,
        0,
    )


def _like(mask, values):
    """mask [B, S] -> [1, B, S, 1...], to go with values [n, B, S, ...]."""
    return mask.reshape(1, *mask.shape, *[1] * (values.ndim - 3))


def different_state(a: dict, b: dict) -> dict[str, np.ndarray]:
    """Which parts of two committed states differ, and in which streams."""
    assert a.keys() == b.keys()
    wrong = {name: np.flatnonzero(differing(a[name], b[name])) for name in a if name != "position"}
    wrong["position"] = np.flatnonzero(a["position"] != b["position"])
    return {name: streams for name, streams in wrong.items() if streams.size}


def pick(state: dict, streams) -> dict[str, np.ndarray]:
    """Some streams of a committed state, in any order, repeated or not."""
    return {name: array[np.asarray(streams)] for name, array in state.items()}


def streams_of(cache, streams):
    """A cache of some streams of a cache, in any order, repeated or not."""
    streams = jnp.asarray(streams)
    return jax.tree.map(lambda a: jnp.take(a, streams, axis=_stream_axis(a)), cache)


def joined(caches):
    """One batch of the streams of several caches."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=_stream_axis(parts[0])), *caches)


def _stream_axis(array) -> int:
    """Of a cache's arrays, only the position has no layer axis before the streams."""
    return min(1, array.ndim - 1)


def block_at(tokens, position, width: int) -> np.ndarray:
    """tokens [B, S], position [B] -> [B, width], the tokens from `position` on (any valid id beyond
    the end).
    """
    at = np.asarray(position)[:, None] + np.arange(width)
    return np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1), axis=1)


class Fed:
    """What feeding streams gives: the cache, and logits [B, S, V] and hidden [B, S, N*D] by
    position (NaN: not computed).
    """

    def __init__(self, cache, tokens):
        self.cache, self.tokens, self.logits, self.hidden = cache, tokens, None, None

    def keep(self, at, count, logits, hidden):
        if self.logits is None:
            self.logits, self.hidden = (
                np.full((*self.tokens.shape, x.shape[2]), np.nan, np.float32)
                for x in (logits, hidden)
            )
        for stream, (start, n) in enumerate(zip(at, count)):
            self.logits[stream, start : start + n] = logits[stream, :n]
            self.hidden[stream, start : start + n] = hidden[stream, :n]


def feed(model, cache, tokens, ends, sizes, width: int) -> Fed:
    """Extends and commits every stream b from its position to ends[b] with tokens[b], by sizes[b]
    rows at a time.

    tokens [B, S]; ends and sizes [B] or one number; sizes may be a function of the call's number.
    width: rows of each call.
    """
    fed = Fed(cache, tokens)
    call = 0
    while (np.asarray(fed.cache.position) < ends).any():
        at = np.asarray(fed.cache.position)
        count = np.minimum(
            sizes(call) if callable(sizes) else sizes, np.maximum(ends - at, 0)
        ).astype(np.int32)
        logits, hidden, written = dspark.extend(
            model, fed.cache, block_at(tokens, at, width), count
        )
        fed.keep(at, count, np.asarray(logits), np.asarray(hidden))
        fed.cache = dspark.commit(written, count)
        call += 1
    return fed


def speculate(model, tokens, prompts, ends, seed: int, block: int, width: int) -> Fed:
    """Prompts of prompts[b] tokens, then blocks of random length and acceptance up to ends[b], with
    junk in the rejected rows.

    block: most rows of a block. width: rows of each call.
    """
    rng = np.random.default_rng(seed)
    fed = feed(model, dspark.new_cache(model, len(tokens)), tokens, prompts, block, width)
    while (np.asarray(fed.cache.position) < ends).any():
        at = np.asarray(fed.cache.position)
        lengths = rng.integers(0, block + 1, len(tokens))
        accepted = np.minimum(rng.integers(0, lengths + 1), np.maximum(ends - at, 0))
        kept = np.arange(width) < accepted[:, None]
        junk = rng.integers(0, 256, kept.shape)
        rows = np.where(kept, block_at(tokens, at, width), junk)
        logits, hidden, cache = dspark.extend(model, fed.cache, rows, lengths)
        fed.keep(at, accepted, np.asarray(logits), np.asarray(hidden))
        fed.cache = dspark.commit(cache, accepted)
    return fed


def assert_same_stream(model, cache, other) -> None:
    """The committed parts of two caches."""
    config = model.config
    assert different_state(committed(cache, config), committed(other, config)) == {}


def random_tokens(seed: int, *shape: int) -> np.ndarray:
    """Token ids of the golden vocabulary."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.int32)
