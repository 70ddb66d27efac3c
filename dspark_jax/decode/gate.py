"""The gate: how many of the drafted tokens are worth verifying.

Before every round the gate chooses n in 0..K, the length that promises the most tokens per
millisecond. It learns, while the stream runs, how often a draft with a given confidence score is
right: scores fall into six buckets, each with a decayed count of what was observed. It never
changes which tokens come out, only how fast.

    p_i          = (matches + 2 * 0.75) / (observed + 2)        of the bucket of draft i's score
    E[tokens(n)] = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_n
    cost(n)      = draft_ms + verify_base_ms + verify_slope_ms * n,   cost(0) = plain_ms    [ms]
    n*           = argmax of E[tokens(n)] / cost(n), the smaller n on a tie

n* != K is taken only if its rate is at least `margin` times the rate of K; a choice in
1..min_draft-1 is raised to min_draft. Rates are compared by cross-multiplication, so that equal
rates are equal on every backend, whatever its division rounds to.

Everything is pure, batched over streams and usable inside jit. The numbers of a `GateConfig` are
leaves of a pytree: changing one compiles nothing. B: streams, K: draft block.

    state = init(config, B)
    confidence = scaled(raw, temperatures, offsets)  # where the drafter is calibrated
    skip = margin_skip(config, margin)             # each round: is there to be a draft at all?
    n = choose(config, state, confidence)          # how many of its tokens are verified
    state = learn(config, state, Outcome(...))     # what the round showed

`learn` is `observe` (what became of the drafts) and `note_skipped` (rounds that verified nothing),
which stay for programs that want them one by one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.gate_config import (
    GateConfig,
    refuse_long_min_draft,
    round_ms,
    validate,
    verify_ms,
)

__all__ = [
    "GateConfig",
    "GateState",
    "Outcome",
    "choose",
    "init",
    "learn",
    "margin_skip",
    "note_skipped",
    "observe",
    "round_ms",
    "scaled",
    "stats",
    "validate",
    "verify_ms",
]

BUCKET_EDGES = (-0.5, 0.5, 1.5, 3.0, 6.0)
"""Inner edges of the six score buckets (-inf, -0.5), [-0.5, 0.5), ... [6, inf). Scores are logits
of the confidence head.
"""

N_BUCKETS = len(BUCKET_EDGES) + 1
PRIOR_WEIGHT = 2.0
PRIOR_RATE = 0.75


class GateState(NamedTuple):
    """What the gate remembers of each of B streams. A stream starts cold: all zero."""

    # f32 [B, 6]: drafts of the bucket that matched, each round counting decay times the next, >= 0
    matches: jax.Array
    # f32 [B, 6]: drafts of the bucket whose fate was seen, decayed alike, >= matches
    observed: jax.Array
    # i32 [B]: rounds so far, skipped ones included
    rounds: jax.Array
    # i32 [B]: rounds for which the gate chose some but not all drafts, 0 < n < K
    truncated: jax.Array
    # i32 [B]: rounds for which it chose none, for either reason
    skipped: jax.Array
    # i32 [B]: of those, rounds skipped before the draft by the logit margin
    margin_skipped: jax.Array


class Outcome(NamedTuple):
    """What became of one round of B streams. A stream that made no round has chosen 0 and is not
    skipped.
    """

    # f32 [B, K]: the drafts' scores; of no meaning where there was no draft
    confidence: jax.Array
    # i32 [B], 0..verified: leading drafts that matched
    accepted: jax.Array
    # i32 [B], 0..chosen: drafts that were verified; fewer than chosen at the end of the cache
    verified: jax.Array
    # i32 [B], 0..K: what `choose` said, 0 after a margin skip
    chosen: jax.Array
    # bool [B]: a round was made and no draft was to be verified, for either reason
    skipped: jax.Array
    # bool [B]: of those, there was no draft because of the logit margin
    by_margin: jax.Array


def init(config: GateConfig, batch: int) -> GateState:
    """The state of `batch` cold streams. It is the same for every `config`."""
    del config
    # An array of its own for every field: a buffer that appears twice cannot be donated.
    buckets = (jnp.zeros((batch, N_BUCKETS), jnp.float32) for _ in range(2))
    return GateState(*buckets, *(jnp.zeros((batch,), jnp.int32) for _ in range(4)))


def margin_skip(config: GateConfig, margin: jax.Array) -> jax.Array:
    """Whether to skip the draft, given the anchor's top1 - top2 logit margin: f32 [B] -> bool [B].
    A NaN margin skips nothing.
    """
    threshold = jnp.asarray(config.margin_threshold, jnp.float32)
    return (
        jnp.asarray(config.enabled, bool)
        & (threshold > 0)
        & (jnp.asarray(margin, jnp.float32) < threshold)
    )


def scaled(confidence, temperatures, offsets) -> jax.Array:
    """The scores that the gate goes by where the drafter is calibrated: confidence / temperatures +
    offsets, float32 of the shape of `confidence`, [..., K], to which both others are broadcast.
    """
    confidence, temperatures, offsets = (
        jnp.asarray(part, jnp.float32) for part in (confidence, temperatures, offsets)
    )
    return confidence / temperatures + offsets


def choose(config: GateConfig, state: GateState, confidence: jax.Array) -> jax.Array:
    """How many drafts to verify: confidence f32 [B, K] -> n i32 [B], 0..K; K everywhere when the
    gate is off.

    Raises ConfigError if a `min_draft` known as a Python number exceeds K.
    """
    confidence = jnp.asarray(confidence, jnp.float32)
    refuse_long_min_draft(config, confidence.shape[-1])
    return _choose(config, state, confidence)


@jax.jit
def _choose(config, state, confidence):
    block = confidence.shape[-1]
    tokens = _expected_tokens(_rates(state), confidence)
    cost = _costs(config, block)
    best, best_tokens, best_cost = jnp.zeros(confidence.shape[:1], jnp.int32), tokens[0], cost[0]
    for n in range(1, block + 1):
        better = tokens[n] * best_cost > best_tokens * cost[n]
        best = jnp.where(better, n, best)
        best_tokens, best_cost = (
            jnp.where(better, tokens[n], best_tokens),
            jnp.where(better, cost[n], best_cost),
        )
    worth_it = best_tokens * cost[block] >= config.margin * tokens[block] * best_cost
    n = jnp.where(worth_it, best, block)
    n = jnp.where(n > 0, jnp.maximum(n, config.min_draft), n)
    return jnp.where(config.enabled, jnp.minimum(n, block), block).astype(jnp.int32)


def learn(config: GateConfig, state: GateState, outcome: Outcome) -> GateState:
    """The state after a round: what it showed is learned, and every stream that made it counts it
    once.
    """
    o = outcome
    state = observe(config, state, o.confidence, o.accepted, o.verified, o.chosen)
    return note_skipped(state, o.skipped, o.by_margin)


def observe(
    config: GateConfig, state: GateState, confidence, accepted, verified, chosen=None
) -> GateState:
    """Learns from one round and counts it: confidence f32 [B, K], accepted i32 [B], verified i32
    [B].

    A stream with verified n > 0 first decays all its buckets, then adds the drafts 0..min(accepted,
    n-1): what lies after the first rejection is censored, neither a match nor a miss. A stream
    with verified 0 observes and decays nothing.

    chosen i32 [B]: what `choose` said, where the end of the cache had room for fewer; None: as
    verified. It decides what is counted: a round that the cache cut short is not one that the gate
    truncated. A stream with chosen 0 counts nothing.
    """
    as_count = functools.partial(jnp.asarray, dtype=jnp.int32)
    chosen = verified if chosen is None else chosen
    return _observe(
        config,
        state,
        jnp.asarray(confidence, jnp.float32),
        as_count(accepted),
        as_count(verified),
        as_count(chosen),
    )


@jax.jit
def _observe(config, state, confidence, accepted, verified, chosen):
    block = confidence.shape[-1]
    draft = jnp.arange(block)
    active = verified > 0
    n_seen = jnp.where(active, jnp.minimum(accepted + 1, verified), 0)
    seen = draft < n_seen[:, None]
    hit = seen & (draft < accepted[:, None])
    in_bucket = jax.nn.one_hot(_bucket(confidence), N_BUCKETS, dtype=jnp.float32)

    def learn(counts, which):
        added = jnp.sum(in_bucket * which[..., None], axis=1)
        return jnp.where(active[:, None], counts * config.decay + added, counts)

    return state._replace(
        matches=learn(state.matches, hit),
        observed=learn(state.observed, seen),
        rounds=state.rounds + (chosen > 0),
        truncated=state.truncated + ((chosen > 0) & (chosen < block)),
    )


def note_skipped(state: GateState, skipped, by_margin) -> GateState:
    """Counts a round that verified nothing, where `skipped` (bool [B]); `by_margin` (bool [B]): it
    was for the logit margin.

    Nothing was seen, so nothing is learned and nothing decays.
    """
    skipped = jnp.asarray(skipped, bool)
    return state._replace(
        rounds=state.rounds + skipped,
        skipped=state.skipped + skipped,
        margin_skipped=state.margin_skipped + (skipped & jnp.asarray(by_margin, bool)),
    )


def stats(state: GateState, stream: int | None = None) -> dict:
    """Counters and bucket rates as plain Python numbers: of one stream, or of all (counters summed,
    evidence pooled).

    Keys: rounds, truncated, skipped, margin_skipped, bucket_rates (6 match rates, prior included),
    bucket_observed (6 decayed counts), bucket_edges (the 5 edges between the buckets).
    """
    host = GateState(*(np.asarray(leaf) for leaf in state))
    pooled = GateState(*(leaf.sum(axis=0) if stream is None else leaf[stream] for leaf in host))
    rates = (pooled.matches + PRIOR_WEIGHT * PRIOR_RATE) / (pooled.observed + PRIOR_WEIGHT)
    counters = {
        name: int(getattr(pooled, name))
        for name in ("rounds", "truncated", "skipped", "margin_skipped")
    }
    return counters | {
        "bucket_rates": [float(rate) for rate in rates],
        "bucket_observed": [float(count) for count in pooled.observed],
        "bucket_edges": list(BUCKET_EDGES),
    }


def _bucket(score):
    """f32 [...] -> i32 [...] in 0..5: the bucket [lo, hi) of a confidence score."""
    return jnp.sum(score[..., None] >= jnp.asarray(BUCKET_EDGES, jnp.float32), axis=-1)


def _rates(state):
    """f32 [B, 6]: the match rate of each bucket, drawn towards 0.75 by a prior worth two
    observations.
    """
    return (state.matches + PRIOR_WEIGHT * PRIOR_RATE) / (state.observed + PRIOR_WEIGHT)


def _expected_tokens(rates, confidence):
    """K+1 arrays f32 [B]: the tokens that a round emits on average when n drafts are verified, n =
    0..K.
    """
    match = jnp.take_along_axis(rates, _bucket(confidence), axis=1)
    all_match = jnp.ones(confidence.shape[:1], jnp.float32)
    tokens = [all_match]
    for i in range(confidence.shape[-1]):
        all_match = all_match * match[:, i]
        tokens.append(tokens[-1] + all_match)
    return tokens


def _costs(config, block):
    """K+1 scalars f32, ms. cost(0) is a plain step: a draft already made is not charged to it."""
    return [jnp.asarray(round_ms(config, n), jnp.float32) for n in range(block + 1)]
