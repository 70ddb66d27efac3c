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
from flax import struct

from dspark_jax.decode import gate, sampling
from dspark_jax.decode.gate import GateConfig, GateState
from dspark_jax.model.cache import Cache, commit
from dspark_jax.model.dspark import DSpark, Limits, draft_step, extend_step

NOT_SKIPPED, GATE_SKIP, MARGIN_SKIP = 0, 1, 2
ROUNDS_PER_CALL = 32


@struct.dataclass
class RoundState:
    """What B streams carry from round to round."""

    cache: Cache
    # [B] int32: the last emitted token; it stands at the cache's position and is not computed yet
    anchor: jax.Array
    margin: jax.Array  # [B] float32, logits: top1 - top2 where the anchor was chosen
    remaining: jax.Array  # [B] int32: tokens still wanted
    done: jax.Array  # [B] bool: nothing more is wanted
    faulty: jax.Array  # [B] int32: position whose logits were not finite, or -1
    gate: GateState


@struct.dataclass
class RoundOutput:
    """What one round did; of a stream that was done before: emitted 0."""

    tokens: jax.Array  # [B, K+1] int32: what the main model says; the first `emitted` count
    # [B] int32: accepted + 1; fewer where the logits behind a token that is kept are not finite
    emitted: jax.Array
    kept: jax.Array  # [B] int32: of those, the ones up to the end of the stream
    last: jax.Array  # [B] bool: the stream ends with them
    proposed: jax.Array  # [B] int32: K, or 0 after a margin skip
    # [B] int32: drafts chosen to be verified, of those that the cache has room for
    verified: jax.Array
    accepted: jax.Array  # [B] int32: leading drafts that matched
    confidence: jax.Array  # [B, K] float32; of no meaning after a margin skip
    margin: jax.Array  # [B] float32: of the anchor that the round began with
    skipped: jax.Array  # [B] int32: NOT_SKIPPED, GATE_SKIP or MARGIN_SKIP


@struct.dataclass
class Verdict:
    """What verifying found. `logits` are [B, K+1, V]: rows up to `accepted` are those of a plain
    decode, later ones have no meaning.
    """

    cache: Cache
    tokens: jax.Array  # [B, K+1] int32
    accepted: jax.Array  # [B] int32
    logits: jax.Array


@struct.dataclass
class Begun:
    """What the last row of a chunk of the prompt says; of use where the prompt ends with it."""

    token: jax.Array  # [B] int32: the first token of the stream
    margin: jax.Array  # [B] float32, logits: top1 - top2 where it was chosen
    finite: jax.Array  # [B] bool: the logits that it was chosen by are sound
    last: jax.Array  # [B] bool: the stream ends with it


