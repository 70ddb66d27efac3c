"""One speculative round, and the loop of rounds on the device: margin check, draft, gate, verify,
commit, observe.

Three modes give the same tokens, bit for bit:
* plain: no drafts; one row a step.
* sequential: the drafts are verified one row at a time and the loop ends at the first mismatch, so
  that no position is ever computed that is not committed.
* block: all chosen drafts are verified in one call; what does not match is simply not committed.

What the main model says at the rows it verified, up to and including the first that differs from
the draft, is exactly what a plain decode would have said: these are the emitted tokens. B: streams,
K: draft block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.decode import gate, sampling
from dspark_jax.decode.gate import GateConfig
from dspark_jax.decode.sampling import Choice, Likelihood
from dspark_jax.decode.state import (
    GATE_SKIP,
    MARGIN_SKIP,
    NOT_SKIPPED,
    ROUNDS_PER_CALL,
    Begun,
    Chunk,
    RoundOutput,
    RoundState,
    Settings,
    Variant,
    Verdict,
)
from dspark_jax.model.cache import Cache, commit
from dspark_jax.model.dspark import DSpark, Limits, draft_step, extend_step
from dspark_jax.runtime.sharding import model_shards


def kept_tokens(
    tokens: jax.Array, emitted: jax.Array, remaining: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where a stream ends: with its first stop token, or with the last token that is wanted.

    Of tokens [B, T] the first emitted [B] count, and remaining [B] more are wanted; stop_ids
    [B, S]. Returns how many of them the stream is to have, int32 [B], and whether it ends so, bool
    [B].
    """
    most = jnp.minimum(emitted, remaining)
    stops = jnp.any(tokens[..., None] == stop_ids[:, None], axis=-1)
    stops &= jnp.arange(tokens.shape[1]) < most[:, None]
    stopped = jnp.any(stops, axis=1)
    kept = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, most)
    return kept, stopped | (kept == remaining)


def places(position: jax.Array, rows: int) -> jax.Array:
    """[B, rows]: where the tokens will stand that rows from position [B] on choose."""
    return position[:, None] + 1 + jnp.arange(rows)


def one_token_rows(module: DSpark, limits: Limits, streams: int) -> int:
    """Rows of each of `streams` streams (on this device) where each computes one token.

    Where a stream by itself needs two, only because a CPU multiplies a single row in another order,
    several streams need one each: together they are several rows, and in the products that are made
    stream by stream several heads are.
    """
    config = module.main.config
    heads = min(config.num_attention_heads, config.index_n_heads) // model_shards()
    return 1 if limits.decode_rows == 2 and streams > 1 and heads > 1 else limits.decode_rows


def _one_token(module: DSpark, limits: Limits, token: jax.Array) -> jax.Array:
    """token [B] -> [B, rows], padded."""
    rows = one_token_rows(module, limits, token.shape[0])
    return jnp.pad(token[:, None], [(0, 0), (0, rows - 1)])


def plain_step(module: DSpark, limits: Limits, choice: Choice, state: RoundState) -> Verdict:
    """One row of every stream that is not done; the drafter's rings are left alone."""
    active = ~state.done
    tokens = _one_token(module, limits, state.anchor)
    y, _, cache, _ = module.main.extend(state.cache, tokens, active.astype(jnp.int32), "decode")
    logits = module.main.logits(y)[:, :1]
    said = sampling.choose(choice, logits, places(cache.position, 1))
    cache = commit(cache, active.astype(jnp.int32))
    return Verdict(cache, said, jnp.zeros_like(state.anchor), logits)


def verify_block(
    module: DSpark,
    limits: Limits,
    choice: Choice,
    state: RoundState,
    drafts: jax.Array,
    n: jax.Array,
) -> Verdict:
    """Computes the anchor and the first n [B] of drafts [B, K] in one call, and commits the anchor
    and the accepted ones.
    """
    active = ~state.done
    tokens = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    y, _, cache = extend_step(module, state.cache, tokens, jnp.where(active, n + 1, 0), "decode")
    logits = module.main.logits(y)
    said = sampling.choose(choice, logits, places(cache.position, tokens.shape[1]))
    match = (said[:, :-1] == drafts) & (jnp.arange(drafts.shape[1]) < n[:, None])
    accepted = jnp.sum(jnp.cumprod(match, axis=1), axis=1).astype(jnp.int32)
    return Verdict(commit(cache, jnp.where(active, accepted + 1, 0)), said, accepted, logits)


