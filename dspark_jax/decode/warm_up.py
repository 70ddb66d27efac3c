"""Programs compiled ahead of the first request."""

from __future__ import annotations

from collections.abc import Collection

from dspark_jax.decode.options import plain
from dspark_jax.decode.request import make_request
from dspark_jax.decode.run import Run
from dspark_jax.loading.load import Model, require_model
from dspark_jax.runtime.scalars import truth


def warm_up(
    model: Model,
    streams: int | Collection[int] = 1,
    sampled: bool = False,
    logprobs: bool = False,
    mode: str = "block",
    prompt_logprobs: bool = False,
) -> float:
    """Compiles what requests of this kind run, so that they compile nothing; the seconds that it
    took, 0 where all was ready.

    Two kinds of programs are greedy and sampled ones; within a kind prompts, lengths, gates,
    samplers and stop tokens (up to 8 of them) are data.

    Args:
      model: from `dspark.load`.
      streams: how many run at a time on a row of the mesh's data axis, rounded up to a power of
        two, or several such numbers. `generate` of n prompts has the least power of two that is
        not below n, at most 8.
      sampled: for temperatures above 0; greedy prompts run in the same programs beside them.
      logprobs: for log-probabilities, of up to 8 tokens a place.
      mode: "plain", "sequential" or "block".
      prompt_logprobs: for those of the prompts' tokens.

    Raises ConfigError as `generate` does.
    """
    require_model(model, "warm_up")
    sampled, logprobs = truth("sampled", sampled), truth("logprobs", logprobs)
    streams, seconds = plain(streams), 0.0
    requests = [
        make_request(
            model,
            [0],
            max_new_tokens=1,
            mode=mode,
            temperature=1.0 if sampled else 0.0,
            streams=count,
            logprobs=0 if logprobs else None,
            prompt_logprobs=prompt_logprobs,
        )
        for count in (streams if isinstance(streams, Collection) else [streams])
    ]  # all are checked before one is compiled for
    for request in requests:
        run = Run(model, request)
        run.compile()
        seconds += run.engine.compile_seconds
    return seconds
