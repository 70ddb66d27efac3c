"""The places where streams run: what the host knows of them, and puts on the device when one of
them changes hands.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dspark_jax.decode import gate as gates
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import Prompt, Request
from dspark_jax.decode.sampling import Choice, Sampling
from dspark_jax.decode.state import Begun, RoundState, Settings
from dspark_jax.loading.calibration import Scale, raw
from dspark_jax.loading.load import Model
from dspark_jax.runtime.scalars import plain
from dspark_jax.runtime.sharding import stream_spec

FEWEST_STOP_IDS = 8  # that a program has room for


class Slots:
    """`width` places, all empty at first. An empty one is a stream that is done.

    owners: the number of the prompt at each place, or None. positions: of each stream's anchor.
    state: the RoundState (without a cache) on the host, as it was fetched last.
    """

    def __init__(self, model: Model, request: Request, gate_config, width: int):
        self._model, self._request, self._width = model, request, width
        self.owners: list[int | None] = [None] * width
        self.positions = [0] * width
        self._cold = jax.device_get(gates.init(gate_config, 1))
        self.state = RoundState(
            cache=None,
            anchor=np.zeros(width, np.int32),
            margin=np.zeros(width, np.float32),
            remaining=np.zeros(width, np.int32),
            done=np.ones(width, np.bool_),
            faulty=np.full(width, -1, np.int32),
            gate=jax.tree.map(lambda leaf: np.repeat(leaf, width, axis=0), self._cold),
        )

    def empty(self) -> list[int]:
        return [place for place, owner in enumerate(self.owners) if owner is None]

    def seat(self, place: int, number: int, begun: Begun, position: int) -> None:
        """The prompt of this number, which its prefill has begun, takes an empty place. begun: of
        one stream. position: where its first token stands.
        """
        prompt = self._request.prompts[number]
        self.owners[place], self.positions[place] = number, position
        values = RoundState(
            cache=None,
            anchor=begun.token,
            margin=begun.margin,
            remaining=prompt.max_new_tokens - 1,
            done=False,
            faulty=-1,
            gate=jax.tree.map(lambda leaf: leaf[0], self._cold),
        )
        self.state = jax.tree.map(lambda all, one: _with(all, place, one), self.state, values)

    def release(self, place: int) -> None:
        self.owners[place] = None
        self.state = self.state.replace(done=_with(self.state.done, place, True))

    def gate_of(self, place: int) -> gates.GateState:
        return jax.tree.map(lambda leaf: leaf[place : place + 1].copy(), self.state.gate)

    def on_device(self) -> tuple[RoundState, Settings]:
        prompts = [None if n is None else self._request.prompts[n] for n in self.owners]
        return self._placed(self.state), self.settings(prompts)

    def settings(self, prompts: Sequence[Prompt | None]) -> Settings:
        """Of the prompts, on the device; None: an empty place."""
        size, vocabulary = _padded_size(self._request), self._model.config.vocab_size
        sampled, block = self._request.sampled, self._model.config.dspark_block_size
        scales = [
            scale_of(self._model, self._request.gate, prompt) or raw(block) for prompt in prompts
        ]
        return self._placed(_settings(prompts, size, vocabulary, sampled, scales))

    def _placed(self, tree):
        return placed(self._model, tree)


def greedy_settings(model: Model) -> Settings:
    """Of one stream for which nothing was asked, on the device."""
    scales = [raw(model.config.dspark_block_size)]
    return placed(model, _settings([None], FEWEST_STOP_IDS, model.config.vocab_size, False, scales))


def placed(model: Model, tree):
    """On the device, cut by streams, which are the first axis of every leaf."""
    streams = jax.tree.leaves(tree)[0].shape[0]
    return jax.device_put(tree, NamedSharding(model.mesh, stream_spec(model.mesh, streams)))


def scale_of(model: Model, gate: GateConfig, prompt: Prompt | None) -> Scale | None:
    """By what the gate scales the scores of this prompt's drafts; None: it takes them as they
    are.
    """
    if model.calibration is None or prompt is None or not plain(gate.calibration):
        return None
    return model.calibration.of(prompt.temperature)


def _settings(
    prompts: Sequence[Prompt | None],
    stop_ids: int,
    vocabulary: int,
    sampled: bool,
    scales: Sequence[Scale],
) -> Settings:
    """On the host. stop_ids: how many there is room for."""
    stops = np.full((len(prompts), stop_ids), -1, np.int32)
    bias = np.zeros((len(prompts), vocabulary), np.float32)
    for place, prompt in enumerate(prompts):
        if prompt is not None:
            ids = sorted(prompt.stop_token_ids)
            stops[place, : len(ids)] = ids
            if prompt.bias:
                tokens, values = zip(*prompt.bias)
                bias[place, list(tokens)] = values
    temperatures, offsets = (np.array(column, np.float32) for column in zip(*scales))
    choice = Choice(bias, _sampling(prompts) if sampled else None)
    return Settings(choice, stops, temperatures, offsets)


def _sampling(prompts: Sequence[Prompt | None]) -> Sampling:
    def of(name, idle, dtype):
        values = [idle if prompt is None else getattr(prompt, name) for prompt in prompts]
        return np.array(values, dtype)

    return Sampling(
        temperature=of("temperature", 0.0, np.float32),
        top_k=of("top_k", 0, np.int32),
        top_p=of("top_p", 1.0, np.float32),
        min_p=of("min_p", 0.0, np.float32),
        seed=of("seed", 0, np.uint32),
        prompt=of("index", 0, np.int32),
    )


def _padded_size(request: Request) -> int:
    """Stop ids come in lists of 8, 16, 32 ..., so that another stop token compiles nothing."""
    most = max(len(prompt.stop_token_ids) for prompt in request.prompts)
    return max(FEWEST_STOP_IDS, 1 << (most - 1).bit_length()) if most else FEWEST_STOP_IDS


def _with(values: np.ndarray, place: int, value) -> np.ndarray:
    values = np.array(values)
    values[place] = value
    return values