def verify_sequentially(
    module: DSpark,
    limits: Limits,
    choice: Choice,
    state: RoundState,
    drafts: jax.Array,
    n: jax.Array,
) -> Verdict:
    """Like `verify_block`, row by row: a stream stops at its first mismatch, the loop when all have
    stopped.
    """
    batch, block = drafts.shape

    def body(carry):
        i, going, token, verdict = carry
        tokens = _one_token(module, limits, token)
        y, _, cache = extend_step(module, verdict.cache, tokens, going.astype(jnp.int32), "decode")
        logits = module.main.logits(y)[:, :1]
        said = sampling.choose(choice, logits, places(cache.position, 1))[:, 0]
        draft = drafts[:, jnp.minimum(i, block - 1)]
        match = going & (i < n) & (said == draft)
        verdict = Verdict(
            commit(cache, going.astype(jnp.int32)),
            verdict.tokens.at[:, i].set(jnp.where(going, said, verdict.tokens[:, i])),
            verdict.accepted + match,
            verdict.logits.at[:, i].set(logits[:, 0]),
        )
        return i + 1, match, draft, verdict

    start = Verdict(
        state.cache,
        jnp.zeros((batch, block + 1), jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch, block + 1, module.main.config.vocab_size), jnp.float32),
    )
    carry = jnp.int32(0), ~state.done, state.anchor, start
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), body, carry)[3]


def speculative_step(
    module: DSpark,
    limits: Limits,
    config: GateConfig,
    verify,
    settings: Settings,
    state: RoundState,
):
    """One round of `verify`: the state with what the gate learned, what was done about drafts (as
    in RoundOutput), and the Verdict.

    Near the end of the cache only drafts that it has room for are verified; the gate's counters
    tell what the gate chose. It goes by scaled scores; what is told are raw ones.
    """
    active, choice = ~state.done, settings.choice
    by_margin = active & gate.margin_skip(config, state.margin)
    drafts, confidence = _draft_unless(module, choice, state, jnp.all(by_margin | state.done))
    scores = gate.scaled(confidence, settings.temperatures, settings.offsets)
    block = drafts.shape[1]
    room = jnp.maximum(limits.max_seq_len - 1 - state.cache.position, 0)
    chosen = jnp.where(active & ~by_margin, gate.choose(config, state.gate, scores), 0)
    n = jnp.minimum(chosen, room)
    verdict = verify(module, limits, choice, state, drafts, n)
    skipped = active & (chosen == 0)
    outcome = gate.Outcome(scores, verdict.accepted, n, chosen, skipped, by_margin)
    drafted = {
        "proposed": jnp.where(active & ~by_margin, block, 0),
        "verified": n,
        "confidence": confidence,
        "skipped": jnp.where(by_margin, MARGIN_SKIP, jnp.where(skipped, GATE_SKIP, NOT_SKIPPED)),
    }
    return state.replace(gate=gate.learn(config, state.gate, outcome)), drafted, verdict


