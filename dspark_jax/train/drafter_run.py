"""`dspark train drafter`: from a checkpoint and text to the checkpoint with another drafter.

    RUN/settings.json   what it was begun with
    RUN/text.jsonl      the text that the main model wrote (drafter_text.py)
    RUN/drafter/        the newest state (states.py)
    RUN/drafter.jsonl   a line a step
    RUN/checkpoint/     the checkpoint until it is measured
    OUT/                the checkpoint, its README and the log

Each part goes on where it stopped.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import numpy as np

import dspark_jax as dspark
from dspark_jax.checkpoints.replace import replace_tensors
from dspark_jax.decode import documents
from dspark_jax.errors import ConfigError, DsparkError
from dspark_jax.loading.load import expected_tensors
from dspark_jax.runtime.backend import on_cpu
from dspark_jax.runtime.files import write_text
from dspark_jax.runtime.settings import own_settings
from dspark_jax.train import (
    drafter_loss,
    drafter_options,
    drafter_readme,
    drafter_stage,
    drafter_text,
    frozen,
    loop,
    measure,
    output,
    prompts,
    settings,
    show,
    stage,
    states,
    weights,
)
from dspark_jax.train.drafter_options import Options

MEASURED = 32  # held-out sequences that are written again at the end, at most


@own_settings()
def run(options: Options) -> None:
    """Everything that can be refused is refused before any weight is read."""
    drafter_options.check(options)
    files = documents.read(options.data)
    checkpoint = frozen.open_checkpoint(options.checkpoint, options.from_nothing)
    block = checkpoint.config.dspark_block_size
    drafter_options.check_lengths(options, block)
    prompts.require_enough(files, checkpoint.tokenizer, block + 1)
    _require_room(options, checkpoint)
    asked = options.settings() | {
        "checkpoint (its fingerprint)": checkpoint.fingerprint(),
        "--data (name, size, crc32)": [file.identity for file in files],
    }
    trained = states.newest(options.run / "drafter") is not None
    free = () if trained else options.settings().keys() - set(drafter_options.OF_TEXT)
    if settings.keep(options.run, asked, free):
        show.say(f"going on from {options.run}")
    sequences = _text(options, checkpoint, files)
    parts, values, prefixes = _train(options, checkpoint, sequences)
    items = weights.official_items(parts.module(values), prefixes)
    unfinished = options.run / "checkpoint"
    shutil.rmtree(unfinished, ignore_errors=True)
    replace_tensors(checkpoint.checkpoint, unfinished, frozen.DRAFTER, items)
    _measure(options, checkpoint, sequences, unfinished)
    output.move(unfinished, options.out)
    show.say(f"wrote {options.out}; see {options.out / 'README.md'}")


def _require_room(options: Options, checkpoint: frozen.Frozen) -> None:
    """Raises ConfigError where the disk is too full for the states (parameters and two moments, in
    float32, the old one beside the new one) or for the checkpoint, which RUN has first.
    """
    specs = expected_tensors(checkpoint.config).items()
    numbers = sum(math.prod(s.shape) for name, s in specs if name.startswith(frozen.DRAFTER))
    stored = sum(file.path.stat().st_size for file in checkpoint.checkpoint.files.values())
    text = 8 * options.sequences * options.length
    for flag, path, needed in (
        ("--run", options.run, 2 * 3 * 4 * numbers + text + stored),
        ("--out", options.out, stored + 4 * numbers),
    ):
        existing = next(each for each in [path, *path.absolute().parents] if each.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise ConfigError(
                f"{flag} {path}: {free:,} bytes are free there, about {needed:,} are needed; make "
                "room, or name a folder on another disk"
            )


def _mesh(options: Options):
    """Of what writes and measures. On a CPU one device has all cores."""
    devices = 1 if on_cpu() else options.devices
    return dspark.make_mesh(devices, 1) if devices > 1 else None


def _text(options: Options, checkpoint: frozen.Frozen, files) -> drafter_text.Sequences:
    plan = drafter_text.Plan(
        options.sequences, options.length, options.greedy, options.streams, options.seed
    )
    path = options.run / "text.jsonl"
    done = len(drafter_text.written(path, plan.length))
    if done < plan.count:
        drawn = prompts.Prompts(
            files,
            checkpoint.tokenizer,
            options.seed,
            options.shortest_prompt,
            options.prompt_tokens,
        )
        numerics = frozen.numerics_of(options.dtype, _mesh(options))
        model, began, tokens = checkpoint.writer(plan.length, numerics), time.monotonic(), 0
        with show.bar("text", plan.count, done) as move, loop.naming_what_to_lower():

            def advance(count: int, new: int) -> None:
                nonlocal tokens
                tokens += new
                move(count, f"{tokens / (time.monotonic() - began):.0f} tokens/s")

            drafter_text.write(model, drawn, plan, path, advance)
    sequences = drafter_text.load(path, plan)
    written, greedy = int((sequences.ends - sequences.starts).sum()), sequences.greedy.mean()
    show.say(
        f"text: {plan.count} sequences, {written:,} tokens by the main model, {greedy:.0%} greedy"
    )
    if not (sequences.ends - sequences.starts > checkpoint.config.dspark_block_size).any():
        raise DsparkError(
            f"{path}: the main model ended every sequence within a draft block; give other --data"
        )
    return sequences


def _train(options: Options, checkpoint: frozen.Frozen, sequences: drafter_text.Sequences):
    """-> the drafter taken apart, its trained values, and the official prefixes by path."""
    numerics = frozen.numerics_of(options.dtype)
    source = checkpoint.drafter_source(options.from_nothing, options.seed)
    parts, twin, prefixes = drafter_stage.build(checkpoint.config, source, numerics.dtype)
    task = drafter_stage.task(
        checkpoint.config,
        parts,
        twin,
        checkpoint.main(numerics),
        sequences[: -options.held_out],
        steps=options.steps,
        rows=options.rows,
        anchors=options.anchors,
        rates=(options.muon_rate, options.adam_rate),
        quantise_from=round(options.quantise_from * options.steps),
        seed=options.seed,
        loss_weights=options.loss,
    )
    values = stage.fit(
        task,
        parts.values,
        options,
        lambda measures, _: line(measures),
        lambda _, averages: described(line(averages)),
    )
    return parts, values, prefixes


def line(measures: dict) -> dict:
    """What the log says of a step."""
    terms = {name: float(measures[name]) for name in ("loss", "cross_entropy", "distance")}
    return terms | {"confidence": float(measures["confidence"])} | drafter_loss.figures(measures)


def described(figures: dict) -> str:
    """The same for the terminal, by position."""

    def percent(values, sign=""):
        return " ".join("-" if np.isnan(v) else f"{100 * v:{sign}.0f}" for v in values)

    per_round = figures["tokens_per_round"]  # no number where no text is greedy
    per_round = "-" if np.isnan(per_round) else f"{per_round:.2f}"
    return (
        f"loss {figures['loss']:.3f}; accepted {percent(figures['accepted'])} %, "
        f"1 - TV {percent(figures['overlap'])} %, {per_round} tokens a round; "
        f"confidence off by {percent(figures['bias'], '+')} %"
    )


def _measure(
    options: Options,
    checkpoint: frozen.Frozen,
    sequences: drafter_text.Sequences,
    written: Path,
) -> None:
    """Measures what was written, by decoding with it, and adds the README and the log."""
    show.say("measuring")
    held = sequences[-options.held_out :]
    starts = [tokens[:start].tolist() for tokens, start in zip(held.tokens, held.starts)]
    lengths = (held.ends - held.starts).tolist()
    numerics = frozen.numerics_of(options.dtype, _mesh(options))

    def measured(path: Path) -> dict:
        model = dspark.load(
            path, numerics.requested_mesh, max_seq_len=options.length, dtype=options.dtype
        )
        held_out = measure.by_position(model, starts[:MEASURED], lengths[:MEASURED])
        return held_out | {"kinds": measure.by_kind(model, options.length)}

    new = measured(written)
    old = measured(checkpoint.path) if checkpoint.has_drafter else None
    log = options.run / "drafter.jsonl"
    shutil.copyfile(log, written / "drafter.jsonl")
    readme = checkpoint.path / "README.md"
    if readme.is_file():
        shutil.copyfile(readme, written / "README-main.md")
    text = drafter_readme.readme(options, checkpoint, sequences, loop.read_log(log), new, old)
    write_text(written / "README.md", text)
    for told in drafter_readme.summary(new, old):
        show.say(told)
