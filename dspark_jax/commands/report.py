"""What a run came to: for a program as values of JSON, for people as a few lines."""

from __future__ import annotations

from collections.abc import Sequence


def logprobs(told: Sequence) -> list[dict]:
    """Of TokenLogprobs: {token, logprob, best}; best: [[token, logprob], ...]."""
    return [{"token": one.token, "logprob": one.logprob, "best": one.best} for one in told]


def speed(stats: dict, how: str) -> str:
    """ "1280 tokens in 3.21 s, 398.8 tok/s (block, ...; compilation 4.1 s not counted)". how: what
    stands first in the brackets.
    """
    from dspark_jax.decode.options import counted

    per_second = stats["tokens_per_second"] or 0.0  # None where it ended before any time had passed
    return (
        f"{counted(stats['tokens'], 'token')} in {stats['seconds']:.2f} s, {per_second:.1f} tok/s "
        f"({how}; compilation {stats['compile_seconds']:.1f} s not counted)"
    )


def rounds(stats: dict, gated: bool) -> list[str]:
    """Lines about rounds, if there were any, and with a gate its counters."""
    lines = []
    if stats["rounds"]:
        rate = (
            "none verified"
            if stats["accept_rate"] is None
            else f"{100 * stats['accept_rate']:.0f}% of those verified"
        )
        lines.append(
            f"{stats['rounds']} rounds, {stats['accepted'] / stats['rounds']:.2f} drafts "
            f"accepted per round ({rate})"
        )
    if stats["gate"] and gated:
        gate = stats["gate"]
        lines.append(
            f"gate: {gate['truncated']} rounds truncated, {gate['skipped']} skipped "
            f"({gate['margin_skipped']} by margin)"
        )
    return lines