def kept_tokens(
    tokens: jax.Array, emitted: jax.Array, remaining: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where a stream ends: with its first stop token, or with the last token that is wanted.

    Of tokens [B, T] the first emitted [B] count, and remaining [B] more are wanted; stop_ids [S].
    Returns how many of them the stream is to have, int32 [B], and whether it ends so, bool [B].
    """
    most = jnp.minimum(emitted, remaining)
    stops = jnp.any(tokens[..., None] == stop_ids, axis=-1)
    stops &= jnp.arange(tokens.shape[1]) < most[:, None]
    stopped = jnp.any(stops, axis=1)
    kept = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, most)
    return kept, stopped | (kept == remaining)


def plain_step(module: DSpark, limits: Limits, state: RoundState) -> Verdict:
    """One row of every stream that is not done; the drafter's rings are left alone."""
    active = ~state.done
    tokens = jnp.pad(state.anchor[:, None], [(0, 0), (0, limits.decode_rows - 1)])
    y, _, cache, _ = module.main.extend(state.cache, tokens, active.astype(jnp.int32), "decode")
    logits = module.main.logits(y)[:, :1]
    cache = commit(cache, active.astype(jnp.int32))
    return Verdict(cache, sampling.choose(logits), jnp.zeros_like(state.anchor), logits)


def verify_block(
    module: DSpark, limits: Limits, state: RoundState, drafts: jax.Array, n: jax.Array
) -> Verdict:
    """Computes the anchor and the first n [B] of drafts [B, K] in one call, and commits the anchor
    and the accepted ones.
    """
    active = ~state.done
    tokens = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    y, _, cache = extend_step(module, state.cache, tokens, jnp.where(active, n + 1, 0), "decode")
    logits = module.main.logits(y)
    said = sampling.choose(logits)
    match = (said[:, :-1] == drafts) & (jnp.arange(drafts.shape[1]) < n[:, None])
    accepted = jnp.sum(jnp.cumprod(match, axis=1), axis=1).astype(jnp.int32)
    return Verdict(commit(cache, jnp.where(active, accepted + 1, 0)), said, accepted, logits)


def verify_sequentially(
    module: DSpark, limits: Limits, state: RoundState, drafts: jax.Array, n: jax.Array
) -> Verdict:
    """Like `verify_block`, row by row: a stream stops at its first mismatch, the loop when all have
    stopped.
    """
    batch, block = drafts.shape

    def body(carry):
        i, going, token, verdict = carry
        tokens = jnp.pad(token[:, None], [(0, 0), (0, limits.decode_rows - 1)])
        y, _, cache = extend_step(module, verdict.cache, tokens, going.astype(jnp.int32), "decode")
        logits = module.main.logits(y)[:, 0]
        said = sampling.choose(logits)
        draft = drafts[:, jnp.minimum(i, block - 1)]
        match = going & (i < n) & (said == draft)
        verdict = Verdict(
            commit(cache, going.astype(jnp.int32)),
            verdict.tokens.at[:, i].set(jnp.where(going, said, verdict.tokens[:, i])),
            verdict.accepted + match,
            verdict.logits.at[:, i].set(logits),
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


def speculative_step(module: DSpark, limits: Limits, config: GateConfig, verify, state: RoundState):
    """One round of `verify`: the state with what the gate learned, what was done about drafts (as
    in RoundOutput), and the Verdict.

    Near the end of the cache only drafts that it has room for are verified; the gate's counters
    tell what the gate chose.
    """
    active = ~state.done
    by_margin = active & gate.margin_skip(config, state.margin)
    drafts, confidence = _draft_unless(module, state, jnp.all(by_margin | state.done))
    block = drafts.shape[1]
    room = jnp.maximum(limits.max_seq_len - 1 - state.cache.position, 0)
    chosen = jnp.where(active & ~by_margin, gate.choose(config, state.gate, confidence), 0)
    n = jnp.minimum(chosen, room)
    verdict = verify(module, limits, state, drafts, n)
    skipped = active & (chosen == 0)
    outcome = gate.Outcome(confidence, verdict.accepted, n, chosen, skipped, by_margin)
    drafted = {
        "proposed": jnp.where(active & ~by_margin, block, 0),
        "verified": n,
        "confidence": confidence,
        "skipped": jnp.where(by_margin, MARGIN_SKIP, jnp.where(skipped, GATE_SKIP, NOT_SKIPPED)),
    }
    return state.replace(gate=gate.learn(config, state.gate, outcome)), drafted, verdict


def _draft_unless(
    module: DSpark, state: RoundState, skip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts [B, K] and confidence [B, K]; zeros where `skip`. A loop of no or one trip, since a
    cond would copy the caches it reads.
    """
    block = module.main.config.dspark_block_size
    batch = state.anchor.shape[0]

    def body(carry):
        draft = draft_step(module, state.cache, state.anchor)
        return jnp.bool_(True), draft.tokens, draft.confidence

    empty = skip, jnp.zeros((batch, block), jnp.int32), jnp.zeros((batch, block), jnp.float32)
    return jax.lax.while_loop(lambda carry: ~carry[0], body, empty)[1:]


def step(
    module: DSpark,
    limits: Limits,
    mode: str,
    config: GateConfig,
    state: RoundState,
    stop_ids: jax.Array,
):
    """One round of every stream that is not done, in a mode of MODES; stop_ids [S] int32, padded
    with -1.

    Returns the state, the RoundOutput and the verified logits [B, K+1, V] (plain: [B, 1, V]).
    """
    if mode == "plain":
        verdict, drafted = plain_step(module, limits, state), _nothing_drafted(module, state)
    else:
        verify = {"sequential": verify_sequentially, "block": verify_block}[mode]
        state, drafted, verdict = speculative_step(module, limits, config, verify, state)
    output, state = _output(state, drafted, verdict, stop_ids)
    return _advance(state, output, verdict), output, verdict.logits


def _nothing_drafted(module: DSpark, state: RoundState) -> dict[str, jax.Array]:
    none = jnp.zeros_like(state.anchor)
    confidence = jnp.zeros((none.shape[0], module.main.config.dspark_block_size), jnp.float32)
    return {"proposed": none, "verified": none, "confidence": confidence, "skipped": none}


def _output(
    state: RoundState, drafted: dict[str, jax.Array], verdict: Verdict, stop_ids: jax.Array
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
        **drafted,
    )
    position = state.cache.position + first
    return output, state.replace(faulty=jnp.where(fault, position, state.faulty))


def _advance(state: RoundState, output: RoundOutput, verdict: Verdict) -> RoundState:
    """The last emitted token becomes the anchor. The end of a stream or a fault makes it done."""
    last = jnp.maximum(output.emitted - 1, 0)[:, None]
    chosen_by = jnp.take_along_axis(verdict.logits, last[..., None], axis=1)[:, 0]
    anchor = jnp.take_along_axis(output.tokens, last, axis=1)[:, 0]
    return state.replace(
        cache=verdict.cache,
        anchor=jnp.where(state.done, state.anchor, anchor),
        margin=jnp.where(state.done, state.margin, sampling.margin(chosen_by)),
        remaining=state.remaining - output.kept,
        done=state.done | output.last | (state.faulty >= 0),
    )


def run(
    module: DSpark,
    limits: Limits,
    mode: str,
    config: GateConfig,
    state: RoundState,
    stop_ids: jax.Array,
    most: jax.Array,
):
    """Up to `most` (at most ROUNDS_PER_CALL) rounds on the device, until all streams are done.

    Returns the state, the RoundOutputs stacked [ROUNDS_PER_CALL, ...], and how many of them were
      filled.
    """

    def one(state):
        return step(module, limits, mode, config, state, stop_ids)[:2]

    outputs = _no_outputs(state.anchor.shape[0], module.main.config.dspark_block_size, mode)

    def body(carry):
        i, state, outputs = carry
        state, output = one(state)
        return i + 1, state, jax.tree.map(lambda all, new: all.at[i].set(new), outputs, output)

    def more(carry):
        i, state, _ = carry
        return (i < most) & ~jnp.all(state.done)

    count, state, outputs = jax.lax.while_loop(more, body, (jnp.int32(0), state, outputs))
    return state, outputs, count


def _no_outputs(streams: int, block: int, mode: str) -> RoundOutput:
    """Room for the RoundOutputs of a call. Written out, because asking jax for their shapes would
    trace a whole round once more.
    """

    def room(*shape, dtype=jnp.int32):
        return jnp.zeros((ROUNDS_PER_CALL, streams, *shape), dtype)

    return RoundOutput(
        tokens=room(1 if mode == "plain" else block + 1),
        emitted=room(),
        kept=room(),
        last=room(dtype=jnp.bool_),
        proposed=room(),
        verified=room(),
        accepted=room(),
        confidence=room(block, dtype=jnp.float32),
        margin=room(dtype=jnp.float32),
        skipped=room(),
    )


def begin(
    module: DSpark,
    cache: Cache,
    tokens: jax.Array,
    valid: jax.Array,
    remaining: jax.Array,
    stop_ids: jax.Array,
) -> tuple[Cache, Begun]:
    """One prefill chunk, tokens [B, T] of which valid [B] count, of streams of which remaining [B]
    tokens are wanted: the cache, committed, and what the last valid row says.
    """
    y, _, cache = extend_step(module, cache, tokens, valid, "prefill")
    last_row = jnp.take_along_axis(y, (valid - 1)[:, None, None], axis=1)
    logits = module.main.logits(last_row)[:, 0]
    token = sampling.choose(logits)
    _, last = kept_tokens(token[:, None], jnp.ones_like(token), remaining, stop_ids)
    begun = Begun(token, sampling.margin(logits), sampling.finite(logits), last)
    return commit(cache, valid), begun
