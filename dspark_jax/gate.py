"""The gate: how many of the drafted tokens are worth verifying.

Before every round the gate chooses n in 0..K, the length that promises the most tokens per millisecond. It learns, while the
stream runs, how often a draft with a given confidence score is right: scores fall into six buckets, each with a decayed count of
what was observed. It never changes which tokens come out, only how fast.

    p_i         = (matches + 2 * 0.75) / (observed + 2)          of the bucket of the score of draft i
    E[tokens(n)] = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_n
    cost(0)     = plain_ms,   cost(n) = draft_ms + verify_base_ms + verify_slope_ms * n        [ms]
    n*          = argmax of E[tokens(n)] / cost(n), the smaller n on a tie

n* != K is taken only if its rate is at least `margin` times the rate of K; a choice in 1..min_draft-1 is raised to min_draft.
Rates are compared by cross-multiplication, so that equal rates are equal on every backend, whatever its division rounds to.

Everything is pure, batched over streams and usable inside jit. The numbers of a `GateConfig` are leaves of a pytree: changing one
compiles nothing. B: streams, K: draft block.

    state = init(config, B)
    n = choose(config, state, confidence)                            # per round; skip the draft before where margin_skip(...)
    state = observe(config, state, confidence, accepted, verified)   # what the round showed
    state = note_skipped(state, skipped, by_margin)                  # rounds that verified nothing
"""

import dataclasses
import functools
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import ConfigError

BUCKET_EDGES = (-0.5, 0.5, 1.5, 3.0, 6.0)
"""Inner edges of the six score buckets (-inf, -0.5), [-0.5, 0.5), ... [6, inf). Scores are logits of the confidence head."""

N_BUCKETS = len(BUCKET_EDGES) + 1
PRIOR_WEIGHT = 2.0
PRIOR_RATE = 0.75

ENV_PREFIX = "DEEPSEEK_DSPARK_GATE"
FLOAT32_TINY, FLOAT32_MAX = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("enabled", "margin_threshold", "margin", "min_draft", "decay", "draft_ms", "verify_base_ms",
                 "verify_slope_ms", "plain_ms"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class GateConfig:
    """The numbers of the gate. Every field is a pytree leaf: a Python number outside jit, possibly a tracer inside.

    Off by default. Python numbers are brought to one type per field, so that 196 and 196.5 share a compiled program.
    """

    enabled: bool = False  # off: all K drafts are verified in every round
    margin_threshold: float = 0.0  # logits; the draft is skipped where top1 - top2 of the anchor is below it; 0: never
    margin: float = 1.15  # factor by which a truncated block must beat the full one
    min_draft: int = 0  # tokens; a choice of 1..min_draft-1 becomes min_draft, 0 stays 0
    decay: float = 0.9  # factor on the counts of all buckets per observed round, 0..1
    draft_ms: float = 196.0  # cost of drafting one block
    verify_base_ms: float = 300.0  # cost of a verify, part that does not depend on n
    verify_slope_ms: float = 109.0  # cost of a verify per draft
    plain_ms: float = 303.0  # cost of one plain step

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _as_field_type(field.name, getattr(self, field.name)))

    @classmethod
    def from_env(cls, environ=None) -> "GateConfig":
        """Reads DEEPSEEK_DSPARK_GATE (0 or 1) and DEEPSEEK_DSPARK_GATE_<FIELD>; an absent variable keeps the default.

        Raises ConfigError naming the variable if it is unknown, is not a number or is out of range.
        """
        environ = os.environ if environ is None else environ
        names = {_variable(field.name): field.name for field in dataclasses.fields(cls)}
        values = {}
        for variable in sorted(v for v in environ if v == ENV_PREFIX or v.startswith(ENV_PREFIX + "_")):
            if variable not in names:
                raise ConfigError(f"environment variable {variable} is not known; known are {', '.join(names)}")
            values[names[variable]] = _parse(variable, names[variable], environ[variable])
        return cls(**values)


class GateState(NamedTuple):
    """What the gate remembers of each of B streams. A stream starts cold: all zero."""

    matches: jax.Array  # f32 [B, 6]: drafts of the bucket that matched, each round counting decay times the next, >= 0
    observed: jax.Array  # f32 [B, 6]: drafts of the bucket whose fate was seen, decayed alike, >= matches
    rounds: jax.Array  # i32 [B]: rounds so far, skipped ones included
    truncated: jax.Array  # i32 [B]: rounds for which the gate chose some but not all drafts, 0 < n < K
    skipped: jax.Array  # i32 [B]: rounds for which it chose none, for either reason
    margin_skipped: jax.Array  # i32 [B]: of those, rounds skipped before the draft by the logit margin


