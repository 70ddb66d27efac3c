"""The prompts of `dspark calibrate`, cut from held-out text."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.errors import PromptError


def cut(model, texts: Sequence[str | list[int]], count: int, length: int, gap: int) -> list:
    """At most `count` prompts of up to `length` token ids, from places spread evenly over all
    texts; `gap` tokens, those that are generated, lie between two of one text.

    Raises PromptError for text without a tokenizer and for fewer than two prompts.
    """
    found = []
    for text in texts:
        ids = text if isinstance(text, list) else _encoded(model, text)
        starts = range(0, max(len(ids) - length, 0) + 1, length + gap)
        found += [ids[at : at + length] for at in starts if ids]
    if len(found) < 2:
        raise PromptError(
            f"--data: one prompt of up to {length} tokens is all there is in it; half of the "
            "prompts are for fitting and half for judging, so give more text"
        )
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _encoded(model, text: str) -> list[int]:
    if model.tokenizer is None:
        raise PromptError(
            "--data is text, but this checkpoint has no tokenizer.json; give token ids, as "
            '{"prompt": [5, 6, 7]} in the lines of a .jsonl file'
        )
    return model.tokenizer.encode(text, add_special_tokens=True).ids