def _draft_unless(
    module: DSpark, choice: Choice, state: RoundState, skip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts [B, K] and confidence [B, K]; zeros where `skip`. A loop of no or one trip, since a
    cond would copy the caches it reads.
    """
    block = module.main.config.dspark_block_size
    batch = state.anchor.shape[0]

    def best(logits, position):
        return sampling.choose(choice, logits[:, None], position[:, None])[:, 0]

    def body(carry):
        draft = draft_step(module, state.cache, state.anchor, choose=best)
        return jnp.bool_(True), draft.tokens, draft.confidence

    empty = skip, jnp.zeros((batch, block), jnp.int32), jnp.zeros((batch, block), jnp.float32)
    return jax.lax.while_loop(lambda carry: ~carry[0], body, empty)[1:]


def step(
    module: DSpark,
    limits: Limits,
    variant: Variant,
    config: GateConfig,
    settings: Settings,
    state: RoundState,
):
    """One round of every stream that is not done.

    Returns the state, the RoundOutput and the verified logits [B, K+1, V] (plain: [B, 1, V]).
    """
    choice = settings.choice
    if variant.mode == "plain":
        verdict = plain_step(module, limits, choice, state)
        drafted = _nothing_drafted(module, state)
    else:
        verify = {"sequential": verify_sequentially, "block": verify_block}[variant.mode]
        state, drafted, verdict = speculative_step(module, limits, config, verify, settings, state)
    output, state = _output(state, drafted, verdict, settings.stop_ids, variant.likely)
    return _advance(choice, state, output, verdict), output, verdict.logits


def _nothing_drafted(module: DSpark, state: RoundState) -> dict[str, jax.Array]:
    none = jnp.zeros_like(state.anchor)
    confidence = jnp.zeros((none.shape[0], module.main.config.dspark_block_size), jnp.float32)
    return {"proposed": none, "verified": none, "confidence": confidence, "skipped": none}


def _output(
    state: RoundState,
    drafted: dict[str, jax.Array],
    verdict: Verdict,
    stop_ids: jax.Array,
    likely: int | None,
) -> tuple[RoundOutput, RoundState]:
    """What the round did, up to the first kept token whose logits are not finite, and the state
    with the position of such a fault.
    """
    emitted = jnp.where(state.done, 0, verdict.accepted + 1)
    kept, last = kept_tokens(verdict.tokens, emitted, state.remaining, stop_ids)
    broken = jnp.arange(verdict.tokens.shape[1]) < kept[:, None]
    broken &= ~sampling.finite(verdict.logits)
    first, fault = jnp.argmax(broken, axis=1).astype(jnp.int32), jnp.any(broken, axis=1)
    output = RoundOutput(
        tokens=verdict.tokens,
        emitted=jnp.where(fault, first, emitted),
        kept=jnp.where(fault, first, kept),
        last=last & ~fault,
        accepted=verdict.accepted,
        margin=state.margin,
        likelihood=_likelihood(verdict.logits, verdict.tokens, likely),
        **drafted,
    )
    position = state.cache.position + first
    return output, state.replace(faulty=jnp.where(fault, position, state.faulty))


def _likelihood(logits: jax.Array, tokens: jax.Array, likely: int | None) -> Likelihood | None:
    return None if likely is None else sampling.likelihood(logits, tokens, likely)


def _advance(
    choice: Choice, state: RoundState, output: RoundOutput, verdict: Verdict
) -> RoundState:
    """The last kept token becomes the anchor, and the cache ends before it, also where a stream
    ends in the middle of what was accepted. The end of a stream or a fault makes it done.
    """
    last = jnp.maximum(output.kept - 1, 0)[:, None]
    chosen_by = jnp.take_along_axis(verdict.logits, last[..., None], axis=1)[:, 0]
    margin = sampling.margin(sampling.biased(choice, chosen_by))
    anchor = jnp.take_along_axis(output.tokens, last, axis=1)[:, 0]
    return state.replace(
        cache=verdict.cache.replace(position=state.cache.position + output.kept),
        anchor=jnp.where(state.done, state.anchor, anchor),
        margin=jnp.where(state.done, state.margin, margin),
        remaining=state.remaining - output.kept,
        done=state.done | output.last | (state.faulty >= 0),
    )


def run(
    module: DSpark,
    limits: Limits,
    variant: Variant,
    config: GateConfig,
    settings: Settings,
    state: RoundState,
    most: jax.Array,
    waiting: jax.Array,
):
    """Up to `most` (at most ROUNDS_PER_CALL) rounds on the device, until all streams are done; or,
    while prompts are waiting (bool), until one is.

    Returns the state, the RoundOutputs stacked [ROUNDS_PER_CALL, ...], and how many of them were
      filled.
    """

    def one(state):
        return step(module, limits, variant, config, settings, state)[:2]

    block = module.main.config.dspark_block_size
    outputs = no_outputs(state.anchor.shape[0], block, variant)

    def body(carry):
        i, state, outputs = carry
        state, output = one(state)
        return i + 1, state, jax.tree.map(lambda all, new: all.at[i].set(new), outputs, output)

    def more(carry):
        i, state, _ = carry
        free = waiting & jnp.any(state.done)
        return (i < most) & ~jnp.all(state.done) & ~free

    count, state, outputs = jax.lax.while_loop(more, body, (jnp.int32(0), state, outputs))
    return state, outputs, count


def no_outputs(streams: int, block: int, variant: Variant) -> RoundOutput:
    """Room for the RoundOutputs of a call. Written out, because asking jax for their shapes would
    trace a whole round once more.
    """

    def room(*shape, dtype=jnp.int32):
        return jnp.zeros((ROUNDS_PER_CALL, streams, *shape), dtype)

    rows, likely = 1 if variant.mode == "plain" else block + 1, variant.likely
    return RoundOutput(
        tokens=room(rows),
        emitted=room(),
        kept=room(),
        last=room(dtype=jnp.bool_),
        proposed=room(),
        verified=room(),
        accepted=room(),
        confidence=room(block, dtype=jnp.float32),
        margin=room(dtype=jnp.float32),
        skipped=room(),
        likelihood=None
        if likely is None
        else Likelihood(
            chosen=room(rows, dtype=jnp.float32),
            best_ids=room(rows, likely),
            best=room(rows, likely, dtype=jnp.float32),
        ),
    )


def begin(
    module: DSpark,
    likely: int | None,
    scored: bool,
    cache: Cache,
    settings: Settings,
    chunk: Chunk,
) -> tuple[Cache, Begun]:
    """One prefill chunk: the cache, committed, and what the last valid row says. scored: and how
    likely each token of the prompt was. The token is chosen by the same logits either way.
    """
    choice = settings.choice
    cache = cache.replace(position=jnp.where(chunk.fresh, 0, cache.position))
    y, _, cache = extend_step(module, cache, chunk.tokens, chunk.valid, "prefill")
    last_row = jnp.take_along_axis(y, (chunk.valid - 1)[:, None, None], axis=1)
    logits = module.main.logits(last_row)
    cache = commit(cache, chunk.valid)
    token = sampling.choose(choice, logits, cache.position[:, None])
    _, last = kept_tokens(token, jnp.ones_like(chunk.valid), chunk.remaining, settings.stop_ids)
    begun = Begun(
        token=token[:, 0],
        margin=sampling.margin(sampling.biased(choice, logits[:, 0])),
        finite=sampling.finite(logits[:, 0]),
        last=last,
        likelihood=_likelihood(logits, token, likely),
        prompt=_likelihood(module.main.logits(y), chunk.following, likely) if scored else None,
    )
    return cache, begun
