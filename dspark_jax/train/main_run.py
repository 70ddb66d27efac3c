"""`dspark train main`: from nothing to a small checkpoint, text and tokenizer included.

    TEXT/               the text, its tokens and its tokenizer (data.py, corpus_files.py)
    RUN/settings.json   what it was begun with
    RUN/main/           the newest state (states.py)
    RUN/main.jsonl      a line a step
    RUN/checkpoint/     the main model with a drafter of random values
    RUN/drafter-run/    the drafter's training (drafter_run.py)
    OUT/                the checkpoint, its README and the log

Each part goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np

from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError, DsparkError
from dspark_jax.runtime.settings import own_settings
from dspark_jax.train import (
    corpus_files,
    data,
    drafter_options,
    drafter_run,
    export,
    fetch_text,
    loop,
    main_stage,
    output,
    settings,
    show,
    stage,
    states,
    tokenizer,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """command: as it was typed, for the README. drafter: how one is trained afterwards, None for
    not at all; its checkpoint, data and run are put in here. The others are said by the command's
    help, by name.
    """

    text: Path
    run: Path
    out: Path
    config: Path
    init: Path | None
    seed: int
    steps: int
    rows: int
    length: int
    muon_rate: float
    adam_rate: float
    devices: int
    save_every: float
    command: str
    drafter: drafter_options.Options | None

    def settings(self) -> dict:
        names = ("seed", "steps", "rows", "length", "muon_rate", "adam_rate", "devices")
        asked = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        return asked | {"--init": None if self.init is None else str(self.init)}


def check(options: Options) -> None:
    """Raises ConfigError that names the flag."""
    for flag, value in (
        ("--steps", options.steps),
        ("--rows", options.rows),
        ("--length", options.length),
        ("--devices", options.devices),
    ):
        if value < 1:
            raise ConfigError(f"{flag}: {value} is less than 1")
    for flag, rate in (("--muon-rate", options.muon_rate), ("--adam-rate", options.adam_rate)):
        if not 0 < rate < float("inf"):
            raise ConfigError(f"{flag}: {rate:g} is not a positive number")
    if options.rows % options.devices:
        raise ConfigError(f"--devices {options.devices} must divide --rows {options.rows}")
    drafter_options.require_empty(options.out, options.run)
    if options.init is not None and states.newest(options.init) is None:
        raise ConfigError(f"--init {options.init}: there is no state in it")


@own_settings()
def run(options: Options) -> None:
    check(options)
    config = ModelConfig.from_file(options.config)
    if options.drafter is not None:
        drafter_options.check(options.drafter)
        drafter_options.check_lengths(options.drafter, config.dspark_block_size)
    files = text(options.text, options.seed, config)
    made = zlib.crc32((options.text / "corpus.npz").read_bytes())
    asked = options.settings() | {
        "--config": config.to_dict(),
        "--text (crc32 of its tokens)": made,
    }
    if settings.keep(options.run, asked):
        show.say(f"going on from {options.run}")
    corpus = data.load(options.text, options.seed)
    parts, twin, prefixes = main_stage.build(
        config, options.seed, corpus.frequencies(config.vocab_size)
    )
    values = _train(options, config, parts, twin, corpus)
    target = options.run / "checkpoint"
    if not (target / "README.md").exists():
        export.write(options, target, config, corpus, (parts, twin, prefixes), values)
    if options.drafter is None:
        output.move(target, options.out)
        show.say(f"wrote {options.out}; see {options.out / 'README.md'}")
    else:
        drafter_run.run(
            dataclasses.replace(
                options.drafter,
                checkpoint=str(target),
                data=tuple(map(str, files)),
                run=options.run / "drafter-run",
            )
        )


def text(cache: Path, seed: int, config: ModelConfig) -> list[Path]:
    """Fetches and writes the text, where it is not there yet; -> a file a kind."""
    if (cache / "corpus.npz").exists():
        show.say(f"text: {cache} is there already")
    else:
        try:
            data.prepare(cache, seed, config.vocab_size, show.say)
        except (fetch_text.SourceError, ValueError, OSError) as error:
            raise DsparkError(f"the text cannot be made: {error}") from error
    _require_whole(cache)
    return corpus_files.write(cache)


def _require_whole(cache: Path) -> None:
    """Raises CheckpointError that names a file of the text that is missing or cannot be read."""
    readers = {
        "tokenizer.json": tokenizer.load,
        "sources.json": lambda path: json.loads(path.read_text()),
        "prompts.json": lambda path: json.loads(path.read_text()),
        "corpus.npz": lambda path: data.load(path.parent, seed=0),
    }
    for name in data.FILES:
        try:
            readers[name](cache / name)
        except Exception as error:  # the tokenizers library raises nothing more precise
            raise CheckpointError(
                f"{cache / name}: missing or damaged ({error}); remove {cache} to have the text "
                "made again"
            ) from error


def _train(options: Options, config: ModelConfig, parts, twin, corpus: data.Corpus) -> loop.Params:
    values = (
        parts.values if options.init is None else states.load_params(options.init, parts.values)
    )
    task = main_stage.task(
        config,
        parts,
        twin,
        corpus,
        options.steps,
        options.rows,
        options.length,
        (options.muon_rate, options.adam_rate),
        0 if options.init else options.steps - options.steps // 3,
    )
    return stage.fit(task, values, options, figures, described)


def figures(measures: dict, averages: dict) -> dict:
    """What the log says of a step: nats a token, the other terms of the loss, and bits a byte by
    kind over the last steps, since a step has few windows of a kind.
    """
    terms = {"loss": measures["tokens_loss"], **{k: measures[k] for k in ("index", "repeats")}}
    return {name: float(value) for name, value in terms.items()} | {
        name: main_stage.bits_per_byte(averages, kinds) for name, kinds in data.REPORTED.items()
    }


def described(measures: dict, averages: dict) -> str:
    told = figures(measures, averages)
    bits = ", ".join(f"{k} {told[k]:.2f}" for k in data.REPORTED if np.isfinite(told[k]))
    return f"loss {told['loss']:.3f}; bits a byte: {bits}"
