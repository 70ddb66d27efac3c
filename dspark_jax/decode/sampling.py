"""Which token a row of logits becomes, and what else a row says: by how much it won, whether it is
sound, and how likely tokens were.

The token that will stand at absolute position p is

    argmax(filter((logits + bias) / temperature) + gumbel(key, p))

or, at temperature 0, argmax(logits + bias). The noise is a function of the stream's key, of the
position and of the token's id and of nothing else: so the choice is as deterministic as the greedy
one, and every mode, gate and neighbour gives the same token. The drafter chooses with the same
noise and the same filter from its own logits, so that its drafts match as often as the two
distributions allow. There is no rejection sampler: a draft is accepted where it is the token
chosen.

A row's bits depend on that row alone, whatever B and T: what is done to a row is comparing, whole
numbers, single operations of float32, and sums whose order is written down (`_total`).

B: streams, T: rows of each, V: vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Sampling:
    """How B streams draw their tokens. In the order in which the filters are applied, which is that
    of Hugging Face transformers.

    temperature: [B] float32; 0: greedy, no filter matters. top_k: [B] int32, the so many best; 0:
      all. top_p: [B] float32, the fewest best whose probabilities reach it; 1: all. min_p: [B]
      float32, those that are at least so likely as the best times this; 0: all.
    seed: [B] uint32 and prompt: [B] int32; the key of a stream is fold_in(key(seed), prompt).
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    prompt: jax.Array


@struct.dataclass
class Choice:
    """How B streams choose their tokens.

    bias: [B, V] float32, added to the logits first; -inf: the token is never chosen. sampling:
    None where all streams are greedy: then a program holds none of it.
    """

    bias: jax.Array
    sampling: Sampling | None


@struct.dataclass
class Likelihood:
    """Log-probabilities at the places of tokens [B, T], from the raw logits: temperature 1, before
    bias and filters.

    chosen: [B, T] float32, of the tokens. best_ids: [B, T, n] int32, those of the n largest logits,
    the lowest first among equals; best: [B, T, n] float32, theirs.
    """

    chosen: jax.Array
    best_ids: jax.Array
    best: jax.Array


def choose(choice: Choice, logits: jax.Array, positions: jax.Array) -> jax.Array:
    """logits [B, T, V] and the positions [B, T] that the tokens will stand at -> tokens, int32
    [B, T]. Among equals the lowest id.

    A row that `finite` says no of gives some id, the same one at every temperature.
    """
    logits = biased(choice, logits)
    best = _best(logits)
    sampling = choice.sampling
    if sampling is None:
        return best
    noise = gumbel(sampling, positions, logits.shape[-1])
    drawn = _best(filtered(sampling, logits) + noise)
    hot = sampling.temperature[:, None] > 0
    return jnp.where(hot & finite(logits), drawn, best)


def biased(choice: Choice, logits: jax.Array) -> jax.Array:
    """logits [B, ..., V] -> those that a token is chosen by, and its margin."""
    middle = (1,) * (logits.ndim - 2)
    return logits + choice.bias.reshape(choice.bias.shape[0], *middle, choice.bias.shape[-1])


def gumbel(sampling: Sampling, positions: jax.Array, vocabulary: int) -> jax.Array:
    """The noise [B, T, V] float32 of the tokens at positions [B, T]: for one position of a stream
    jax.random.gumbel(fold_in(fold_in(key(seed), prompt), position), (V,)).

    An id's noise does not depend on how large the vocabulary is. Its resolution is that of 23
    random bits: what is less likely than 1e-7 is drawn more seldom than it should be, or never.
    """

    def at(key, position):
        key = jax.random.fold_in(key, position)
        return jax.random.gumbel(key, (vocabulary,), jnp.float32, mode="low")

    def of_stream(seed, prompt, positions):
        key = jax.random.fold_in(jax.random.key(seed), prompt)
        return jax.vmap(at, (None, 0))(key, positions)

    return jax.vmap(of_stream)(sampling.seed, sampling.prompt, positions)


def filtered(sampling: Sampling, logits: jax.Array) -> jax.Array:
    """filter(logits / temperature): of logits [B, T, V], already biased, how far each is below the
    best, in units of the temperature, float32 [B, T, V]; -inf where a filter leaves it out or it is
    forbidden. At temperature 0: in units of 1, and nothing is left out.
    """
    sampling = jax.tree.map(lambda leaf: leaf[:, None, None], sampling)
    hot = sampling.temperature > 0
    # Below the best, so that no temperature is too small for the range of float32. Where one is so
    # large that its reciprocal is 0, what is forbidden stays so. The selection also keeps compilers
    # from making one multiply-add of the division and of the sum with the noise.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(hot, sampling.temperature, 1)
    return jnp.where((below > -jnp.inf) & _kept(sampling, hot, scaled), scaled, -jnp.inf)


