"""Token streams for training: fetch, tokenise, split, and batches that are a pure function of
(seed, step).

Windows of `length + 1` tokens start where a prompt would (a paragraph, a top-level definition, a
generated document) and run over what follows (documents end with the eos token; a novel is one a
chapter). Whole novels, files and generated documents are held out.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dspark_jax.train import fetch_text, held_out, synthetic
from dspark_jax.train import tokenizer as tokenizers

# The share of each kind among the windows.
MIXTURE = {
    "prose": 0.38,
    "code": 0.18,
    "functions": 0.10,
    "math": 0.10,
    "count": 0.08,
    "cycle": 0.16,
}
# The same in the last third of the main model's steps, and for the drafter: more of what has to be
# exact.
LATE_MIXTURE = {
    "prose": 0.34,
    "code": 0.15,
    "functions": 0.10,
    "math": 0.10,
    "count": 0.09,
    "cycle": 0.22,
}
# What the kinds are reported as.
REPORTED = {
    "prose": ("prose",),
    "code": ("code", "functions"),
    "math": ("math",),
    "repeat": ("count", "cycle"),
}
GENERATED_BYTES = 3_000_000  # of each generated kind
HELD_OUT = 0.03


@dataclass(frozen=True)
class Stream:
    """One kind of text. `tokens` uint16 [n]; `starts` int64 [m]: where a window may start."""

    tokens: np.ndarray
    starts: np.ndarray

    def window(self, u: float, length: int) -> np.ndarray:
        """-> int32 [length]: the window chosen by u in [0, 1)."""
        usable = int(np.searchsorted(self.starts, len(self.tokens) - length, side="right"))
        at = int(self.starts[int(u * usable)])
        return self.tokens[at : at + length].astype(np.int32)


@dataclass(frozen=True)
class Corpus:
    """Every kind's training and held-out stream. `token_bytes` int32 [V]: bytes of text per token
    id.
    """

    train: dict[str, Stream]
    held_out: dict[str, Stream]
    token_bytes: np.ndarray
    seed: int

    def batch(
        self, step: int, rows: int, length: int, late: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> int32 [rows, length + 1] and int32 [rows]: the training windows of `step` and their
        kinds, by place in MIXTURE.

        late: of LATE_MIXTURE. A step always has the same batch. Kinds are stratified within it.
        """
        rng = np.random.default_rng([self.seed, step])
        edges = np.cumsum(list((LATE_MIXTURE if late else MIXTURE).values()))
        kinds = np.searchsorted(
            edges / edges[-1], (rng.random() + np.arange(rows)) / rows, side="right"
        )
        names = list(MIXTURE)
        kinds = rng.permutation(kinds).astype(np.int32)
        return np.stack(
            [
                self.train[names[k]].window(u, length + 1)
                for k, u in zip(kinds, rng.random(rows), strict=True)
            ]
        ), kinds

    def held_out_windows(self, kind: str, rows: int, length: int) -> np.ndarray:
        """-> int32 [rows, length + 1]: fixed held-out windows of a kind of MIXTURE."""
        return np.stack(
            [self.held_out[kind].window((i + 0.5) / rows, length + 1) for i in range(rows)]
        )

    def frequencies(self, vocab_size: int) -> np.ndarray:
        """-> float64 [V]: how often each token id is met in training, by the mixture."""
        counts = [
            share
            * np.bincount(self.train[kind].tokens, minlength=vocab_size)
            / len(self.train[kind].tokens)
            for kind, share in MIXTURE.items()
        ]
        return np.sum(counts, axis=0)


def _pieces(kind: str, document: str) -> list[str]:
    """Cuts a document where a window may start."""
    if kind == "prose":
        return re.split(r"(?<=\n\n)", document)
    if kind == "code":
        return re.split(r"(?m)(?=^(?:def|class|import|from|@)\b)", document)
    return [document]


def _encode(tokenizer: Tokenizer, kind: str, documents: list[str]) -> Stream:
    tokens, starts, at = [], [], 0
    for document in documents:
        pieces = [p for p in _pieces(kind, document) if p]
        for ids in (e.ids for e in tokenizer.encode_batch(pieces)):
            starts.append(at)
            tokens.append(np.array(ids, np.uint16))
            at += len(ids)
        tokens.append(np.array([tokenizer.token_to_id(tokenizers.EOS)], np.uint16))
        at += 1
    return Stream(np.concatenate(tokens), np.array(starts, np.int64))


