"""Calibrates the drafter of a model: rounds of held-out text, scales fitted on one half of the
prompts, and what they are worth on the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dspark_jax.decode import calibration_fit as fits
from dspark_jax.decode.gate import BUCKET_EDGES
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import make_request
from dspark_jax.decode.run import Run
from dspark_jax.errors import ConfigError
from dspark_jax.loading.calibration import Scale, raw
from dspark_jax.loading.load import Model

KINDS = {"greedy": 0.0, "sampled": 1.0}  # the temperature that each is made with


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds that verified the whole block. scores: [N, K] float64, raw. accepted: [N] int, 0..K.
    prompt: [N] int, the number of each round's prompt.
    """

    scores: np.ndarray
    accepted: np.ndarray
    prompt: np.ndarray

    def of(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and accepted of the rounds where `which`, bool [N]."""
        return self.scores[which], self.accepted[which]


def collect(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    streams: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Rounds:
    """The rounds of these prompts (token ids) in block mode, all drafts verified.

    Rounds that the end of the cache cut short are left out: they do not say what became of the
    drafts they did not verify. advance: called after every prompt. Raises KeyboardInterrupt after
    Ctrl-C.
    """
    request = make_request(
        model,
        [list(prompt) for prompt in prompts],
        max_new_tokens=max_new_tokens,
        mode="block",
        gate=GateConfig(),
        temperature=temperature,
        seed=seed,
        streams=streams,
    )
    run = Run(model, request)
    run.complete(lambda emission: advance() if emission.last else None)
    if run.interrupted:
        raise KeyboardInterrupt
    return _rounds([prompt.records for prompt in run.prompts], model.config.dspark_block_size)


def _rounds(records: list[list], block: int) -> Rounds:
    whole = [
        (record.confidence, record.accepted, number)
        for number, of_prompt in enumerate(records)
        for record in of_prompt
        if record.verified == block
    ]
    scores, accepted, prompt = zip(*whole) if whole else ((), (), ())
    scores = np.array(scores, np.float64).reshape(-1, block)
    return Rounds(scores, np.array(accepted, int), np.array(prompt, int))


def judge(rounds: Rounds) -> dict:
    """Fits a scale on the rounds of every other prompt and judges it on those of the rest.

    Returns `temperatures` and `offsets`, [K]; `rounds` and `prompts`, counts of both halves, "fit"
    and "held_out"; and of the held-out half: `ece_raw`, `ece_temperature_alone` (the best that can
    be had without offsets) and `ece`, each {"all": e, "by_position": [K]}; `reliability_raw` and
    `reliability`, see calibration_fit.reliability, in the gate's six buckets; `monotone`, whether
    what is observed rises with the bucket, for "products" and "drafts".
    Raises ConfigError where a half has no rounds.
    """
    first = rounds.prompt % 2 == 0
    halves = {"fit": first, "held_out": ~first}
    if not all(which.any() for which in halves.values()):
        raise ConfigError(
            "calibrate: too few rounds: half of the prompts have none that verified the whole "
            "block; give more prompts, or ask for more tokens"
        )
    fitting, held_out = rounds.of(first), rounds.of(~first)
    block = rounds.scores.shape[1]
    scale, alone = fits.fit(*fitting), fits.fit(*fitting, offsets=False)
    reliability = fits.reliability(*held_out, scale, BUCKET_EDGES)
    return {
        **{name: list(column) for name, column in scale._asdict().items()},
        "prompts": {n: len(set(rounds.prompt[which].tolist())) for n, which in halves.items()},
        "rounds": {name: int(which.sum()) for name, which in halves.items()},
        "ece_raw": fits.errors(*held_out, raw(block)),
        "ece_temperature_alone": fits.errors(*held_out, alone),
        "ece": fits.errors(*held_out, scale),
        "reliability_raw": fits.reliability(*held_out, raw(block), BUCKET_EDGES),
        "reliability": reliability,
        "monotone": {name: fits.rises(buckets) for name, buckets in reliability.items()},
    }


def scale_of(judged: dict) -> Scale:
    """That of what `judge` returned."""
    return Scale(*(tuple(judged[name]) for name in Scale._fields))
