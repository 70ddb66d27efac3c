"""What a draft, a verify and a plain step cost on this machine, in ms: medians of single calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from dspark_jax.decode import steps
from dspark_jax.decode.engine import Engine
from dspark_jax.decode.request import make_request
from dspark_jax.errors import ConfigError
from dspark_jax.loading.load import Model

_REPEATS = 16


def measure(model: Model, prompt: list[int]) -> dict[str, float]:
    """draft_ms, verify_ms (the whole block) and plain_ms after `prompt` (ids), each call waited
    for on its own.

    A round is timed as a whole and its draft alone; verify is the difference. A prompt that leaves
    too little room for the rounds is cut. Raises ConfigError where not even two rounds fit.
    """
    repeats, rows = check_room(model), model.config.dspark_block_size + 1
    prompt = prompt[: model.limits.max_seq_len - 1 - rows * (repeats + 1)]
    _, _, cache = steps.prefill(model, prompt)
    token = np.array(prompt[-1:], np.int32)
    draft = _median_ms(lambda: jax.block_until_ready(steps.draft(model, cache, token)), _REPEATS)
    plain, block = (_step_ms(model, prompt, mode, repeats) for mode in ("plain", "block"))
    return {"draft_ms": draft, "verify_ms": max(block - draft, 0.0), "plain_ms": plain}


def check_room(model: Model) -> int:
    """How many rounds are timed; one more comes before them. Raises ConfigError where not even two
    rounds fit.
    """
    rows = model.config.dspark_block_size + 1
    repeats = min(_REPEATS, (model.limits.max_seq_len - 2) // rows - 1)
    if repeats < 1:
        raise ConfigError(
            f"max_seq_len {model.limits.max_seq_len} has no room to measure two rounds of {rows} "
            "tokens; load with a larger one"
        )
    return repeats


def _step_ms(model: Model, prompt: list[int], mode: str, repeats: int) -> float:
    """One call of one round, whatever it emits."""
    rows = model.config.dspark_block_size + 1
    most = 1 + (repeats + 1) * rows  # as many as these rounds may emit
    request = make_request(model, prompt, max_new_tokens=most, mode=mode, stop_token_ids=[])
    emissions = Engine(model, request).stream(rounds_per_call=1)
    next(emissions)
    return _median_ms(lambda: next(emissions), repeats)


def _median_ms(call: Callable, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)
