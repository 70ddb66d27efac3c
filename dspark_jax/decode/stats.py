"""What a run amounted to: counts, rates and seconds of one prompt and of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dspark_jax.decode import gate as gates
from dspark_jax.decode.emission import Emission, RoundRecord, TokenLogprob


@dataclasses.dataclass
class PromptRun:
    """One prompt's run so far.

    seconds: from the beginning of its prefill to its last token, without compilation.
    first_seconds: to its first one. pieces: of its text, one an emission, where text is made as it
    comes.
    """

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    records: list[RoundRecord] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    first_seconds: float | None = None
    finished: bool = False
    finish_reason: str = "interrupted"
    stop_reason: int | str | None = None
    gate_state: gates.GateState | None = None

    def add(self, emission: Emission, seconds: float) -> None:
        """What was emitted, `seconds` after the beginning."""
        self.tokens += emission.tokens
        self.logprobs += emission.logprobs or []
        if emission.record is not None:
            self.records.append(emission.record)
        if self.first_seconds is None:
            self.first_seconds = seconds
        self.seconds = seconds

    def finish(self, stop: str | None, stop_token_ids: frozenset[int]) -> None:
        """Nothing follows. stop: the stop string that ended it."""
        self.finished, self.finish_reason = True, "length"
        if stop is None and self.tokens[-1] in stop_token_ids:
            stop = self.tokens[-1]
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop


def collect(
    runs: list[PromptRun],
    block: int,
    compile_seconds: float,
    seconds: float,
    streams: int = 1,
    slot_rounds: int = 0,
    worked: int = 0,
) -> dict:
    """Totals over prompts, and `per_prompt` the same of each.

    tokens, rounds, proposed, verified, accepted: counts. accept_rate: accepted / verified, None
      without verified drafts.
    tokens_per_round: mean of accepted + 1, None without rounds. seconds, tokens_per_second: without
      compilation; of all prompts from the beginning of the first to the end of the last, of one
      from the beginning of its prefill to its last token, which is the speed that its stream had.
    compile_seconds. accepted_by_position: [K] rounds in which the draft at this position was
      accepted.
    time_to_first_token, time_per_token: seconds, of one prompt (the latter after its first token,
      None where there is no other); of all the means over prompts.
    streams: places for streams. busy_share: of all rounds of all places, those in which a stream
      was at work; None without rounds.
    gate: counters and bucket rates (gate.stats), None without speculative rounds.
    """
    total = _counts(runs, block, seconds)
    total["time_to_first_token"] = _mean(run.first_seconds for run in runs)
    total["time_per_token"] = _mean(_per_token(run) for run in runs)
    total["streams"] = streams
    total["busy_share"] = worked / slot_rounds if slot_rounds else None
    total["compile_seconds"] = compile_seconds
    total["gate"] = _gate(
        [run.gate_state for run in runs if run.records and run.gate_state is not None]
    )
    total["per_prompt"] = [
        _counts([run], block, run.seconds)
        | {
            "prompt_tokens": run.prompt_tokens,
            "time_to_first_token": run.first_seconds,
            "time_per_token": _per_token(run),
        }
        for run in runs
    ]
    return total


def _per_token(run: PromptRun) -> float | None:
    more = len(run.tokens) - 1
    return (run.seconds - run.first_seconds) / more if more > 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _counts(runs: list[PromptRun], block: int, seconds: float) -> dict:
    records = [record for run in runs for record in run.records]
    tokens = sum(len(run.tokens) for run in runs)
    verified, accepted = sum(r.verified for r in records), sum(r.accepted for r in records)
    return {
        "tokens": tokens,
        "rounds": len(records),
        "proposed": sum(r.proposed for r in records),
        "verified": verified,
        "accepted": accepted,
        "accept_rate": accepted / verified if verified else None,
        "tokens_per_round": (accepted + len(records)) / len(records) if records else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "accepted_by_position": [sum(r.accepted > i for r in records) for i in range(block)],
    }


def _gate(states: list[gates.GateState]) -> dict | None:
    if not states:
        return None
    import jax
    import numpy as np

    return gates.stats(
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *jax.device_get(states))
    )