def init(config: GateConfig, batch: int) -> GateState:
    """The state of `batch` cold streams. It is the same for every `config`."""
    del config
    # An array of its own for every field: a buffer that appears twice cannot be donated.
    buckets = (jnp.zeros((batch, N_BUCKETS), jnp.float32) for _ in range(2))
    return GateState(*buckets, *(jnp.zeros((batch,), jnp.int32) for _ in range(4)))


def margin_skip(config: GateConfig, margin: jax.Array) -> jax.Array:
    """Whether to skip the draft, given the anchor's top1 - top2 logit margin: f32 [B] -> bool [B]. A NaN margin skips nothing."""
    threshold = jnp.asarray(config.margin_threshold, jnp.float32)
    return jnp.asarray(config.enabled, bool) & (threshold > 0) & (jnp.asarray(margin, jnp.float32) < threshold)


def choose(config: GateConfig, state: GateState, confidence: jax.Array) -> jax.Array:
    """How many drafts to verify: confidence f32 [B, K] -> n i32 [B], 0..K; K everywhere when the gate is off.

    Raises ConfigError if a `min_draft` known as a Python number exceeds K.
    """
    confidence = jnp.asarray(confidence, jnp.float32)
    _refuse_long_min_draft(config, confidence.shape[-1])
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
        best_tokens, best_cost = jnp.where(better, tokens[n], best_tokens), jnp.where(better, cost[n], best_cost)
    worth_it = best_tokens * cost[block] >= config.margin * tokens[block] * best_cost
    n = jnp.where(worth_it, best, block)
    n = jnp.where(n > 0, jnp.maximum(n, config.min_draft), n)
    return jnp.where(config.enabled, jnp.minimum(n, block), block).astype(jnp.int32)


def observe(config: GateConfig, state: GateState, confidence, accepted, verified, chosen=None) -> GateState:
    """Learns from one round and counts it: confidence f32 [B, K], accepted i32 [B], verified i32 [B].

    A stream with verified n > 0 first decays all its buckets, then adds the drafts 0..min(accepted, n-1): what lies behind the
    first rejection is censored, neither a match nor a miss. A stream with verified 0 observes and decays nothing.
    chosen i32 [B]: what `choose` said, where the end of the cache had room for fewer; None: as verified. It decides what is
    counted: a round that the cache cut short is not one that the gate truncated. A stream with chosen 0 counts nothing.
    """
    as_count = functools.partial(jnp.asarray, dtype=jnp.int32)
    chosen = verified if chosen is None else chosen
    return _observe(config, state, jnp.asarray(confidence, jnp.float32), as_count(accepted), as_count(verified), as_count(chosen))


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
    """Counts a round that verified nothing, where `skipped` (bool [B]); `by_margin` (bool [B]): it was for the logit margin.

    Nothing was seen, so nothing is learned and nothing decays.
    """
    skipped = jnp.asarray(skipped, bool)
    return state._replace(
        rounds=state.rounds + skipped,
        skipped=state.skipped + skipped,
        margin_skipped=state.margin_skipped + (skipped & jnp.asarray(by_margin, bool)),
    )


def stats(state: GateState, stream: int | None = None) -> dict:
    """Counters and bucket rates as plain Python numbers: of one stream, or of all (counters summed, evidence pooled).

    Keys: rounds, truncated, skipped, margin_skipped, bucket_rates (6 match rates, prior included), bucket_observed (6 decayed
    counts), bucket_edges (the 5 edges between the buckets).
    """
    host = GateState(*(np.asarray(leaf) for leaf in state))
    pooled = GateState(*(leaf.sum(axis=0) if stream is None else leaf[stream] for leaf in host))
    rates = (pooled.matches + PRIOR_WEIGHT * PRIOR_RATE) / (pooled.observed + PRIOR_WEIGHT)
    counters = {name: int(getattr(pooled, name)) for name in ("rounds", "truncated", "skipped", "margin_skipped")}
    return counters | {
        "bucket_rates": [float(rate) for rate in rates],
        "bucket_observed": [float(count) for count in pooled.observed],
        "bucket_edges": list(BUCKET_EDGES),
    }


