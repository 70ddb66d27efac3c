"""One driver of a run: `generate`, `stream` and the command run their prompts through it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from dspark_jax.decode.engine import Emission, Engine, RoundRecord
from dspark_jax.decode.request import Request
from dspark_jax.decode.stats import PromptRun, collect
from dspark_jax.decode.text import IncrementalText, decode
from dspark_jax.loading.load import Model
from dspark_jax.runtime.interrupts import watch_interrupts
from dspark_jax.runtime.processes import require_same
from dspark_jax.runtime.settings import own_settings


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Results, one entry a prompt.

    tokens: new tokens; exactly max_new_tokens of them unless a stop token (included, last) ended
      them.
    texts: their text, or None without a tokenizer. finish_reasons: "length" or "stop";
      "interrupted" after Ctrl-C.
    rounds: a RoundRecord for every round; empty in plain mode. stats: see
      `dspark_jax.decode.stats.collect`.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    rounds: list[list[RoundRecord]]
    stats: dict


class Run:
    """The prompts of one request, as many at a time as the engine is wide, and what became of each.

    Iterating runs them: it yields each Emission when it is known. `complete` does so to the end.
    Whatever ends a run, what was emitted until then is in `prompts` and in `output()`.

    rounds_per_call: rounds that the device makes before the host hears of them. with_text: whether
    emissions carry their text.
    prompts: a PromptRun of each. interrupted: whether Ctrl-C ended it.
    """

    def __init__(self, model: Model, request: Request, rounds_per_call: int, with_text=False):
        _require_same_in_all_processes(model, request)
        self.model, self.request, self.rounds_per_call = model, request, rounds_per_call
        self.prompts = [PromptRun(len(prompt)) for prompt in request.prompts]
        self.interrupted = False
        self._texts = [IncrementalText(model) for _ in self.prompts] if with_text else None
        self._engine: Engine | None = None

    def compile(self) -> None:
        """Gets the engine ready, which the first emission would do otherwise."""
        if self._engine is None:
            with own_settings(self.model.mesh):
                self._engine = Engine(self.model, self.request)

    def __iter__(self) -> Iterator[Emission]:
        """Between emissions jax's settings are the caller's."""
        self.compile()
        with contextlib.closing(self._emissions()) as emissions:
            while True:
                with own_settings(self.model.mesh):
                    emission = next(emissions, None)
                if emission is None:
                    return
                yield emission

    def _emissions(self) -> Iterator[Emission]:
        count, width = len(self.prompts), self._engine.width
        for first in range(0, count, width):
            yield from self._at_once(range(first, min(first + width, count)))

    def complete(self, each: Callable[[Emission], None] | None = None) -> None:
        """Runs all prompts and calls `each` with every emission. Ctrl-C ends it and is no error."""
        try:
            with watch_interrupts() as interrupt, contextlib.closing(iter(self)) as emissions:
                for emission in emissions:
                    if each is not None:
                        each(emission)
                    if interrupt.seen:
                        break
            self.interrupted = interrupt.seen
        except KeyboardInterrupt:
            self.interrupted = True

    def output(self) -> GenerateOutput:
        """What came of it so far."""
        engine, runs = self._engine, self.prompts
        compile_seconds, width = (engine.compile_seconds, engine.width) if engine else (0.0, 1)
        return GenerateOutput(
            tokens=[run.tokens for run in runs],
            texts=None if self.model.tokenizer is None else [self._text(run) for run in runs],
            finish_reasons=[run.finish_reason(self.request.stop_token_ids) for run in runs],
            rounds=[run.records for run in runs],
            stats=collect(runs, self.model.config.dspark_block_size, compile_seconds, width),
        )

    def _at_once(self, numbers: range) -> Iterator[Emission]:
        """Runs the prompts of these numbers beside each other."""
        started = time.perf_counter()
        try:
            for emission in self._engine.stream(numbers, self.rounds_per_call):
                yield self._noted(emission, time.perf_counter() - started)
        finally:
            for place, number in enumerate(numbers):
                run = self.prompts[number]
                run.gate_state = self._engine.gate_of(place)
                if not run.finished:
                    run.seconds = time.perf_counter() - started

    def _noted(self, emission: Emission, seconds: float) -> Emission:
        """The emission, with its text, after what it says has been kept."""
        run = self.prompts[emission.prompt]
        run.add(emission.tokens, emission.record)
        run.finished, run.seconds = emission.last, seconds
        if self._texts is None:
            return emission
        text = self._texts[emission.prompt].add(emission.tokens, emission.last)
        run.pieces.append(text or "")
        return dataclasses.replace(emission, text=text)

    def _text(self, run: PromptRun) -> str:
        """As it was shown: of an interrupted run without the bytes of an unfinished character."""
        return decode(self.model, run.tokens) if self._texts is None else "".join(run.pieces)


def _require_same_in_all_processes(model: Model, request: Request) -> None:
    """Several processes that differ would wait for each other in different programs. Of the weights
    only vectors are compared.
    """
    if jax.process_count() == 1:
        return
    vectors = [
        leaf
        for leaf in jax.tree.leaves(model.split[1])
        if leaf.is_fully_replicated and leaf.size < 1 << 16
    ]
    weights = functools.reduce(
        lambda crc, leaf: zlib.crc32(np.asarray(leaf).tobytes(), crc), vectors, 0
    )
    asked = dataclasses.asdict(request) | {"stop_token_ids": sorted(request.stop_token_ids)}
    require_same(
        config=model.config,
        checksum_of_vectors=weights,
        limits=model.limits,
        dtype=model.numerics.dtype,
        activation_quant=model.numerics.activation_quant,
        mesh=dict(model.mesh.shape),
        expert_storage=model.expert_storage,
        **asked,
    )
