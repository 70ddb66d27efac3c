"""Writes a main model that was trained here in the official layout, and a README that says what was
run and measured.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

import dspark_jax as dspark
from dspark_jax._version import __version__
from dspark_jax.checkpoints.writer import write_official
from dspark_jax.config import ModelConfig
from dspark_jax.model.parameters import RandomSource
from dspark_jax.runtime.files import write_text
from dspark_jax.train import (
    data,
    drafter_stage,
    loop,
    main_stage,
    measure,
    quantise,
    show,
    tokenizer,
    weights,
)

LICENCES = {
    "prose": "public domain (packaged under MIT or CC0)",
    "code": "PSF License Version 2",
}
GENERATED = "ours, generated"


def write(
    options, target: Path, config: ModelConfig, corpus: data.Corpus, built: tuple, values
) -> None:
    """The main model of `values` with a drafter of random values, to `target`. built: what
    `main_stage.build` gave.
    """
    parts, twin, prefixes = built
    drafter, _, drafter_prefixes = drafter_stage.build(config, RandomSource(options.seed + 1))
    items = weights.official_items(parts.module(values), prefixes)
    items += weights.official_items(drafter.module(drafter.values), drafter_prefixes)
    write_official(target, config.to_dict(), items, tokenizer=options.text / "tokenizer.json")
    show.say(f"wrote {target}; measuring")
    shipped = parts.module(quantise.parameters(values, parts.storages), twin)
    held_out = main_stage.held_out(shipped, corpus)
    model = dspark.load(target, max_seq_len=512)
    log = options.run / "main.jsonl"
    shutil.copyfile(log, target / "main.jsonl")
    origin = json.loads((options.text / "sources.json").read_text())
    told = readme(
        options,
        origin,
        held_out,
        measure.counting(model),
        measure.texts(model),
        summary(loop.read_log(log)),
    )
    write_text(target / "README.md", told)


def summary(log: list[dict]) -> dict:
    """Steps, seconds in steps (without compilation and pauses) and a few points of the loss curve,
    from a stage's log.
    """
    lines = {row["step"]: row for row in log}
    steps = sorted(lines)
    typical = np.median([lines[s]["seconds"] for s in steps])
    seconds = sum(lines[s]["seconds"] for s in steps if lines[s]["seconds"] < 20 * typical)
    points = sorted(
        {steps[min(len(steps) - 1, round(f * (len(steps) - 1)))] for f in np.linspace(0, 1, 9)}
    )
    smooth = {
        p: np.mean([lines[s]["loss"] for s in steps if p - 10 <= s <= p + 10]) for p in points
    }
    return {
        "steps": steps[-1],
        "seconds": seconds,
        "curve": ", ".join(f"{p}: {loss:.2f}" for p, loss in smooth.items()),
    }


def readme(
    options,
    origin: dict[str, str],
    held_out: dict[str, float],
    counting: tuple[int, int],
    texts: dict[str, list[tuple[str, str]]],
    log: dict,
) -> str:
    """Markdown. origin: where each kind of text is from. held_out: bits a byte by reported kind.
    counting: see `measure.counting`. texts: (prompt, what follows) by kind. log: see `summary`.
    """
    bits = "\n".join(f"| {kind} | {value:.2f} |" for kind, value in held_out.items())
    sources = "\n".join(
        f"| {kind} | {share:.0%}, {data.LATE_MIXTURE[kind]:.0%} | {origin[kind]} | "
        f"{LICENCES.get(kind, GENERATED)} |"
        for kind, share in data.MIXTURE.items()
    )
    samples = "\n\n".join(
        f"```\n{prompt}⏵{text}\n```" for pairs in texts.values() for prompt, text in pairs[:2]
    )
    shares = "at first, in the last third"
    if options.init:  # see main_run: the late mixture from the beginning
        shares = "(the second number, throughout)"
    return f"""# A main model by dspark-jax

A small DeepSeek-V4 model in the official layout, trained by dspark-jax {__version__} \
{f"from the state {options.init}" if options.init else "from nothing"}. **Its drafter is not \
trained**: the values are random. `dspark train drafter` trains one.

## What was run

```
{options.command}
```

{log["steps"]} steps of {options.rows} windows of {options.length} tokens, Muon \
({options.muon_rate:g}) and Adam ({options.adam_rate:g}), seed {options.seed}, {options.devices} \
device{"s" if options.devices > 1 else ""}, {log["seconds"] / 60:.0f} minutes; in the last fifth \
of the steps weights and activations are quantised as they are stored and run, straight through. \
In prose, tokens that repeat a phrase of the window against the text are penalised (weight \
{main_stage.REPEAT_WEIGHT:g}). Loss in nats by step: {log["curve"]}. `main.jsonl` has a line a step.

| kind | share of windows {shares} | text | licence |
|---|---|---|---|
{sources}

The text itself is not part of this project. `tokenizer.json`: byte-level BPE trained on the same \
text; {tokenizer.EOS} ends a document.

## Measured

| kind | held-out bits a byte |
|---|---|
{bits}

Counting on from {len(measure.COUNTS)} runs of one- to three-digit numbers: {counting[0]} of \
{counting[1]} numbers right (a run counts up to its first wrong number).

## Samples

Greedy. What stands before ⏵ is the prompt.

{samples}
"""
