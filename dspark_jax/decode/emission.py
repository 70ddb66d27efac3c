"""What the engine tells of a run, piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from dspark_jax.decode.sampling import Likelihood
from dspark_jax.decode.state import Begun, RoundOutput


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What one round did.

    proposed: drafts made, K, or 0 after a margin skip. verified: drafts chosen to be verified, of
      those that the cache has room for.
    accepted: leading ones that matched. confidence: K raw scores, None after a margin skip. margin:
    top1 - top2 of the anchor's logits. skipped: "", "gate" or "margin".
    """

    proposed: int
    verified: int
    accepted: int
    confidence: tuple[float, ...] | None
    margin: float
    skipped: str


class TokenLogprob(NamedTuple):
    """A token at its place, and how likely it was there: natural logarithms of probabilities, from
    the raw logits at temperature 1.

    logprob: None for the first token of a prompt, which nothing precedes. best: the n most likely
    tokens at this place, (token, its log-probability), the best first and the lowest id first among
    equals.
    """

    token: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Emission:
    """Tokens of a prompt that became known together.

    prompt: its number in the request. record: None for the first token (chosen by the prefill) and
      in plain mode.
    last: nothing follows. text: what the tokens add to the text, where a Run makes it. logprobs: of
    the tokens, where asked for.
    """

    prompt: int
    tokens: list[int]
    record: RoundRecord | None
    last: bool
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None


def first_emission(number: int, begun: Begun, best: int | None) -> Emission:
    """Of the prefill that ended a prompt; begun: of this stream."""
    token = int(begun.token)
    logprobs = None
    if best is not None:
        logprobs = told(jax.tree.map(lambda leaf: leaf[None], begun.likelihood), 0, [token], best)
    return Emission(number, [token], None, bool(begun.last), logprobs=logprobs)


def round_emission(
    number: int, outputs: RoundOutput, i: int, b: int, plain: bool, best: int | None
) -> Emission | None:
    """Of row b of round i of a call; None where it emitted nothing."""
    tokens = outputs.tokens[i, b, : outputs.kept[i, b]].tolist()
    if not tokens:
        return None
    logprobs = None
    if best is not None:
        logprobs = told(jax.tree.map(lambda leaf: leaf[i], outputs.likelihood), b, tokens, best)
    record = None if plain else _record(outputs, i, b)
    return Emission(number, tokens, record, bool(outputs.last[i, b]), logprobs=logprobs)


def told(likelihood: Likelihood, b: int, tokens: Sequence[int], best: int) -> list[TokenLogprob]:
    """What a Likelihood says of the first tokens of row b. best: how many of the most likely ones
    were asked for, of those that the program tells.
    """
    chosen = likelihood.chosen[b, : len(tokens)].tolist()
    ids = likelihood.best_ids[b, : len(tokens), :best].tolist()
    values = likelihood.best[b, : len(tokens), :best].tolist()
    return [
        TokenLogprob(token, own, tuple(zip(best_ids, best_values)))
        for token, own, best_ids, best_values in zip(tokens, chosen, ids, values)
    ]


def _record(outputs: RoundOutput, i: int, b: int) -> RoundRecord:
    skipped = ("", "gate", "margin")[int(outputs.skipped[i, b])]
    confidence = None if skipped == "margin" else tuple(float(c) for c in outputs.confidence[i, b])
    return RoundRecord(
        int(outputs.proposed[i, b]),
        int(outputs.verified[i, b]),
        int(outputs.accepted[i, b]),
        confidence,
        float(outputs.margin[i, b]),
        skipped,
    )


def damaged_drafts(record: RoundRecord | None, prompt: int, position: int) -> str | None:
    """What is wrong with the drafts of a round, or None.

    A drafter that is not finite is never right: all rounds would be slow and, as the tokens stay
    right, nobody would know why.
    """
    if record is None or record.confidence is None or np.isfinite(record.confidence).all():
        return None
    return (
        f"prompt {prompt}: the drafts of the round at position {position} are not finite "
        "(NaN or infinity), while "
        "the main model's logits are: a tensor under mtp.* (the drafter) or the embedding of "
        "its noise token is damaged; fetch the checkpoint again, or decode without the "
        "drafter, mode='plain'"
    )


def not_finite(prompt: int, position: int) -> str:
    return (
        f"prompt {prompt}: the logits at position {position} are not finite (NaN or infinity); "
        "the weights or the computation "
        "are damaged: fetch the checkpoint again, and try dtype='float32'"
    )