def validate(config: GateConfig, block_size: int) -> None:
    """Raises ConfigError, naming the field, if a number is not one, is out of range, or does not fit `block_size` (K).

    To be called with concrete values, before anything is compiled.
    """
    for field in dataclasses.fields(config):
        problem = _problem(field.name, getattr(config, field.name))
        if problem:
            raise ConfigError(f"gate {field.name}: {problem}")
    _refuse_long_min_draft(config, block_size)
    cheapest, dearest = (config.draft_ms + config.verify_base_ms + config.verify_slope_ms * n for n in (1, block_size))
    if not cheapest >= FLOAT32_TINY:
        raise ConfigError("gate draft_ms, verify_base_ms and verify_slope_ms are all 0: a verified draft must cost something")
    if not dearest <= FLOAT32_MAX:
        raise ConfigError(f"gate draft_ms, verify_base_ms and verify_slope_ms: a block of {block_size} drafts would cost {dearest:g} ms, "
                          "which float32 cannot hold; use smaller numbers")


def _bucket(score):
    """f32 [...] -> i32 [...] in 0..5: the bucket [lo, hi) of a confidence score."""
    return jnp.sum(score[..., None] >= jnp.asarray(BUCKET_EDGES, jnp.float32), axis=-1)


def _rates(state):
    """f32 [B, 6]: the match rate of each bucket, drawn towards 0.75 by a prior worth two observations."""
    return (state.matches + PRIOR_WEIGHT * PRIOR_RATE) / (state.observed + PRIOR_WEIGHT)


def _expected_tokens(rates, confidence):
    """K+1 arrays f32 [B]: the tokens that a round emits on average when n drafts are verified, n = 0..K."""
    match = jnp.take_along_axis(rates, _bucket(confidence), axis=1)
    all_match = jnp.ones(confidence.shape[:1], jnp.float32)
    tokens = [all_match]
    for i in range(confidence.shape[-1]):
        all_match = all_match * match[:, i]
        tokens.append(tokens[-1] + all_match)
    return tokens


def _costs(config, block):
    """K+1 scalars f32, ms: cost(0) is a plain step; a draft already paid for is not charged to it."""
    verify = [config.verify_base_ms + config.verify_slope_ms * n for n in range(1, block + 1)]
    return [jnp.asarray(ms, jnp.float32) for ms in [config.plain_ms] + [config.draft_ms + ms for ms in verify]]


def _variable(name):
    return ENV_PREFIX if name == "enabled" else f"{ENV_PREFIX}_{name.upper()}"


def is_finite(value) -> bool:
    """Whether a number is finite as a float; an integer may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _as_field_type(name, value):
    """A Python or NumPy number as the Python type of its field where that loses nothing; anything else as it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)) or not is_finite(value):
        return value
    if name == "enabled":
        return bool(value) if value in (0, 1) else value
    if isinstance(value, bool):
        return value
    if name == "min_draft":
        return int(value) if value == math.floor(value) else value
    return float(value)


def _parse(variable, name, text):
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"environment variable {variable}={text!r} is not a number") from None
    value = int(value) if value.is_integer() else value
    problem = _problem(name, bool(value) if name == "enabled" and value in (0, 1) else value)
    if problem:
        raise ConfigError(f"environment variable {variable}: {problem}")
    return value


def _problem(name, value):
    """Why `value` cannot be that field's, or None."""
    if name == "enabled":
        return None if isinstance(value, (bool, np.bool_)) else f"{value!r} is neither on nor off; use 1 or 0"
    if not _is_number(value):
        return f"{value!r} is not a number"
    number = float(value) if is_finite(value) else math.inf
    if not abs(number) <= FLOAT32_MAX:
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
        return f"{shown} is not a finite number of float32"
    if name == "min_draft":
        return None if number >= 0 and number.is_integer() else f"{value!r} must be a whole number, 0 or more"
    if name == "decay":
        return None if 0 <= number <= 1 else f"{value!r} must lie in 0..1"
    if name in ("margin", "plain_ms"):
        return None if number >= FLOAT32_TINY else f"{value!r} must be more than 0" + (", in float32" if number > 0 else "")
    return None if number >= 0 else f"{value!r} must be 0 or more"


def _is_number(value):
    """A Python number or an array of one."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim == 0 and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse_long_min_draft(config, block_size):
    if isinstance(config.min_draft, int) and config.min_draft > block_size:
        raise ConfigError(f"gate min_draft: {config.min_draft} exceeds the draft block of {block_size} tokens; use at most that")
