"""The training text as files that people and `dspark train drafter --data` can read: one a kind,
JSON lines, {"text": document}.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dspark_jax.runtime import files
from dspark_jax.train import data, tokenizer


def write(cache: Path) -> list[Path]:
    """Writes KIND.jsonl of the training part of every kind beside what `data.prepare` wrote;
    -> their paths. Files that are there already stay.
    """
    corpus, made = data.load(cache, seed=0), tokenizer.load(cache / "tokenizer.json")
    paths = []
    for kind, stream in corpus.train.items():
        path = cache / f"{kind}.jsonl"
        if not path.exists():
            texts = made.decode_batch(documents(stream.tokens, made.token_to_id(tokenizer.EOS)))
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            files.write_text(path, "".join(lines))
        paths.append(path)
    return paths


def documents(tokens: np.ndarray, eos: int) -> list[list[int]]:
    """tokens [n], documents that end with `eos` each -> the documents without it; never an empty
    one.
    """
    pieces = np.split(tokens, np.flatnonzero(tokens == eos))
    return [ids for piece in pieces if (ids := [int(t) for t in piece if t != eos])]
