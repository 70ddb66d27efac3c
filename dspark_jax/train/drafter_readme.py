"""What the README of a checkpoint says of the drafter that was trained for it: what was run, and
what was measured.
"""

from __future__ import annotations

import numpy as np

from dspark_jax._version import __version__


def summary(new: dict, old: dict | None) -> list[str]:
    """Lines for the terminal. new, old: see `measure.by_position`; old: of the drafter before."""
    lines = [f"held-out text: {_sentence(new)}"]
    if old is not None:
        lines.append(f"the drafter before: {_sentence(old)}")
        if old["accept_rate"]:
            share = new["accept_rate"] / old["accept_rate"]
            lines.append(f"acceptance: {share:.2f} of the drafter before")
    return lines


def _sentence(figures: dict) -> str:
    by_position = " ".join(f"{100 * share:.0f}" for share in figures["accepted"])
    return (
        f"drafts accepted {by_position} % by position, {100 * figures['accept_rate']:.0f} % in "
        f"all, {figures['tokens_per_round']:.2f} tokens a round"
    )


def readme(options, checkpoint, sequences, log: list[dict], new: dict, old: dict | None) -> str:
    """Markdown."""
    return f"""# A drafter for {checkpoint.path.name}

The main model, its config and its tokenizer are those of the checkpoint `{checkpoint.path.name}`, \
byte for byte. The draft module (tensors `mtp.*`) was trained by dspark-jax {__version__}, \
{_beginning(options)}.

## What was run

```
{options.command}
```

* Text: {_text(options, sequences)}
* Training: {_training(options, log)}
* Loss: {_loss(options.loss)}

`drafter.jsonl` has a line a step.{_more(checkpoint)}

## Measured

Decoding of {new["prompts"]} held-out beginnings, greedy, {new["tokens"]:,} tokens, every draft of \
every round verified. Accepted at a position: the share of all rounds in which this draft and all \
before it were.

{_table(new, old)}
"""


def _beginning(options) -> str:
    return "from nothing" if options.from_nothing else "from the drafter that was there"


def _text(options, sequences) -> str:
    names = ", ".join(f"`{name.rsplit('/', 1)[-1]}`" for name in options.data)
    written = int((sequences.ends - sequences.starts).sum())
    return (
        f"{len(sequences.tokens):,} sequences of at most {options.length} tokens; each begins with "
        f"{options.shortest_prompt} to {options.prompt_tokens} tokens of {names} and goes on as "
        f"the main model writes: {written:,} tokens, {sequences.greedy.mean():.0%} of the "
        f"sequences greedy, the others at temperature 1. {options.held_out} sequences were held "
        "out."
    )


def _training(options, log: list[dict]) -> str:
    seconds = [line["seconds"] for line in log]
    typical = np.median(seconds)
    minutes = sum(each for each in seconds if each < 20 * typical) / 60  # without pauses
    last = np.mean([line["loss"] for line in log[-20:]])
    return (
        f"{log[-1]['step']:,} steps of {options.rows} sequences with {options.anchors} drafts "
        f"each, {minutes:.0f} minutes; Muon ({options.muon_rate:g}) and Adam "
        f"({options.adam_rate:g}), seed {options.seed}, {options.devices} device"
        f"{'s' if options.devices > 1 else ''}; from {options.quantise_from:.0%} of the steps on "
        "weights and activations are quantised as they are stored and run, straight through. The "
        f"loss was {log[0]['loss']:.2f} at first and {last:.2f} at the end."
    )


def _loss(weights) -> str:
    decay = "the block size" if weights.decay is None else f"{weights.decay:g}"
    return (
        f"{weights.cross_entropy:g} x cross-entropy + {weights.distance:g} x |q - p|_1 + "
        f"{weights.confidence:g} x BCE(confidence, 1 - TV); draft k weighs exp(-(k - 1) / {decay})."
    )


def _more(checkpoint) -> str:
    there = (checkpoint.path / "README.md").is_file()
    return " `README-main.md` is the README of the checkpoint that it was made from." * there


def _table(new: dict, old: dict | None) -> str:
    positions = range(1, len(new["accepted"]) + 1)
    head = "| drafter | " + " | ".join(map(str, positions)) + " | all | tokens a round |"
    rows = [head, "|---" * (len(new["accepted"]) + 3) + "|", _row("this one", new)]
    if old is not None:
        rows.append(_row("the one before", old))
    kinds = f"The same after {len(new['kinds'])} kinds of prompt ({', '.join(new['kinds'])}):"
    rows += ["", kinds, "", head, rows[1]]
    for kind, figures in new["kinds"].items():
        rows.append(_row(kind, figures))
        if old is not None:
            rows.append(_row(f"{kind}, the one before", old["kinds"][kind]))
    return "\n".join(rows)


def _row(name: str, figures: dict) -> str:
    shares = [*figures["accepted"], figures["accept_rate"]]
    cells = " | ".join(f"{share:.0%}" for share in shares)
    return f"| {name} | {cells} | {figures['tokens_per_round']:.2f} |"
