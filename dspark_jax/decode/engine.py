"""Runs streams: prompts are prefilled, then take a place among the streams that run together; the
device makes rounds of all of them, a few per call, and hands them to the host as records.

Every row of the mesh's data axis has `streams` places. A stream that ends makes room for the next
prompt at once: while prompts wait, a call of rounds returns as soon as a place is free. A place
without a stream has one that is done: it does no expert work and takes part in no round.

A prompt is always prefilled by itself, one on each row of the data axis, in a cache of one stream
(the stage), and moved to its place after that; so its bits do not depend on how many places there
are. Where each row has one place, that place is the stage.

The next call is given to the device before the host reads what the last one did, so that neither
waits for the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from dspark_jax.checkpoints.official import collection_paused
from dspark_jax.decode import gate as gates
from dspark_jax.decode.emission import (
    Emission,
    TokenLogprob,
    damaged_drafts,
    first_emission,
    not_finite,
    round_emission,
)
from dspark_jax.decode.pace import Pace
from dspark_jax.decode.prefill import Prefill, of_row
from dspark_jax.decode.programs import Programs, one_stream, programs
from dspark_jax.decode.report import unpacked
from dspark_jax.decode.request import Request
from dspark_jax.decode.round import no_outputs
from dspark_jax.decode.slots import Slots
from dspark_jax.decode.state import Begun, Variant
from dspark_jax.decode.steps import new_cache
from dspark_jax.loading.load import Model
from dspark_jax.model.cache import Cache
from dspark_jax.runtime.interrupts import deferred_interrupts
from dspark_jax.runtime.processes import losses_explained
from dspark_jax.runtime.sharding import DATA, fetch

LIKELY_AT_LEAST = 8  # most likely tokens that a program tells; fewer are cut from these


class Engine:
    """A model and a request, ready to run.

    width: places for streams, over all rows of the data axis. compile_seconds: what getting ready
      took (0 when it was).
    failures: prompt number -> what was not finite, of streams that ended with that. started: prompt
      number -> when its prefill began, by time.perf_counter.
    slot_rounds, worked: places times rounds, and in how many of them a stream was at work.
    """

    def __init__(self, model: Model, request: Request):
        self.model, self.request = model, request
        self.rows = model.mesh.shape[DATA]
        self.width = self.rows * request.streams
        self._programs = _programs(model, request)
        self._config = jax.tree.map(as_data, request.gate)
        self._slots = Slots(model, request, self._config, self.width)
        self._outputs = jax.eval_shape(
            lambda: no_outputs(self.width, model.config.dspark_block_size, _variant(model, request))
        )
        self._prefill = Prefill(model, request, self._programs, self._slots)
        self._cache: Cache | None = None
        self._stage: Cache | None = None
        self._ended: set[int] = set()
        self._gates: dict[int, gates.GateState] = {}
        self.failures: dict[int, str] = {}
        self.started: dict[int, float] = {}
        self.slot_rounds = self.worked = 0
        self.compile_seconds = self._warm_up()

    @property
    def prompt_logprobs(self) -> dict[int, list[TokenLogprob]]:
        """Prompt number -> a TokenLogprob of each of its tokens, of those prefilled so far."""
        return self._prefill.prompt_logprobs

    def end(self, number: int) -> None:
        """Ends the stream of this prompt: it emits nothing more, and its place is free."""
        if number in self._slots.owners:
            self._ended.add(number)

    def gate_of(self, number: int) -> gates.GateState | None:
        """What the gate knew of this prompt's stream after the last call of rounds, if there was
        one.
        """
        if number in self._slots.owners and self.slot_rounds:
            return self._slots.gate_of(self._slots.owners.index(number))
        return self._gates.get(number)

    def last_cache(self) -> Cache:
        """The cache of the one stream that has run, committed up to its last token, which is not in
        it. The engine is of no use after that.
        """
        return one_stream(self.model.mesh, self._cache, 0)

    def stream(self, rounds_per_call: int | None, longest_first=False) -> Iterator[Emission]:
        """Runs all prompts; each emits what it would emit alone. rounds_per_call: None: as few as
        cost nothing, see `Pace`. longest_first: prompts that may emit the most begin first, so that
        places are not empty in the end; else each in its turn.

        Every stream ends with as many tokens as were asked for or a stop token; the surplus of its
        last round is dropped from its tokens. One whose logits or drafts are not finite ends with
        the tokens before that, and `failures` has it. DsparkError if another process is lost.
        """
        with losses_explained():
            yield from self._stream(rounds_per_call, longest_first)

    def _stream(self, rounds_per_call: int | None, longest_first: bool) -> Iterator[Emission]:
        lengths = [prompt.max_new_tokens if longest_first else 0 for prompt in self.request.prompts]
        waiting = deque(sorted(range(len(lengths)), key=lambda number: -lengths[number]))
        calls: deque[jax.Array] = deque()
        self._pace = Pace(rounds_per_call)
        self._new_caches()
        while True:
            if self._ended or (waiting and self._slots.empty()):
                while calls:  # what they did must be known before anything is changed
                    yield from self._heard(calls.popleft())
                self._release_ended()
                yield from self._fill(waiting)
                small, settings = self._slots.on_device()
            if len(self._slots.empty()) == self.width:
                return
            arguments = self._run_arguments(small, settings, self._pace.rounds, bool(waiting))
            self._cache, small, report = self._programs.run(*arguments)
            calls.append(report)
            if len(calls) > 1:
                yield from self._heard(calls.popleft())

    def _new_caches(self) -> None:
        """Of the places, and of the stage where it is not one of them."""
        self._cache = new_cache(self.model, self.width)
        self._stage = None if self.request.streams == 1 else new_cache(self.model, self.rows)

    def _release_ended(self) -> None:
        for place, owner in enumerate(self._slots.owners):
            if owner in self._ended:
                self._release(place)
        self._ended.clear()

    def _release(self, place: int) -> None:
        self._gates[self._slots.owners[place]] = self._slots.gate_of(place)
        self._slots.release(place)

    def _fill(self, waiting: deque) -> Iterator[Emission]:
        """Prefills prompts that wait until every place is taken or none waits."""
        while waiting and (empty := self._slots.empty()):
            places: dict[int, int] = {}  # row of the data axis -> place
            for place in empty:
                places.setdefault(place // self.request.streams, place)
            numbers = {row: waiting.popleft() for row in places if waiting}
            self.started |= dict.fromkeys(numbers.values(), time.perf_counter())
            stage = self._cache if self._stage is None else self._stage
            stage, begun = self._prefill.run(stage, numbers)
            seated = {row: places[row] for row in numbers if _goes_on(begun[row], row)}
            self._move(stage, seated)
            for row, number in numbers.items():
                if not begun[row].finite[row]:
                    self._prefill.spoiled.add(row)
                yield from self._begin(number, of_row(begun[row], row), seated.get(row))

    def _move(self, stage: Cache, seated: dict[int, int]) -> None:
        """The streams of the stage to their places, row -> place."""
        if self._stage is None:
            self._cache = stage
            return
        self._stage, streams = stage, self.request.streams
        if seated:
            places = [
                seated[row] % streams if row in seated else streams for row in range(self.rows)
            ]
            self._cache = self._programs.seat(self._cache, stage, np.array(places, np.int32))

    def _begin(self, number: int, begun: Begun, place: int | None) -> Iterator[Emission]:
        """The first token of a prompt, whose stream goes on at `place`, if it does."""
        position = self._prefill.length(number)
        if not begun.finite:
            self.failures[number] = not_finite(number, position - 1)
            return
        if place is not None:
            self._slots.seat(place, number, begun, position)
        yield first_emission(number, begun, self.request.logprobs)

    def _heard(self, report: jax.Array) -> Iterator[Emission]:
        """What a call of rounds did. Streams that it ended leave their places."""
        outputs, state, count = unpacked(
            fetch(self.model.mesh, report), self._outputs, self._slots.state
        )
        self._slots.state = state
        self.slot_rounds += count * self.width
        self.worked += int((outputs.emitted[:count] > 0).sum())
        for i in range(count):
            for place, number in enumerate(self._slots.owners):
                if number is not None and number not in self._ended:
                    yield from self._of_round(place, number, outputs, i)
        for place, number in enumerate(self._slots.owners):
            if number is None or number in self._ended:
                continue
            if state.faulty[place] >= 0:
                self._fail(place, not_finite(number, int(state.faulty[place])))
            if state.done[place]:
                self._release(place)
        self._pace.heard(count)

    def _of_round(self, place: int, number: int, outputs, i: int) -> Iterator[Emission]:
        emission = round_emission(
            number, outputs, i, place, self.request.mode == "plain", self.request.logprobs
        )
        if emission is None:
            return
        wrong = damaged_drafts(emission.record, number, self._slots.positions[place])
        if wrong is not None:
            self._fail(place, wrong)
            self.end(number)
            return
        self._slots.positions[place] += len(emission.tokens)
        yield emission

    def _fail(self, place: int, wrong: str) -> None:
        """The stream at this place has what is not finite, and its cache may too. The next prompt
        of the place is written over all of that, unless it is prefilled there.
        """
        self.failures[self._slots.owners[place]] = wrong
        if self._stage is None:
            self._prefill.spoiled.add(place)

    def _run_arguments(self, small, settings, most: int, waiting: bool) -> tuple:
        limits = np.int32(most), np.bool_(waiting)
        return self.model.arrays, self._config, settings, self._cache, small, *limits

    def _warm_up(self) -> float:
        """Runs the programs for zero rows and zero rounds, so that later seconds hold no
        compilation.
        """
        small, settings = self._slots.on_device()
        before = self.request.prefix and self.request.prefix.cache
        key = self.width, self.request.sampled, settings.stop_ids.shape, before is not None
        if key in self._programs.warm:
            return 0.0
        started = time.perf_counter()
        with deferred_interrupts(), collection_paused(), losses_explained():
            self._new_caches()
            stage = self._cache if self._stage is None else self._stage
            if before is not None:
                stage = self._programs.seat(stage, before, np.ones(self.rows, np.int32))
            _compile_together(
                self._programs.begin.lower(*self._prefill.arguments(stage, {}, 0)),
                lambda: self._programs.run.lower(*self._run_arguments(small, settings, 0, False)),
            )
            stage, begun = self._programs.begin(*self._prefill.arguments(stage, {}, 0))
            self._move(stage, {})
            if self._stage is not None:
                nowhere = np.full(self.rows, self.request.streams, np.int32)
                self._cache = self._programs.seat(self._cache, stage, nowhere)
            arguments = self._run_arguments(small, settings, 0, False)
            self._cache, _, report = self._programs.run(*arguments)
            fetch(self.model.mesh, (begun, report))
            self._cache = self._stage = None
        self._programs.warm.add(key)
        return time.perf_counter() - started


def _programs(model: Model, request: Request) -> Programs:
    asked = request.logprobs is not None or request.prompt_logprobs
    return programs(
        model.structure,
        model.mesh,
        model.limits,
        _variant(model, request),
        _likely(model, request) if asked else None,
        request.prompt_logprobs,
    )


def _variant(model: Model, request: Request) -> Variant:
    return Variant(request.mode, None if request.logprobs is None else _likely(model, request))


def _likely(model: Model, request: Request) -> int:
    """How many of the most likely tokens a program tells: 8, 16, 32 ..., so that another number
    asked for compiles nothing.
    """
    most = max(LIKELY_AT_LEAST, request.logprobs or 0)
    return min(1 << (most - 1).bit_length(), model.config.vocab_size)


def _goes_on(begun: Begun, row: int) -> bool:
    return bool(begun.finite[row] and not begun.last[row])


def _compile_together(first: jax.stages.Lowered, second: Callable[[], jax.stages.Lowered]) -> None:
    """Compiles `first` while second() is traced and lowered, then that too; XLA lets other threads
    run meanwhile. jax keeps both for the calls that follow.
    """
    with ThreadPoolExecutor(1, "dspark-compile") as other:
        begun = other.submit(first.compile)
        second().compile()
        begun.result()


def as_data(number) -> np.ndarray:
    """A gate number with a fixed dtype, so that another value compiles nothing."""
    return np.asarray(number, {bool: np.bool_, int: np.int32}.get(type(number), np.float32))