def _chapters(novel: str) -> list[str]:
    """The chapters of a novel, each with its heading; what stands before the first goes with it."""
    pieces = re.split(r"(?mi)^(?=chapter \w+$)", novel)
    return [pieces[0] + pieces[1], *pieces[2:]] if len(pieces) > 1 else [novel]


def _split(kind: str, documents: list[str]) -> tuple[list[str], list[str]]:
    """-> (train, held out): the shortest novel is held out, else every n-th document."""
    if kind == "prose":
        shortest = min(documents, key=len)
        train = [c for novel in documents if novel is not shortest for c in _chapters(novel)]
        return train, _chapters(shortest)
    every = round(1 / HELD_OUT)
    return [d for i, d in enumerate(documents) if i % every], documents[::every]


FILES = ("tokenizer.json", "sources.json", "prompts.json", "corpus.npz")


def prepare(cache: Path, seed: int, vocab_size: int, say: Callable[[str], None]) -> None:
    """Fetches and generates the text, trains the tokenizer, and writes FILES: prompts.json has the
    held-out prompts. The last of them comes when the others are whole.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=cache) as unfinished:
        _prepare(Path(unfinished), seed, vocab_size, say)
        for name in FILES:
            os.replace(Path(unfinished) / name, cache / name)


def _prepare(cache: Path, seed: int, vocab_size: int, say: Callable[[str], None]) -> None:
    texts, origin = {}, {}
    for kind, fetch in (("prose", fetch_text.prose), ("code", fetch_text.code)):
        texts[kind], origin[kind] = fetch()
        say(f"{kind}: {origin[kind]}, {sum(map(len, texts[kind])) / 1e6:.1f} MB")
    for kind in synthetic.GENERATORS:
        texts[kind] = synthetic.documents(kind, seed, GENERATED_BYTES)
        origin[kind] = f"generated, {sum(map(len, texts[kind])) / 1e6:.1f} MB"
    split = {kind: _split(kind, documents) for kind, documents in texts.items()}
    sample = [
        text
        for kind, (train, _) in split.items()
        for text in _prefix(train, int(8e6 * MIXTURE[kind]))
    ]
    tokenizer = tokenizers.build(sample, vocab_size)
    arrays = {}
    for kind, parts in split.items():
        for part, documents in zip(("train", "held_out"), parts, strict=True):
            stream = _encode(tokenizer, kind, documents)
            arrays |= {
                f"{part}.{kind}.tokens": stream.tokens,
                f"{part}.{kind}.starts": stream.starts,
            }
            if part == "train":
                size = sum(len(d.encode()) for d in documents)
                say(
                    f"{kind}: {len(stream.tokens) / 1e6:.2f} M tokens, "
                    f"{size / len(stream.tokens):.2f} bytes a token"
                )
    np.savez(
        cache / "corpus.npz",
        token_bytes=np.array(tokenizers.token_bytes(tokenizer), np.int32),
        **arrays,
    )
    files = [f for f in fetch_text.code_files() if f[1] in set(split["code"][1])]
    prompts = held_out.choose(split["prose"][1], files)
    (cache / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    tokenizer.save(str(cache / "tokenizer.json"))
    (cache / "sources.json").write_text(json.dumps(origin, indent=1))


def _prefix(documents: list[str], size: int) -> list[str]:
    """The first documents, about `size` characters of them, a long one in parts."""
    parts = [d[i : i + 20_000] for d in documents for i in range(0, len(d), 20_000)]
    keep = max(1, min(len(parts), int(size / (sum(map(len, parts)) / len(parts)))))
    return [parts[i * len(parts) // keep] for i in range(keep)]


def load(cache: Path, seed: int) -> Corpus:
    """Reads what `prepare` wrote; FileNotFoundError names the stage to run."""
    path = cache / "corpus.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `dspark train text --out {cache}` first")
    with np.load(path) as arrays:

        def streams(part):
            return {
                k: Stream(arrays[f"{part}.{k}.tokens"], arrays[f"{part}.{k}.starts"])
                for k in MIXTURE
            }

        return Corpus(streams("train"), streams("held_out"), arrays["token_bytes"], seed)
