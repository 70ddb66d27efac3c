"""The text that a drafter is trained on: written by the main model itself, greedily and at
temperature 1, after beginnings of the user's text.

It is kept as JSON lines, one sequence each, in the order of their numbers. What a sequence is
depends on its number, the seed and the model alone, not on those beside it, so a run that was
stopped goes on where its file ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import dspark_jax as dspark
from dspark_jax.errors import ConfigError
from dspark_jax.runtime import files
from dspark_jax.train.prompts import Prompts

AT_ONCE = 4  # times as many sequences as streams are asked for in one call


@dataclass(frozen=True)
class Sequences:
    """N sequences of at most L tokens.

    tokens: int32 [N, L], zeros after the end. starts, ends: int64 [N], the first token that the
      main model wrote, and the length. greedy: bool [N], written at temperature 0.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    greedy: np.ndarray

    def __getitem__(self, which: slice) -> Sequences:
        return Sequences(
            self.tokens[which], self.starts[which], self.ends[which], self.greedy[which]
        )


@dataclass(frozen=True)
class Plan:
    """What is to be written: `count` sequences of up to `length` tokens, `greedy` (0 to 1) of them
    at temperature 0 and the others at temperature 1, `streams` at a time.
    """

    count: int
    length: int
    greedy: float
    streams: int
    seed: int

    def is_greedy(self, number: int) -> bool:
        """Spread evenly: of the first n sequences n * greedy, but for rounding."""
        return int((number + 1) * self.greedy) > int(number * self.greedy)


def written(path: Path, length: int) -> list[dict]:
    """The sequences that a file holds; none where there is no file. A last line that is torn is
    cut off, in the file too.

    Raises ConfigError for a file of anything else.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = [_parsed(path, n, line) for n, line in enumerate(content[:whole].splitlines())]
    if whole < len(content):
        with open(path, "r+b") as file:
            file.truncate(whole)
    if any(len(line["tokens"]) > length for line in lines):
        raise ConfigError(f"{path}: holds sequences of more than {length} tokens; remove it")
    return lines


def _parsed(path: Path, number: int, text: bytes) -> dict:
    try:
        line = json.loads(text)
        sound = line["number"] == number and 0 < line["prompt"] < len(line["tokens"])
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ConfigError(
            f"{path}, line {number + 1}: not a sequence of this training; remove the file, or "
            "give another --run"
        )
    return line


def write(
    model: dspark.Model,
    prompts: Prompts,
    plan: Plan,
    path: Path,
    advance: Callable[[int, int], None],
) -> None:
    """Writes what is missing of the plan after what `path` holds. advance(sequences, tokens):
    after each call, how many it wrote. Ctrl-C loses the call in hand only.
    """
    done = len(written(path, plan.length))
    while done < plan.count:
        numbers = range(done, min(plan.count, done + AT_ONCE * plan.streams))
        lines = _generate(model, prompts, plan, numbers)
        with files.naming(path), open(path, "ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        done = numbers.stop
        advance(len(lines), sum(len(line["tokens"]) - line["prompt"] for line in lines))


def _generate(model, prompts: Prompts, plan: Plan, numbers: range) -> list[dict]:
    starts = [prompts.tokens(number) for number in numbers]
    greedy = [plan.is_greedy(number) for number in numbers]
    # Plain decoding: with many streams it is the faster one, and it needs no drafter.
    out = dspark.generate(
        model,
        starts,
        [plan.length - len(start) for start in starts],
        "plain",
        temperature=[0.0 if each else 1.0 for each in greedy],
        seed=[_seed(plan.seed, number) for number in numbers],
        streams=plan.streams,
    )
    return [
        {
            "number": number,
            "prompt": len(start),
            "temperature": 0 if cold else 1,
            "tokens": start + tokens,
        }
        for number, start, cold, tokens in zip(numbers, starts, greedy, out.tokens, strict=True)
    ]


def _seed(seed: int, number: int) -> int:
    """Of the noise: 32 bits of both."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def load(path: Path, plan: Plan) -> Sequences:
    """What `write` has written."""
    lines = written(path, plan.length)[: plan.count]
    tokens = np.zeros((len(lines), plan.length), np.int32)
    for row, line in zip(tokens, lines):
        row[: len(line["tokens"])] = line["tokens"]
    return Sequences(
        tokens,
        np.array([line["prompt"] for line in lines]),
        np.array([len(line["tokens"]) for line in lines]),
        np.array([line["temperature"] == 0 for line in lines]),
    )
