"""What a run amounted to: counts, rates and seconds of one prompt and of all."""

from __future__ import annotations

import dataclasses

from dspark_jax.decode import gate as gates
from dspark_jax.decode.engine import RoundRecord


@dataclasses.dataclass
class PromptRun:
    """One prompt's run so far. seconds: prefill and rounds, without compilation, until its last
    token. pieces: of its text, one an emission, where text is made as it comes.
    """

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    records: list[RoundRecord] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False
    gate_state: gates.GateState | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)

    def add(self, tokens: list[int], record: RoundRecord | None) -> None:
        self.tokens += tokens
        if record is not None:
            self.records.append(record)

    def finish_reason(self, stop_token_ids: frozenset[int]) -> str:
        if self.tokens and self.tokens[-1] in stop_token_ids:
            return "stop"
        return "length" if self.finished else "interrupted"


def collect(runs: list[PromptRun], block: int, compile_seconds: float, together: int = 1) -> dict:
    """Totals over prompts, and `per_prompt` the same of each. together: how many of them, in their
    order, ran at a time.

    tokens, rounds, proposed, verified, accepted: counts. accept_rate: accepted / verified, None
      without verified drafts.
    tokens_per_round: mean of accepted + 1, None without rounds. seconds, tokens_per_second: without
      compilation. compile_seconds.
    accepted_by_position: [K] rounds in which the draft at this position was accepted. Seconds of
    prompts that ran together are each counted from their common start to the prompt's own last
    token, so `per_prompt` shows the speed that each stream had; the total counts such a group once,
    by the stream that took longest.
    gate: counters and bucket rates (gate.stats), None without speculative rounds.
    """
    groups = [runs[i : i + together] for i in range(0, len(runs), together)]
    total = _counts(runs, block, sum(max(run.seconds for run in group) for group in groups))
    total["compile_seconds"] = compile_seconds
    total["gate"] = _gate(
        [run.gate_state for run in runs if run.records and run.gate_state is not None]
    )
    total["per_prompt"] = [
        _counts([run], block, run.seconds) | {"prompt_tokens": run.prompt_tokens} for run in runs
    ]
    return total


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
