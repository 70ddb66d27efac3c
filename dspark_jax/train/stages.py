"""The stages of `python -m dspark_jax.train`, each a function of the parsed options."""

import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_jax.config import ModelConfig
from dspark_jax.train import data as texts
from dspark_jax.train import drafter_stage, loop, main_stage, quantise
from dspark_jax.train import export as exporter

SMOOTHING = 0.95  # of the figures shown while training

console = Console(stderr=True)


def data(options) -> None:
    config = ModelConfig.from_file(options.config)
    if (options.cache / "corpus.npz").exists():
        console.print(f"text: {options.cache} is there already")
        return
    texts.prepare(options.cache, options.seed, config.vocab_size, console.print)


def main(options) -> None:
    config, corpus = ModelConfig.from_file(options.config), texts.load(options.cache, options.seed)
    parts, twin, _ = main_stage.build(config, options.seed, corpus.frequencies(config.vocab_size))
    late_from = 0 if options.init else options.steps - options.steps // 3
    task = main_stage.task(
        config,
        parts,
        twin,
        corpus,
        options.steps,
        options.rows,
        options.length,
        _rates(options),
        late_from,
    )

    def figures(measures):
        return {
            name: main_stage.bits_per_byte(measures, kinds)
            for name, kinds in texts.REPORTED.items()
        }

    _fit(options, task, parts.values, ("nats", "bytes"), figures, "bits/byte")


def drafter(options) -> None:
    config, corpus = ModelConfig.from_file(options.config), texts.load(options.cache, options.seed)
    parts, twin, _ = drafter_stage.build(config, options.seed)
    main = trained_main(options, config, corpus)
    task = drafter_stage.task(
        config,
        parts,
        twin,
        main,
        corpus,
        options.drafter_steps,
        options.rows,
        options.length,
        _rates(options),
    )

    def figures(measures):
        return {
            name: drafter_stage.acceptance(measures, kinds)
            for name, kinds in texts.REPORTED.items()
        }

    _fit(options, task, parts.values, ("accepted", "proposed"), figures, "accepted")


def export(options) -> None:
    config, corpus = ModelConfig.from_file(options.config), texts.load(options.cache, options.seed)
    exporter.write(options, config, corpus, console.print)


def trained_main(options, config: ModelConfig, corpus: texts.Corpus):
    """The main model as it ships: weights as stored, activations quantised."""
    parts, twin, _ = main_stage.build(config, options.seed, corpus.frequencies(config.vocab_size))
    values = loop.load_params(options.run / "main.safetensors", parts.values)
    return parts.module(quantise.parameters(values, parts.storages), twin)


def _rates(options) -> tuple[float, float]:
    return options.muon_rate, options.adam_rate


def _fit(
    options,
    task: loop.Task,
    params: loop.Params,
    sums: tuple[str, ...],
    figures: Callable,
    unit: str,
) -> None:
    """Trains with a progress bar and a log; `sums` are the measures that `figures` is made of,
    smoothed over steps.
    """
    params = loop.load_params(options.init, params) if options.init else params
    path = options.run / f"{task.name}.safetensors"
    log = loop.Log(options.run / f"{task.name}.jsonl")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    smooth, last = {}, time.monotonic()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(task.name, total=task.steps, shown="compiling")

        def report(step, measures):
            nonlocal last
            for name in sums:
                smooth[name] = smooth.get(name, 0.0) * SMOOTHING + measures[name] * (1 - SMOOTHING)
            seconds, last = time.monotonic() - last, time.monotonic()
            shown = figures(smooth)
            finite = {k: v for k, v in shown.items() if np.isfinite(v)}
            log.write(
                step=step,
                loss=measures["tokens_loss"],
                seconds=seconds,
                **finite,
                **{k: measures[k] for k in ("index", "repeats", "confidence") if k in measures},
            )
            text = " ".join(f"{name} {value:.2f}" for name, value in shown.items())
            rate = options.rows * options.length / seconds
            shown = f"loss {measures['tokens_loss']:.3f} | {unit} {text} | {rate:.0f} tokens/s"
            progress.update(bar, completed=step, shown=shown)

        loop.fit(task, params, path, report, options.save_every)
