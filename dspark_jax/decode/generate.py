"""generate() and stream(): prompts in, tokens and what every round did out. Speculation never
changes the tokens, and neither do the streams beside one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from dspark_jax.decode.emission import Emission, RoundRecord, TokenLogprob
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import Request, make_request
from dspark_jax.decode.run import GenerateOutput, Run
from dspark_jax.errors import Interrupted
from dspark_jax.loading.load import Model, require_model

__all__ = ["GenerateOutput", "StreamEvent", "generate", "stream"]


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """One round of a stream.

    tokens: those that it emitted. text: what they add to the text, None without a tokenizer.
    record: None for the first token and in plain mode. prompt: the number of the prompt. logprobs:
    a TokenLogprob for every token, where asked for. finish_reason, stop_reason: in the last event
    of a prompt, as in GenerateOutput; None before.
    """

    tokens: list[int]
    text: str | None
    record: RoundRecord | None
    prompt: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def generate(
    model: Model,
    prompts,
    max_new_tokens=128,
    mode: str = "block",
    gate: GateConfig = GateConfig(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    stop_token_ids=None,
    progress: bool = False,
    *,
    streams: int | None = None,
    min_p=0.0,
    stop=None,
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    logit_bias=None,
    forbidden_tokens=None,
    prefix=None,
) -> GenerateOutput:
    """Continues one or several prompts.

    Whatever the mode, the gate, the number of streams and the prompts beside it, a prompt's tokens
    and log-probabilities are the same, bit for bit; sampled ones too. (On accelerators for one
    value of `streams`: there the shapes of a program choose its kernels.)

    max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids, stop, logit_bias and
    forbidden_tokens may be lists with an entry for each prompt.

    Args:
      model: from `dspark.load`.
      prompts: str, list of str, list of token ids, or list of lists of token ids.
      max_new_tokens: how many tokens to emit for each prompt.
      mode: "plain", "sequential" or "block"; all give the same tokens.
      gate: adaptive draft length, off by default; each stream has a length of its own.
      temperature: 0: the most likely token; above, tokens are drawn.
      top_k, top_p, min_p: filters, applied in this order after the temperature, as in Hugging Face
        transformers: the top_k best (0: all), of these the fewest whose probabilities add up to
        top_p (1: all), of these the ones at least min_p times as likely as the best (0: all).
      seed: of the noise, 0 to 2**32 - 1. One seed gives every prompt noise of its own, by its
        number; a list of seeds gives each prompt the noise that it has alone.
      stop_token_ids: ids that end a stream. None: the config's eos_token_id; []: none.
      progress: show a progress bar on standard error.
      streams: how many prompts run at a time on each row of the mesh's data axis, rounded up to a
        power of two. None: as many as there are prompts, at most 8. The others follow as places
        become free.
      stop: a string or strings that end a stream; the text ends before it, the tokens with the one
        that completed it.
      logprobs: n: also return the log-probability of every emitted token and of the n most likely
        ones at its place, from the raw logits (temperature 1, before bias and filters). None: none.
      prompt_logprobs: also return those of the prompts' tokens.
      logit_bias: {token id: what is added to its logit before anything is chosen}.
      forbidden_tokens: ids that are never chosen.
      prefix: a `dspark.Session`; every prompt continues it, and what it holds is not computed
        again.

    Raises:
      PromptError, ConfigError: a request that cannot be served, before anything is compiled.
      NumericsError: logits that are NaN or infinite, naming the prompt and the position. The other
        prompts run to their ends first, and what was emitted is in its `.output`.
      Interrupted: Ctrl-C. It is a KeyboardInterrupt, and what was emitted is in its `.output`.
    """
    require_model(model, "generate")
    request = make_request(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        mode=mode,
        gate=gate,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        stop=stop,
        streams=streams,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=logit_bias,
        forbidden_tokens=forbidden_tokens,
        prefix=prefix,
    )
    return completed(Run(model, request), progress)


def completed(run: Run, progress: bool = False) -> GenerateOutput:
    """The output of a run to its end; Interrupted after Ctrl-C."""
    with _progress_bar(progress, _most_tokens(run.request)) as advance:
        run.complete(lambda emission: advance(len(emission.tokens)))
    if run.interrupted:
        raise Interrupted(run.output())
    return run.output()


def stream(
    model: Model,
    prompts,
    max_new_tokens=128,
    mode: str = "block",
    gate: GateConfig = GateConfig(),
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    stop_token_ids=None,
    *,
    streams: int | None = None,
    min_p=0.0,
    stop=None,
    logprobs: int | None = None,
    logit_bias=None,
    forbidden_tokens=None,
    prefix=None,
) -> Iterator[StreamEvent]:
    """Like `generate`, yielding a StreamEvent a round of each stream, as soon as it is known; where
    rounds take a millisecond, several come together, a hundred times a second.

    The request is checked, and programs are compiled, when this is called and not at the first
    event. Closing the iterator ends all streams.
    """
    require_model(model, "stream")
    request = make_request(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        mode=mode,
        gate=gate,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        stop=stop,
        streams=streams,
        logprobs=logprobs,
        logit_bias=logit_bias,
        forbidden_tokens=forbidden_tokens,
        prefix=prefix,
    )
    run = Run(model, request, by_round=True, with_text=True)
    run.compile()
    return events(run)


def events(run: Run) -> Iterator[StreamEvent]:
    """The emissions of a run as events."""
    with contextlib.closing(iter(run)) as emissions:
        for emission in emissions:
            yield _event(run, emission)


def _event(run: Run, emission: Emission) -> StreamEvent:
    prompt = run.prompts[emission.prompt]
    return StreamEvent(
        tokens=emission.tokens,
        text=emission.text,
        record=emission.record,
        prompt=emission.prompt,
        logprobs=emission.logprobs,
        finish_reason=prompt.finish_reason if emission.last else None,
        stop_reason=prompt.stop_reason if emission.last else None,
    )


def _most_tokens(request: Request) -> int:
    return sum(prompt.max_new_tokens for prompt in request.prompts)


@contextlib.contextmanager
def _progress_bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """advance(count) of a bar of tokens on standard error; it does nothing where not shown."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokens", total=total)
        yield lambda count: bar.advance(task, count)
