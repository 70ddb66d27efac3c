"""Writes the trained model in the official layout, and a README that says what it is and what was
measured.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dspark_jax.checkpoints.writer import write_official
from dspark_jax.config import ModelConfig
from dspark_jax.train import (
    data,
    drafter_stage,
    loop,
    main_stage,
    measure,
    quantise,
    tokenizer,
    weights,
)

LICENCES = {
    "prose": "public domain (packaged under MIT or CC0)",
    "code": "PSF License Version 2",
    "math": "ours, generated",
    "count": "ours, generated",
    "cycle": "ours, generated",
    "functions": "ours, generated",
}


def write(options, config: ModelConfig, corpus: data.Corpus, say: Callable[[str], None]) -> None:
    """Stage `export`: --run/main.safetensors and drafter.safetensors to --out. Without the latter
    the drafter is untrained.
    """
    built = main_stage.build(config, options.seed, corpus.frequencies(config.vocab_size))
    main, main_items = _trained(options.run / "main.safetensors", built)
    trained = (options.run / "drafter.safetensors").exists()
    _, drafter_items = _trained(
        options.run / "drafter.safetensors",
        drafter_stage.build(config, options.seed),
        required=False,
    )
    write_official(
        options.out,
        config.to_dict(),
        main_items + drafter_items,
        tokenizer=options.cache / "tokenizer.json",
    )
    say(
        f"wrote {options.out}: {(options.out / 'model.safetensors').stat().st_size / 1e6:.2f} "
        "MB; measuring"
    )
    figures = measure.report(options.out) | {"held_out": main_stage.held_out(main, corpus)}
    log = {stage: summary(options.run / f"{stage}.jsonl") for stage in ("main", "drafter")}
    origin = json.loads((options.cache / "sources.json").read_text())
    (options.out / "README.md").write_text(readme(options, origin, figures, log, trained))
    say(f"measured in {figures['seconds']:.0f} s; see {options.out / 'README.md'}")


def _trained(path: Path, built: tuple, required: bool = True):
    """-> the module as it ships and its official tensors."""
    parts, twin, prefixes = built
    values = parts.values
    if required or path.exists():
        values = loop.load_params(path, parts.values)
    items = weights.official_items(parts.module(values), prefixes)
    return parts.module(quantise.parameters(values, parts.storages), twin), items


def summary(path: Path) -> dict | None:
    """Steps, seconds in steps (without compilation and pauses) and a few points of the loss curve,
    from a stage's log.
    """
    if not path.exists():
        return None
    rows = map(json.loads, path.read_text().splitlines())
    lines = {row["step"]: row for row in rows}  # a resumed step counts once
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


def readme(options, origin: dict, figures: dict, log: dict, trained: bool) -> str:
    right, numbers = figures["counting"]
    rows = "\n".join(
        f"| {kind} | {figures['held_out'][kind]:.2f} | {a['accept_rate']:.0%} | "
        f"{a['tokens_per_round']:.2f} |"
        for kind, a in figures["acceptance"].items()
    )
    sources = "\n".join(
        f"| {kind} | {share:.0%}, {data.LATE_MIXTURE[kind]:.0%} | {origin[kind]} | "
        f"{LICENCES[kind]} |"
        for kind, share in data.MIXTURE.items()
    )
    samples = "\n\n".join(
        f"```\n{prompt}⏵{text}\n```"
        for kind, a in figures["acceptance"].items()
        for prompt, text in list(zip(measure.PROMPTS[kind], a["texts"], strict=True))[:2]
    )
    stages = "\n".join(
        f"* {name}: {s['steps']} steps, {s['seconds'] / 60:.0f} minutes; loss in nats by step: "
        f"{s['curve']}"
        for name, s in log.items()
        if s
    )
    return f"""# The embedded checkpoint

A small DeepSeek-V4 model with a DSpark drafter in the official layout, trained by this \
project from nothing. It exists so that
everything in this library can be run and tested on a laptop.
{"" if trained else chr(10) + "**The drafter of this export is not trained.**" + chr(10)}
## Training

```
{command(options)}
```

{options.rows} windows of {options.length} tokens a step, Muon and Adam, seed {options.seed}; in \
the last fifth of the steps
weights and activations are quantised as they are stored and run, straight through.

{stages}

| kind | share of windows at first, in the last third | text | licence |
|---|---|---|---|
{sources}

The text itself is not part of this project. `tokenizer.json`: byte-level BPE trained on the same \
text; {tokenizer.EOS} ends a
document.

## Measured

Greedy, {len(measure.PROMPTS["prose"])} prompts a kind, 96 new tokens each, the whole block \
drafted and verified every round.

| kind | held-out bits/byte | drafts accepted | tokens a round |
|---|---|---|---|
{rows}

Counting on from {len(measure.COUNTS)} runs of one- to three-digit numbers: {right} of {numbers} \
numbers right (a run counts up to
its first wrong number).

## Samples

What stands before ⏵ is the prompt.

{samples}
"""


def command(options) -> str:
    o = options
    return (
        f"python -m dspark_jax.train all --steps {o.steps} --drafter-steps {o.drafter_steps} "
        f"--rows {o.rows} --length {o.length} --muon-rate {o.muon_rate:g} --adam-rate "
        f"{o.adam_rate:g} --seed {o.seed}"
    )
