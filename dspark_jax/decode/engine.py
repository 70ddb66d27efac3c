"""Runs streams: prefill, then rounds on the device, a few per call, handed to the host as records.

As many streams run at a time as the mesh has rows on its data axis, one a row; one device is one
row. A row without a stream of its own has one that is done from the start: it prefills no token and
takes part in no round.

Each program is compiled once per model structure and mode: prompt lengths, draft lengths, gate
numbers and stop tokens are data.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.checkpoints.official import collection_paused
from dspark_jax.decode import gate as gates
from dspark_jax.decode import round as rounds
from dspark_jax.decode.request import Request
from dspark_jax.decode.steps import new_cache
from dspark_jax.errors import NumericsError
from dspark_jax.loading.load import Model
from dspark_jax.model.cache import Cache
from dspark_jax.model.dspark import Limits
from dspark_jax.runtime.backend import jit
from dspark_jax.runtime.interrupts import deferred_interrupts
from dspark_jax.runtime.processes import losses_explained
from dspark_jax.runtime.sharding import (
    DATA,
    cache_specs,
    fetch,
    max_over_data,
    on_mesh,
    parameter_specs,
    stream_spec,
)


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


@dataclasses.dataclass(frozen=True)
class Emission:
    """Tokens of a prompt that became known together.

    prompt: its number in the request. record: None for the first token (chosen by the prefill) and
      in plain mode.
    last: nothing follows. text: what the tokens add to the text, where a Run makes it.
    """

    prompt: int
    tokens: list[int]
    record: RoundRecord | None
    last: bool
    text: str | None = None


class Programs:
    """The two compiled programs of a mode: a prefill chunk, and a call of rounds. Both reuse the
    caches they are given.
    """

    def __init__(self, graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str):
        self.begin = _jitted_prefill(graphdef, mesh)
        self.run = jit(rounds_program(graphdef, mesh, limits, mode), donate_argnums=2)
        self.warm: set = set()


def prefill_program(graphdef: nnx.GraphDef, mesh: Mesh):
    """`rounds.begin` over the mesh: (state, cache, tokens [B, T], valid [B], remaining [B], stop
    ids) -> cache, Begun. The same in every mode.
    """

    def program(state, cache, tokens, valid, remaining, stop_ids):
        rows, cached = stream_spec(mesh, tokens.shape[0]), cache_specs(mesh, cache)
        device = on_mesh(
            mesh,
            lambda state, *rest: rounds.begin(nnx.merge(graphdef, state), *rest),
            (parameter_specs(state), cached, rows, rows, rows, PartitionSpec()),
            (cached, rows),
        )
        return device(state, cache, tokens, valid, remaining, stop_ids)

    return program


def rounds_program(graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str):
    """`rounds.run` over the mesh: (state, gate config, round state, stop ids, most) -> round state,
    outputs, how many were filled.

    What comes back is cut as what came in, else the next call would compile once more.
    """

    def device(state, *arguments):
        after, outputs, count = rounds.run(nnx.merge(graphdef, state), limits, mode, *arguments)
        return after, outputs, max_over_data(count)

    def program(state, config, round_state, stop_ids, most):
        streams, whole = round_state.anchor.shape[0], PartitionSpec()
        specs = jax.tree.map(lambda _: stream_spec(mesh, streams), round_state).replace(
            cache=cache_specs(mesh, round_state.cache)
        )
        return on_mesh(
            mesh,
            device,
            (parameter_specs(state), whole, specs, whole, whole),
            (specs, stream_spec(mesh, streams, axis=1), whole),
        )(state, config, round_state, stop_ids, most)

    return program


@functools.cache
def _jitted_prefill(graphdef: nnx.GraphDef, mesh: Mesh):
    return jit(prefill_program(graphdef, mesh), donate_argnums=1)


@functools.cache
def _programs(graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str) -> Programs:
    return Programs(graphdef, mesh, limits, mode)


class Engine:
    """A model in one mode, ready to run streams.

    width: how many streams run at a time. compile_seconds: what getting ready took (0 when it was).
    """

    def __init__(self, model: Model, request: Request):
        self.model, self.request = model, request
        self.width = model.mesh.shape[DATA]
        graphdef, self.state = model.split
        self.programs = _programs(graphdef, model.mesh, model.limits, request.mode)
        self.config = jax.tree.map(as_data, request.gate)
        ids = sorted(request.stop_token_ids)
        self.stop_ids = np.array(ids + [-1] * (_padded_size(len(ids)) - len(ids)), np.int32)
        self.compile_seconds = self._warm_up()
        self.gate_state = None

    def _warm_up(self) -> float:
        """Runs both programs for zero rows and zero rounds, so that later seconds hold no
        compilation.
        """
        key = self.stop_ids.shape
        if key in self.programs.warm:
            return 0.0
        started = time.perf_counter()
        with losses_explained(), deferred_interrupts(), collection_paused():
            cache = new_cache(self.model, self.width)
            _compile_together(
                self.programs.begin.lower(*self._prefill_arguments(cache, [])),
                lambda: self.programs.run.lower(
                    *self._run_arguments(self._round_state(cache, []), 0)
                ),
            )
            cache, begun = self._prefill_chunk(cache, [])
            state, outputs, _ = self._run(self._round_state(cache, []), 0)  # no rounds
            fetch(self.model.mesh, (begun, outputs, *_shown(state)))
        self.programs.warm.add(key)
        return time.perf_counter() - started

    def _prefill_chunk(self, cache, parts: Sequence[Sequence[int]]):
        """A chunk of each prompt: the cache, and a Begun of all rows. Both stay on the device."""
        return self.programs.begin(*self._prefill_arguments(cache, parts))

    def _prefill_arguments(self, cache, parts: Sequence[Sequence[int]]) -> tuple:
        tokens = np.zeros((self.width, self.model.limits.prefill_chunk), np.int32)
        valid = np.zeros(self.width, np.int32)
        for b, part in enumerate(parts):
            tokens[b, : len(part)], valid[b] = part, len(part)
        wanted = np.full(self.width, self.request.max_new_tokens, np.int32)
        return self.state, cache, tokens, valid, wanted, self.stop_ids

    def _round_state(self, cache, begun: Sequence[rounds.Begun]) -> rounds.RoundState:
        """The state behind the prompts; rows without one are done."""

        def of_streams(values, idle, dtype):
            return np.array([*values, *[idle] * (self.width - len(begun))], dtype)

        remaining = self.request.max_new_tokens - 1
        small = rounds.RoundState(
            cache=None,
            anchor=of_streams((stream.token for stream in begun), 0, np.int32),
            margin=of_streams((stream.margin for stream in begun), 0, np.float32),
            remaining=of_streams((remaining for _ in begun), 0, np.int32),
            done=of_streams((stream.last for stream in begun), True, np.bool_),
            faulty=np.full(self.width, -1, np.int32),
            gate=gates.init(self.config, self.width),
        )
        where = NamedSharding(self.model.mesh, stream_spec(self.model.mesh, self.width))
        return jax.device_put(small, where).replace(cache=cache)

    def _run(self, state, most: int):
        return self.programs.run(*self._run_arguments(state, most))

    def _run_arguments(self, state, most: int) -> tuple:
        return self.state, self.config, state, self.stop_ids, np.int32(most)

    def stream(self, numbers: Sequence[int], rounds_per_call: int) -> Iterator[Emission]:
        """Runs the prompts of these numbers at once, at most `width` of them; each emits what it
        would emit alone.

        Every stream ends with max_new_tokens or a stop token; the surplus of the last round is
        dropped from its tokens.
        Raises NumericsError at logits or drafts that are not finite, after the tokens before them;
        DsparkError if another process is lost.
        """
        with losses_explained():
            yield from self._stream(numbers, rounds_per_call)

    def gate_of(self, place: int) -> gates.GateState | None:
        """What the gate knew, after the last call of rounds, of the stream at this place of
        `numbers`; None before the first.
        """
        return jax.tree.map(lambda leaf: leaf[place : place + 1], self.gate_state)

    def _stream(self, numbers: Sequence[int], rounds_per_call: int) -> Iterator[Emission]:
        self.gate_state = None
        cache, begun = self._prefill(numbers)
        for number, stream in zip(numbers, begun):
            yield Emission(number, [stream.token], None, stream.last)
        done = np.array([stream.last for stream in begun])
        anchors = [len(self.request.prompts[number]) for number in numbers]  # their positions
        state = self._round_state(cache, begun)
        while not done.all():
            state, outputs, count = self._run(state, rounds_per_call)
            # Copies: the next call takes the arrays of this state over.
            self.gate_state, done, faulty, outputs, count = fetch(
                self.model.mesh, (*_shown(state), outputs, count)
            )
            for i in range(int(count)):
                yield from self._emissions(numbers, anchors, outputs, i)
            for number, position in zip(numbers, faulty.tolist()):
                if position >= 0:
                    raise NumericsError(_not_finite(number, position))

    def _emissions(self, numbers, anchors: list[int], outputs, i: int) -> Iterator[Emission]:
        """What round i of a call emitted; moves `anchors` on."""
        for b, number in enumerate(numbers):
            tokens = outputs.tokens[i, b, : outputs.kept[i, b]].tolist()
            if tokens:
                record = None if self.request.mode == "plain" else _record(outputs, i, b)
                _refuse_damaged_drafts(record, number, anchors[b])
                anchors[b] += len(tokens)
                yield Emission(number, tokens, record, bool(outputs.last[i, b]))

    def _prefill(self, numbers: Sequence[int]) -> tuple[Cache, list[rounds.Begun]]:
        """All prompts, chunk by chunk: the cache, and a Begun of each stream. A prompt that has
        ended takes no rows of later chunks.
        """
        prompts, begun = [self.request.prompts[number] for number in numbers], {}
        cache, chunk = new_cache(self.model, self.width), self.model.limits.prefill_chunk
        for at in range(0, max(map(len, prompts)), chunk):
            cache, said = self._prefill_chunk(
                cache, [prompt[at : at + chunk] for prompt in prompts]
            )
            ending = [b for b, prompt in enumerate(prompts) if at < len(prompt) <= at + chunk]
            said = fetch(self.model.mesh, said) if ending else None
            for b in ending:
                begun[b] = jax.tree.map(lambda leaf, b=b: leaf[b].item(), said)
                if not begun[b].finite:
                    raise NumericsError(_not_finite(numbers[b], len(prompts[b]) - 1))
        return cache, [begun[b] for b in range(len(prompts))]


def _compile_together(first: jax.stages.Lowered, second: Callable[[], jax.stages.Lowered]) -> None:
    """Compiles `first` while second() is traced and lowered, then that too; XLA lets other threads
    run meanwhile. jax keeps both for the calls that follow.
    """
    with ThreadPoolExecutor(1, "dspark-compile") as other:
        begun = other.submit(first.compile)
        second().compile()
        begun.result()


def _shown(state: rounds.RoundState) -> tuple[gates.GateState, jax.Array, jax.Array]:
    """What the host wants to know of the state after a call of rounds."""
    return state.gate, state.done, state.faulty


def _record(outputs: rounds.RoundOutput, i: int, b: int) -> RoundRecord:
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


def _refuse_damaged_drafts(record: RoundRecord | None, prompt: int, position: int) -> None:
    """A drafter that is not finite is never right: all rounds would be slow and, as the tokens stay
    right, nobody would know why.
    """
    if (
        record is not None
        and record.confidence is not None
        and not np.isfinite(record.confidence).all()
    ):
        raise NumericsError(
            f"prompt {prompt}: the drafts of the round at position {position} are not finite "
            "(NaN or infinity), while "
            "the main model's logits are: a tensor under mtp.* (the drafter) or the embedding of "
            "its noise token is damaged; fetch the checkpoint again, or decode without the "
            "drafter, mode='plain'"
        )


def as_data(number) -> np.ndarray:
    """A gate number with a fixed dtype, so that another value compiles nothing."""
    return np.asarray(number, {bool: np.bool_, int: np.int32}.get(type(number), np.float32))


def _padded_size(count: int) -> int:
    """Stop ids come in lists of 8, 16, 32 ..., so that another stop token compiles nothing."""
    return max(8, 1 << (count - 1).bit_length()) if count else 8


def _not_finite(prompt: int, position: int) -> str:
    return (
        f"prompt {prompt}: the logits at position {position} are not finite (NaN or infinity); "
        "the weights or the computation "
        "are damaged: fetch the checkpoint again, and try dtype='float32'"
    )
