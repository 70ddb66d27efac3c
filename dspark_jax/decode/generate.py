"""generate() and stream(): prompts in, tokens and what every round did out. Speculation never
changes the tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from dspark_jax.decode.engine import RoundRecord
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.request import make_request
from dspark_jax.decode.round import ROUNDS_PER_CALL
from dspark_jax.decode.run import GenerateOutput, Run
from dspark_jax.errors import Interrupted, PromptError
from dspark_jax.loading.load import Model

__all__ = ["GenerateOutput", "StreamEvent", "generate", "stream"]


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

    Raises:
      PromptError, ConfigError: a request that cannot be served, before anything is compiled.
      NumericsError: logits that are NaN or infinite, naming the prompt and the position.
      Interrupted: Ctrl-C. It is a KeyboardInterrupt, and what was emitted is in its `.output`.
    """
    del seed  # nothing is drawn while decoding is greedy
    request = make_request(
        model, prompts, max_new_tokens, mode, gate, temperature, top_k, top_p, stop_token_ids
    )
    run = Run(model, request, ROUNDS_PER_CALL)
    with _progress_bar(progress, len(run.prompts) * request.max_new_tokens) as advance:
        run.complete(lambda emission: advance(len(emission.tokens)))
    if run.interrupted:
        raise Interrupted(run.output())
    return run.output()


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
    del seed  # nothing is drawn while decoding is greedy
    request = make_request(
        model, prompt, max_new_tokens, mode, gate, temperature, top_k, top_p, stop_token_ids
    )
    if len(request.prompts) != 1:
        raise PromptError(
            f"stream takes one prompt, got {len(request.prompts)}; use generate for several"
        )
    run = Run(model, request, rounds_per_call=1, with_text=True)
    run.compile()
    return (StreamEvent(emission.tokens, emission.text, emission.record) for emission in run)


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
