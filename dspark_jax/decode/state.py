"""What streams carry from round to round, and what a round, or a chunk of a prompt, says. B:
streams, K: draft block.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import struct

from dspark_jax.decode.gate import GateState
from dspark_jax.decode.sampling import Choice, Likelihood
from dspark_jax.model.cache import Cache

NOT_SKIPPED, GATE_SKIP, MARGIN_SKIP = 0, 1, 2
ROUNDS_PER_CALL = 32


@dataclasses.dataclass(frozen=True)
class Variant:
    """What makes a program another program. Whether streams are sampled shows in their settings.

    mode: one of MODES. likely: the so many most likely tokens are told with every token's own
      log-probability; None: neither is.
    """

    mode: str
    likely: int | None = None


@struct.dataclass
class Settings:
    """What B streams were asked for.

    choice: how their tokens are chosen. stop_ids: [B, S] int32, padded with -1; each ends the
      stream and is its last token.
    temperatures, offsets: [B, K] float32, by which the gate scales the drafter's scores; 1 and 0
      where nothing is calibrated.
    """

    choice: Choice
    stop_ids: jax.Array
    temperatures: jax.Array
    offsets: jax.Array


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
    # [B] int32: accepted + 1; fewer where the logits after a token that is kept are not finite
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
    likelihood: Likelihood | None  # of `tokens`; None where it was not asked for


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
    likelihood: Likelihood | None  # of `token`, [B, 1]
    prompt: Likelihood | None  # of the tokens that follow each row in the prompt, [B, T]


@struct.dataclass
class Chunk:
    """A part of B prompts.

    fresh: [B] bool, the cache of the stream is to be taken as empty. tokens: [B, T] int32, of which
      the first valid [B] count. following: [B, T] int32, the token of the prompt after each.
    remaining: [B] int32, tokens that the stream is to have.
    """

    fresh: jax.Array
    tokens: jax.Array
    valid: jax.Array
    following: jax.Array
    remaining: jax.Array
