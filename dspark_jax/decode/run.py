"""One driver of a run: `generate`, `stream`, sessions and the command run their prompts through
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from dspark_jax.decode.emission import Emission, RoundRecord, TokenLogprob
from dspark_jax.decode.engine import Engine
from dspark_jax.decode.request import Request
from dspark_jax.decode.room import check_room
from dspark_jax.decode.state import ROUNDS_PER_CALL
from dspark_jax.decode.stats import PromptRun, collect
from dspark_jax.decode.stop_strings import StopText
from dspark_jax.decode.text import decode
from dspark_jax.errors import NumericsError
from dspark_jax.loading.load import Model
from dspark_jax.runtime.interrupts import watch_interrupts
from dspark_jax.runtime.processes import require_same
from dspark_jax.runtime.settings import own_settings


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Results, one entry a prompt.

    tokens: new tokens; exactly max_new_tokens of them unless a stop token (included, last) or a
      stop string (all tokens up to the one that completed it) ended them.
    texts: their text, without the stop string, or None without a tokenizer. finish_reasons:
      "length" or "stop"; "interrupted" after Ctrl-C, "error" where the logits were not finite.
    stop_reasons: the token id or the string that ended it; None for other reasons.
    rounds: a RoundRecord for every round; empty in plain mode. stats: see
      `dspark_jax.decode.stats.collect`.
    logprobs: a TokenLogprob (token, logprob, best) for every token, prompt_logprobs: likewise of
      the prompts' tokens; None where not asked for.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    rounds: list[list[RoundRecord]]
    stats: dict
    stop_reasons: list[int | str | None]
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob]] | None = None


class Run:
    """The prompts of one request, as many at a time as there are places, and what became of each.

    Iterating runs them: it yields each Emission when it is known, and raises NumericsError at the
    end if a stream had numbers that were not finite. `complete` does so to the end. Whatever ends a
    run, what was emitted until then is in `prompts` and in `output()`.

    by_round: whether the host is to hear of rounds as they are made (of several at a time where
    they take a millisecond), or of many at a time, which costs less. with_text: whether emissions
    carry their text.
    prompts: a PromptRun of each. interrupted: whether Ctrl-C ended it. engine: None before
    `compile`.
    """

    def __init__(self, model: Model, request: Request, by_round=False, with_text=False):
        check_room(model, request)
        _require_same_in_all_processes(model, request)
        self.model, self.request, self._with_text = model, request, with_text
        self.prompts = [PromptRun(len(prompt.ids)) for prompt in request.prompts]
        self.interrupted = False
        self.engine: Engine | None = None
        # Who is shown what comes has prompts in their turn.
        self._longest_first = not by_round and not with_text
        self._rounds_per_call = None if by_round else ROUNDS_PER_CALL
        if any(prompt.stop for prompt in request.prompts):
            # What comes after a stop string would be computed for nothing, and learned by the gate.
            self._rounds_per_call = 1
        self._texts = [
            StopText(model, prompt.stop) if with_text or prompt.stop else None
            for prompt in request.prompts
        ]
        self._seconds = 0.0

    def compile(self) -> None:
        """Gets the engine ready, which the first emission would do otherwise."""
        if self.engine is None:
            with own_settings(self.model.mesh):
                self.engine = Engine(self.model, self.request)

    def __iter__(self) -> Iterator[Emission]:
        """Between emissions jax's settings are the caller's."""
        self.compile()
        started = time.perf_counter()
        try:
            stream = self.engine.stream(self._rounds_per_call, longest_first=self._longest_first)
            with contextlib.closing(stream) as emissions:
                while True:
                    with own_settings(self.model.mesh):
                        emission = next(emissions, None)
                    if emission is None:
                        break
                    self._seconds = time.perf_counter() - started
                    yield self._noted(emission)
        finally:
            self._seconds = time.perf_counter() - started
            self._note_ends()
        if self.engine.failures:
            raise NumericsError(_failure(self.engine.failures), self.output())

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
        engine, runs, request = self.engine, self.prompts, self.request
        texts = None
        if self.model.tokenizer is not None:
            texts = [self._text(number) for number in range(len(runs))]
        asked = request.prompt_logprobs
        return GenerateOutput(
            tokens=[run.tokens for run in runs],
            texts=texts,
            finish_reasons=[run.finish_reason for run in runs],
            stop_reasons=[run.stop_reason for run in runs],
            rounds=[run.records for run in runs],
            logprobs=None if request.logprobs is None else [run.logprobs for run in runs],
            prompt_logprobs=[
                engine.prompt_logprobs.get(number, []) if engine else []
                for number in range(len(runs))
            ]
            if asked
            else None,
            stats=collect(
                runs,
                self.model.config.dspark_block_size,
                compile_seconds=engine.compile_seconds if engine else 0.0,
                seconds=self._seconds,
                streams=engine.width if engine else 1,
                slot_rounds=engine.slot_rounds if engine else 0,
                worked=engine.worked if engine else 0,
            ),
        )

    def _noted(self, emission: Emission) -> Emission:
        """The emission, cut where a stop string ends it, with its text, after what it says has been
        kept.
        """
        number, stop = emission.prompt, None
        run, text = self.prompts[number], self._texts[number]
        if text is not None:
            piece = text.add(emission.tokens, emission.last)
            run.pieces.append(piece.text or "")
            emission = dataclasses.replace(
                emission,
                tokens=emission.tokens[: piece.kept],
                logprobs=emission.logprobs and emission.logprobs[: piece.kept],
                text=piece.text if self._with_text else None,
                last=emission.last or piece.stop is not None,
            )
            stop = piece.stop
            if stop is not None:
                self.engine.end(number)
        run.add(emission, time.perf_counter() - self.engine.started[number])
        if emission.last:
            run.finish(stop, self.request.prompts[number].stop_token_ids)
        return emission

    def _note_ends(self) -> None:
        """What is known of every prompt when the run is over, or given up."""
        now = time.perf_counter()
        for number, run in enumerate(self.prompts):
            run.gate_state = self.engine.gate_of(number)
            if number in self.engine.failures:
                run.finish_reason = "error"
            elif not run.finished and number in self.engine.started:
                run.seconds = now - self.engine.started[number]

    def _text(self, number: int) -> str:
        """As it was shown: of an interrupted run without the bytes of an unfinished character."""
        run = self.prompts[number]
        return (
            decode(self.model, run.tokens) if self._texts[number] is None else "".join(run.pieces)
        )


def _failure(failures: dict[int, str]) -> str:
    first = min(failures)
    others = ", ".join(str(number) for number in sorted(failures) if number != first)
    return failures[first] + (f" (so ended prompts {others} too)" if others else "")


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
    asked = {
        field.name: getattr(request, field.name)
        for field in dataclasses.fields(request)
        if field.name not in ("prompts", "prefix")
    }
    prompts = [
        dataclasses.asdict(prompt) | {"stop_token_ids": sorted(prompt.stop_token_ids)}
        for prompt in request.prompts
    ]
    require_same(
        config=model.config,
        checksum_of_vectors=weights,
        limits=model.limits,
        dtype=model.numerics.dtype,
        activation_quant=model.numerics.activation_quant,
        mesh=dict(model.mesh.shape),
        expert_storage=model.expert_storage,
        calibration=model.calibration,
        prompts=prompts,
        prefix=request.prefix and list(request.prefix.tokens),
        **asked,
    )