def _kept(sampling: Sampling, hot: jax.Array, scaled: jax.Array) -> jax.Array:
    """bool [B, T, V]: what the filters leave of scaled [B, T, V], which is at most 0. sampling,
    hot: [B, 1, 1].

    The work is done if a stream asks for it, in a loop of one trip or none, since a cond would
    compute both of its sides under vmap.
    """
    by_number, by_mass, by_odds = (
        hot & on for on in (sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0)
    )

    def body(_):
        odds = jnp.exp(scaled)  # against the best: its own are 1
        number = jnp.where(by_number, sampling.top_k.astype(jnp.float32), jnp.inf)
        kept = _best_until(scaled, jnp.ones_like(odds), number)
        odds = jnp.where(kept, odds, 0)
        mass = jnp.maximum(sampling.top_p * _total(odds), jnp.finfo(jnp.float32).tiny)
        kept &= _best_until(scaled, odds, jnp.where(by_mass, mass, jnp.inf))
        return jnp.bool_(False), kept & (~by_odds | (odds >= sampling.min_p))

    carry = jnp.any(by_number | by_mass | by_odds), jnp.ones(scaled.shape, bool)
    return jax.lax.while_loop(lambda carry: carry[0], body, carry)[1]


def _best_until(scaled: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """bool [B, T, V]: the fewest best, by value and then by id, whose weights [B, T, V] reach the
    goal [B, T or 1, 1], which is above 0; all of them where it is infinite.

    The last of them is the largest (value, id) such that what comes before it does not reach the
    goal. It is found bit by bit: to sort a row takes several times as long.
    """
    # The bits of numbers from 0 up are in the order of the numbers.
    far = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    ids = _ids(scaled)
    of_value, of_id = 31, (scaled.shape[-1] - 1).bit_length()

    def before(value, id_):
        return (far < value) | ((far == value) & (ids < id_))

    def body(i, last):
        # A table of these bits would be looked up for every number of a row.
        of_ids = i - of_value
        bit = (
            jnp.where(of_ids < 0, 1 << jnp.maximum(-of_ids - 1, 0), 0),
            jnp.where(of_ids < 0, 0, 1 << jnp.minimum(of_id - 1 - of_ids, of_id)),
        )
        trial = last[0] | bit[0], last[1] | bit[1]
        less = _total(jnp.where(before(*trial), weights, 0)) < goal
        return jnp.where(less, trial[0], last[0]), jnp.where(less, trial[1], last[1])

    unlimited = goal == jnp.inf
    trips = jnp.where(jnp.all(unlimited), 0, of_value + of_id)
    start = jnp.zeros((*scaled.shape[:-1], 1), jnp.int32)
    value, id_ = jax.lax.fori_loop(0, trips, body, (start, start))
    return unlimited | before(value, id_ + 1)


def _best(x: jax.Array) -> jax.Array:
    """argmax over the last axis. Two reductions, which XLA's CPU backend does several numbers at a
    time; of its argmax it does one at a time, and with it the logarithms that lead to it.
    """
    found = x == jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(found, _ids(x), x.shape[-1] - 1), axis=-1)


def _ids(x: jax.Array) -> jax.Array:
    return jnp.arange(x.shape[-1], dtype=jnp.int32)


def _total(x: jax.Array) -> jax.Array:
    """The sum over the last axis, kept as an axis of 1: one half is added to the other until one
    number is left, so that its order is the same on every backend and for every number of rows.
    """
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        rest = x[..., half:]
        missing = half - rest.shape[-1]
        x = x[..., :half] + jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x


def likelihood(logits: jax.Array, tokens: jax.Array, best: int) -> Likelihood:
    """Of tokens [B, T], and of the `best` most likely ones, under logits [B, T, V]."""
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    # Without the best itself, whose 1 would hide how unlikely the others are; log1p adds it.
    others = jnp.where(_ids(logits) == _best(logits)[..., None], -jnp.inf, below)
    total = jnp.log1p(_total(jnp.exp(others)))

    def of(ids):
        return jnp.take_along_axis(below, ids, axis=-1) - total

    ids = jax.lax.top_k(logits, best)[1].astype(jnp.int32)
    return Likelihood(of(tokens[..., None])[..., 0], ids, of(ids))


def margin(logits: jax.Array) -> jax.Array:
    """logits [..., V] -> top1 - top2, float32 [...]; 0 where two ids are equally good. The largest
    number where all but one are forbidden.
    """
    best = _best(logits)
    others = jnp.where(_ids(logits) == best[..., None], -jnp.inf, logits)
    by = jnp.max(logits, axis=-1) - jnp.max(others, axis=-1)
    return jnp.minimum(by, jnp.finfo(jnp.float32).max)


def finite(logits: jax.Array) -> jax.Array:
    """logits [..., V] -> whether the best is a finite number and none is NaN, bool [...]: then
    nothing damaged can slip through as the index of a token.

    Not by the best alone: with XLA's own fusions on a CPU, a maximum passes over a NaN.
    """
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)
