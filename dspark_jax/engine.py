"""Runs one stream: prefill, then rounds on the device, a few per call, handed to the host as records.

Each program is compiled once per model structure and mode: prompt lengths, draft lengths, gate numbers and stop tokens are data.
"""
from __future__ import annotations

import dataclasses
import functools
import time
from typing import Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from dspark_jax import gate as gates
from dspark_jax import round as rounds
from dspark_jax.api import new_cache
from dspark_jax.distributed import losses_explained
from dspark_jax.errors import NumericsError
from dspark_jax.loading import Limits, Model
from dspark_jax.platform import jit
from dspark_jax.request import Request
from dspark_jax.sharding import cache_specs, max_over_data, on_mesh, parameter_specs, replicated, stream_spec


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What one round did.

    proposed: drafts made, K, or 0 after a margin skip. verified: drafts chosen to be verified. accepted: leading ones that matched.
    confidence: K raw scores, None after a margin skip. margin: top1 - top2 of the anchor's logits. skipped: "", "gate" or "margin".
    """

    proposed: int
    verified: int
    accepted: int
    confidence: tuple[float, ...] | None
    margin: float
    skipped: str


@dataclasses.dataclass(frozen=True)
class Emission:
    """Tokens that became known together; record None for the first token (chosen by the prefill) and in plain mode."""

    tokens: list[int]
    record: RoundRecord | None


class Programs:
    """The two compiled programs of a mode: a prefill chunk, and a call of rounds. Both reuse the caches they are given."""

    def __init__(self, graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str):
        self.begin = _jitted_prefill(graphdef, mesh)
        self.run = jit(rounds_program(graphdef, mesh, limits, mode), donate_argnums=2)
        self.warm: set = set()


def prefill_program(graphdef: nnx.GraphDef, mesh: Mesh):
    """`rounds.begin` over the mesh: (state, cache, tokens [B, T], valid [B]) -> cache, what was chosen. The same in every mode."""
    def program(state, cache, tokens, valid):
        rows, cached = stream_spec(mesh, tokens.shape[0]), cache_specs(mesh, cache)
        device = on_mesh(mesh, lambda state, *rest: rounds.begin(nnx.merge(graphdef, state), *rest),
                         (parameter_specs(state), cached, rows, rows), (cached, rows))
        return device(state, cache, tokens, valid)

    return program


def rounds_program(graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str):
    """`rounds.run` over the mesh: (state, gate config, round state, stop ids, most) -> round state, outputs, how many were filled.

    What comes back is cut as what came in, else the next call would compile once more.
    """
    def device(state, *arguments):
        after, outputs, count = rounds.run(nnx.merge(graphdef, state), limits, mode, *arguments)
        return after, outputs, max_over_data(count)

    def program(state, config, round_state, stop_ids, most):
        streams, everywhere = round_state.anchor.shape[0], PartitionSpec()
        specs = jax.tree.map(lambda _: stream_spec(mesh, streams), round_state).replace(cache=cache_specs(mesh, round_state.cache))
        return on_mesh(mesh, device, (parameter_specs(state), everywhere, specs, everywhere, everywhere),
                       (specs, stream_spec(mesh, streams, axis=1), everywhere))(state, config, round_state, stop_ids, most)

    return program


@functools.lru_cache(maxsize=None)
def _jitted_prefill(graphdef: nnx.GraphDef, mesh: Mesh):
    return jit(prefill_program(graphdef, mesh), donate_argnums=1)


@functools.lru_cache(maxsize=None)
def _programs(graphdef: nnx.GraphDef, mesh: Mesh, limits: Limits, mode: str) -> Programs:
    return Programs(graphdef, mesh, limits, mode)


class Engine:
    """A model in one mode, ready to run streams one after another. `compile_seconds` is what getting ready took (0 when it was)."""

    def __init__(self, model: Model, request: Request):
        self.model, self.request = model, request
        graphdef, self.state = model.split
        self.programs = _programs(graphdef, model.mesh, model.limits, request.mode)
        self.config = jax.tree.map(as_data, request.gate)
        ids = sorted(request.stop_token_ids)
        self.stop_ids = np.array(ids + [-1] * (_padded_size(len(ids)) - len(ids)), np.int32)
        self.compile_seconds = self._warm_up()
        self.gate_state = None

    def _warm_up(self) -> float:
        """Runs both programs for zero rows and zero rounds, so that later seconds hold no compilation."""
        key = self.stop_ids.shape
        if key in self.programs.warm:
            return 0.0
        started = time.perf_counter()
        with losses_explained():
            cache, _ = self._prefill_chunk(new_cache(self.model), [])
            jax.block_until_ready(self._run(self._round_state(cache, 0, 0.0, 0), 0))  # no rounds
        self.programs.warm.add(key)
        return time.perf_counter() - started

    def _prefill_chunk(self, cache, part):
        tokens = np.zeros((1, self.model.limits.prefill_chunk), np.int32)
        tokens[0, :len(part)] = part
        return self.programs.begin(self.state, cache, tokens, np.array([len(part)], np.int32))

    def _round_state(self, cache, anchor: int, margin: float, remaining: int) -> rounds.RoundState:
        small = rounds.RoundState(
            cache=None, anchor=np.array([anchor], np.int32), margin=np.array([margin], np.float32),
            remaining=np.array([remaining], np.int32), done=np.array([False]), faulty=np.array([-1], np.int32),
            gate=gates.init(self.config, 1),
        )
        return jax.device_put(small, replicated(self.model.mesh)).replace(cache=cache)

    def _run(self, state, most: int):
        return self.programs.run(self.state, self.config, state, self.stop_ids, np.int32(most))

    def stream(self, prompt: tuple[int, ...], rounds_per_call: int) -> Iterator[Emission]:
        """Emits until max_new_tokens or a stop token; the surplus of the last round is dropped from its tokens.

        Raises NumericsError at logits that are not finite, after the tokens before them; DsparkError if another process is lost.
        """
        with losses_explained():
            yield from self._stream(prompt, rounds_per_call)

    def _stream(self, prompt: tuple[int, ...], rounds_per_call: int) -> Iterator[Emission]:
        self.gate_state = None
        cache, chunk = new_cache(self.model), self.model.limits.prefill_chunk
        for at in range(0, len(prompt), chunk):
            cache, first = self._prefill_chunk(cache, prompt[at:at + chunk])
        token, margin, finite = (value.item() for value in jax.device_get(first))
        if not finite:
            raise NumericsError(_not_finite(len(prompt) - 1))
        wanted = self.request.max_new_tokens
        yield Emission([token], None)
        state = self._round_state(cache, token, margin, wanted - 1)
        done = wanted == 1 or token in self.request.stop_token_ids
        while not done:
            state, outputs, count = self._run(state, rounds_per_call)
            # Copies: the next call takes the arrays of this state over.
            self.gate_state, done, faulty, outputs, count = jax.device_get((state.gate, state.done, state.faulty, outputs, count))
            for emission in self._emissions(outputs, int(count), wanted - 1):
                wanted -= len(emission.tokens)
                yield emission
            if faulty[0] >= 0:
                raise NumericsError(_not_finite(int(faulty[0])))

    def _emissions(self, outputs: rounds.RoundOutput, count: int, remaining: int) -> Iterator[Emission]:
        for i in range(count):
            tokens = outputs.tokens[i, 0, :min(outputs.emitted[i, 0], remaining)].tolist()
            stops = [j for j, token in enumerate(tokens) if token in self.request.stop_token_ids]
            tokens = tokens[:stops[0] + 1] if stops else tokens
            remaining -= len(tokens)
            if tokens:
                yield Emission(tokens, None if self.request.mode == "plain" else _record(outputs, i))


def _record(outputs: rounds.RoundOutput, i: int) -> RoundRecord:
    skipped = ("", "gate", "margin")[int(outputs.skipped[i, 0])]
    confidence = None if skipped == "margin" else tuple(float(c) for c in outputs.confidence[i, 0])
    return RoundRecord(int(outputs.proposed[i, 0]), int(outputs.verified[i, 0]), int(outputs.accepted[i, 0]), confidence,
                       float(outputs.margin[i, 0]), skipped)


def as_data(number) -> np.ndarray:
    """A gate number with a fixed dtype, so that another value compiles nothing."""
    return np.asarray(number, {bool: np.bool_, int: np.int32}.get(type(number), np.float32))


def _padded_size(count: int) -> int:
    """Stop ids come in lists of 8, 16, 32 ..., so that another stop token compiles nothing."""
    return max(8, 1 << (count - 1).bit_length()) if count else 8


def _not_finite(position: int) -> str:
    return (f"the logits at position {position} are not finite (NaN or infinity); the weights or the computation are damaged: check "
            "the checkpoint with `dspark inspect`, and try dtype='float32'")
