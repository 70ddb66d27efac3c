"""Prompts that training never saw, chosen by rule before it begins: what a checkpoint is judged by.

prose   the opening words of a long paragraph of ten chapters of the novel that is held out
code    the head of the first long function of ten files of the standard library that are held
        out; kept as (file, function) and read from the library of the Python that runs
math    the first lines of ten pages of sums, from a seed of their own
repeat  five rows of numbers and five cycles (two and a half rounds of them), likewise
"""

import ast
import json
import re
import textwrap
from pathlib import Path

import numpy as np

from dspark_jax.train import fetch_text, synthetic

PROMPTS = 10  # of each kind
SEED = 20_000  # not one that text is generated from
LONG_PARAGRAPH, LONG_FUNCTION = 400, 8  # characters, lines
LONGEST_PROMPT = 320  # characters


def prose(chapters: list[str]) -> list[str]:
    """The first words, about 120 characters, of the middlemost long paragraph of every third
    chapter.
    """
    out = []
    for chapter in chapters[1::3][:PROMPTS]:
        long = [p for p in chapter.split("\n\n") if len(p) >= LONG_PARAGRAPH]
        out.append(re.match(r".{110,}?(?= )", long[len(long) // 2]).group())
    return out


def code(documents: list[tuple[str, str]]) -> list[dict[str, str]]:
    """[(file, text)] -> [{"file", "function"}], one of a file at most."""
    out = []
    for file, text in documents:
        name = next(iter(_heads(text)), None)
        if name is not None:
            out.append({"file": file, "function": name})
    return out[:PROMPTS]


def _heads(text: str) -> dict[str, str]:
    """The long functions of a file: name -> its lines up to the end of the first statement."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # lines that are not ASCII are cut out of the text
        return {}
    out, lines = {}, text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONG_FUNCTION:
            head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            if len(head) <= LONGEST_PROMPT:
                out.setdefault(node.name, head)
    return out


def math() -> list[str]:
    return [_lines(synthetic.sums(_rng("math", i))) for i in range(PROMPTS)]


def _lines(text: str) -> str:
    """The first third of the lines, and the next up to its sign of equality or question mark."""
    lines = text.split("\n")
    keep = max(2, len(lines) // 3)
    following = re.match(r"[^=?:]*[=?:]?", lines[keep]).group() if len(lines) > keep else ""
    return "\n".join([*lines[:keep], following])


def repeat() -> list[str]:
    counts = [synthetic.counting(_rng("count", i)) for i in range(PROMPTS // 2)]
    out = [text[: text.index(re.split(r"\D+", text)[7], 20)].rstrip() for text in counts]
    number = 0
    while len(out) < PROMPTS:
        text, number = synthetic.cycle(_rng("cycle", number)), number + 1
        period = _period(text)
        if period <= 80:
            out.append(text[: int(2.5 * period)].rstrip())
    return out


def _period(text: str) -> int:
    """After how many characters the text comes round."""
    return next(n for n in range(1, len(text) + 1) if text.startswith(text[n:]))


def _rng(kind: str, number: int) -> np.random.Generator:
    return np.random.default_rng([SEED, sorted(synthetic.GENERATORS).index(kind), number])


def choose(chapters: list[str], files: list[tuple[str, str]]) -> dict[str, list]:
    """What `save` writes: of each kind PROMPTS prompts, code by file and function."""
    return {"prose": prose(chapters), "code": code(files), "math": math(), "repeat": repeat()}


def load(path: Path) -> dict[str, list[str]]:
    """The prompts of a checkpoint's prompts.json, code read from the running Python's standard
    library; a function that it does not have is left out.
    """
    prompts = json.loads(path.read_text())
    texts = dict(fetch_text.code_files())
    heads = [_heads(texts.get(at["file"], "")).get(at["function"]) for at in prompts["code"]]
    return {**prompts, "code": [head for head in heads if head]}
