"""generate() and stream(): prompts in, tokens and what every round did out. Speculation never
changes the tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import zlib
from collections.abc import Iterator

import jax
import numpy as np

from dspark_jax.decode.engine import Engine, RoundRecord
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import make_request
from dspark_jax.decode.round import ROUNDS_PER_CALL
from dspark_jax.decode.stats import PromptRun, collect
from dspark_jax.decode.text import IncrementalText, decode
from dspark_jax.errors import PromptError
from dspark_jax.loading.load import Model
from dspark_jax.runtime.processes import require_same


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


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """One round of a stream: its tokens, their text (None without a tokenizer), its record (None
    for the first token and in plain).
    """

    tokens: list[int]
    text: str | None
    record: RoundRecord | None


def generate(
    model: Model,
    prompts,
    max_new_tokens: int = 128,
    mode: str = "block",
    gate: GateConfig = GateConfig(),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids=None,
    progress: bool = False,
) -> GenerateOutput:
    """Continues one or several prompts greedily.

    As many run at a time as the model's mesh has rows on its data axis: one after another on a
    single device.

    Args:
      model: from `dspark.load`.
      prompts: str, list of str, list of token ids, or list of lists of token ids.
      max_new_tokens: how many tokens to emit for each prompt.
      mode: "plain", "sequential" or "block"; all give the same tokens.
      gate: adaptive draft length, off by default.
      temperature, top_k, top_p, seed: only greedy decoding (0, 0, 1) so far.
      stop_token_ids: ids that end a stream. None: the config's eos_token_id; []: none.
      progress: show a progress bar on standard error.

    Ctrl-C ends the run and returns what was emitted, with finish reason "interrupted".

    Raises:
      PromptError, ConfigError: a request that cannot be served, before anything is compiled.
      NumericsError: logits that are NaN or infinite, naming the prompt and the position.
    """
    del seed  # nothing is drawn while decoding is greedy
    request = make_request(
        model, prompts, max_new_tokens, mode, gate, temperature, top_k, top_p, stop_token_ids
    )
    _require_same(model, request)
    runs = [PromptRun(len(prompt)) for prompt in request.prompts]
    engine = None
    with _bar(progress, len(runs) * request.max_new_tokens) as advance:
        try:
            engine = Engine(model, request)
            for first in range(0, len(runs), engine.width):
                _fill(runs, range(first, min(first + engine.width, len(runs))), engine, advance)
        except KeyboardInterrupt:
            pass
    return _output(model, request, runs, engine)


def _fill(runs: list[PromptRun], numbers: range, engine: Engine, advance) -> None:
    """Runs the prompts of these numbers at once."""
    started = time.perf_counter()
    try:
        for emission in engine.stream(numbers, ROUNDS_PER_CALL):
            run = runs[emission.prompt]
            run.add(emission.tokens, emission.record)
            run.finished, run.seconds = emission.last, time.perf_counter() - started
            advance(len(emission.tokens))
    finally:
        for place, number in enumerate(numbers):
            if not runs[number].finished:
                runs[number].seconds = time.perf_counter() - started
            runs[number].gate_state = engine.gate_of(place)


def _output(model: Model, request, runs: list[PromptRun], engine: Engine | None) -> GenerateOutput:
    reasons = [run.finish_reason(request.stop_token_ids) for run in runs]
    texts = None if model.tokenizer is None else [decode(model, run.tokens) for run in runs]
    compile_seconds, together = (engine.compile_seconds, engine.width) if engine else (0.0, 1)
    stats = collect(runs, model.config.dspark_block_size, compile_seconds, together)
    return GenerateOutput(
        [run.tokens for run in runs], texts, reasons, [run.records for run in runs], stats
    )


def stream(
    model: Model,
    prompt,
    max_new_tokens: int = 128,
    mode: str = "block",
    gate: GateConfig = GateConfig(),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids=None,
) -> Iterator[StreamEvent]:
    """Like `generate` for one prompt (text or token ids), yielding a StreamEvent a round, as soon
    as it is known.

    The request is checked when this is called, not at the first event.
    """
    return open_stream(
        model, prompt, max_new_tokens, mode, gate, temperature, top_k, top_p, seed, stop_token_ids
    )[2]


def open_stream(
    model: Model,
    prompt,
    max_new_tokens: int = 128,
    mode: str = "block",
    gate: GateConfig = GateConfig(),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids=None,
):
    """The checked Request, the compiled Engine and the events of `stream`."""
    del seed  # nothing is drawn while decoding is greedy
    request = make_request(
        model, prompt, max_new_tokens, mode, gate, temperature, top_k, top_p, stop_token_ids
    )
    if len(request.prompts) != 1:
        raise PromptError(
            f"stream takes one prompt, got {len(request.prompts)}; use generate for several"
        )
    _require_same(model, request)
    engine = Engine(model, request)
    return request, engine, _events(model, engine)


def _require_same(model: Model, request) -> None:
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
    numerics, asked = (
        model.numerics,
        dataclasses.asdict(request) | {"stop_token_ids": sorted(request.stop_token_ids)},
    )
    require_same(
        config=model.config,
        checksum_of_vectors=weights,
        limits=model.limits,
        dtype=numerics.dtype,
        activation_quant=numerics.activation_quant,
        mesh=dict(model.mesh.shape),
        expert_storage=model.expert_storage,
        **asked,
    )


def _events(model: Model, engine: Engine) -> Iterator[StreamEvent]:
    text = IncrementalText(model)
    for emission in engine.stream([0], 1):
        yield StreamEvent(
            emission.tokens, text.add(emission.tokens, emission.last), emission.record
        )


class _bar:
    """A progress bar of tokens on standard error, or nothing; `with _bar(...) as advance:
    advance(count)`.
    """

    def __init__(self, shown: bool, total: int):
        self.shown, self.total = shown, total

    def __enter__(self):
        if not self.shown:
            return lambda count: None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._progress.start()
        task = self._progress.add_task("tokens", total=self.total)
        return lambda count: self._progress.advance(task, count)

    def __exit__(self, *exception):
        if self.shown:
            self._progress.stop()
