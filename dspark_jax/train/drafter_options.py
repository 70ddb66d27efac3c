"""What `dspark train drafter` was asked for, and what can be refused of it without a model."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from dspark_jax.checkpoints.paths import expanded
from dspark_jax.errors import ConfigError
from dspark_jax.train import settings
from dspark_jax.train.drafter_loss import Weights

# What the text depends on. All else may still be changed until the first state is saved.
OF_TEXT = ("--init", "--seed", "--sequences", "--length", "--prompt-tokens", "--greedy", "--dtype")


@dataclass(frozen=True)
class Options:
    """checkpoint: None is the embedded one. command: as it was typed, for the README. The others
    are said by the command's help, by name.
    """

    checkpoint: str | None
    data: tuple[str, ...]
    out: Path
    run: Path
    from_nothing: bool
    seed: int
    sequences: int
    length: int
    prompt_tokens: int
    greedy: float
    streams: int
    steps: int
    rows: int
    anchors: int
    loss: Weights
    muon_rate: float
    adam_rate: float
    quantise_from: float
    devices: int
    dtype: str | None
    save_every: float
    command: str

    @property
    def held_out(self) -> int:
        """How many sequences are not trained on."""
        return max(1, min(64, self.sequences // 16))

    @property
    def shortest_prompt(self) -> int:
        return max(1, self.prompt_tokens // 8)

    def settings(self) -> dict:
        """What the results depend on, beside the files, by the flags that say it."""
        return {
            "--init": "none" if self.from_nothing else "drafter",
            "--seed": self.seed,
            "--sequences": self.sequences,
            "--length": self.length,
            "--prompt-tokens": self.prompt_tokens,
            "--greedy": self.greedy,
            "--steps": self.steps,
            "--rows": self.rows,
            "--anchors": self.anchors,
            "--ce-weight": self.loss.cross_entropy,
            "--l1-weight": self.loss.distance,
            "--confidence-weight": self.loss.confidence,
            "--decay": self.loss.decay,
            "--muon-rate": self.muon_rate,
            "--adam-rate": self.adam_rate,
            "--quantise-from": self.quantise_from,
            "--devices": self.devices,
            "--dtype": self.dtype,
        }


def check(options: Options) -> None:
    """Raises ConfigError that names the flag."""
    least = {
        "--sequences": (options.sequences, 2),
        "--prompt-tokens": (options.prompt_tokens, 1),
        "--streams": (options.streams, 1),
        "--steps": (options.steps, 1),
        "--rows": (options.rows, 1),
        "--anchors": (options.anchors, 1),
        "--devices": (options.devices, 1),
        "--seed": (options.seed, 0),
    }
    for flag, (value, lowest) in least.items():
        if value < lowest:
            raise ConfigError(f"{flag}: {value} is less than {lowest}")
    for flag, share in (("--greedy", options.greedy), ("--quantise-from", options.quantise_from)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{flag}: {share:g} is not a share from 0 to 1")
    positive = {
        "--muon-rate": options.muon_rate,
        "--adam-rate": options.adam_rate,
        "--save-every": options.save_every,
        "--decay": 1.0 if options.loss.decay is None else options.loss.decay,
    }
    for flag, value in positive.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag}: {value:g} is not a positive number")
    weights = (options.loss.cross_entropy, options.loss.distance, options.loss.confidence)
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights[:2]):
        raise ConfigError(
            "--ce-weight, --l1-weight, --confidence-weight: none may be negative, and one of the "
            "first two must be positive, or the drafter learns nothing"
        )
    if options.rows % options.devices:
        raise ConfigError(f"--devices {options.devices} must divide --rows {options.rows}")
    require_empty(options.out, options.run, options.checkpoint)


def check_lengths(options: Options, block: int) -> None:
    """Raises ConfigError where no draft block of `block` tokens has room after a prompt."""
    needed = options.prompt_tokens + block + 1
    if options.length < needed:
        raise ConfigError(
            f"--length {options.length}: a prompt of --prompt-tokens {options.prompt_tokens}, an "
            f"anchor and a draft block of {block} are {needed} tokens"
        )


def require_empty(out: Path, run: Path, checkpoint: str | None = None) -> None:
    """Raises ConfigError where the results would lie among other things, or a run, which removes
    what it has done with, would have others' files in its folder.
    """
    for flag, path in (("--out", out), ("--run", run)):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{flag} {path}: a file, where a folder is wanted")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: there is something in it already; name another folder")
    if run.is_dir() and not (run / settings.NAME).exists():
        others = sorted(each.name for each in run.iterdir() if each.name != "text")
        if others:
            raise ConfigError(
                f"--run {run}: this is not the folder of a run, there is {others[0]} in it; name "
                "another folder"
            )
    folders = {"--out": out, "--run": run}
    if checkpoint is not None:
        folders["--checkpoint"] = expanded(checkpoint)
    for (flag, path), (other, around) in itertools.permutations(folders.items(), 2):
        if path.resolve().is_relative_to(around.resolve()):
            raise ConfigError(
                f"{flag} {path}: it must not be the folder of {other}, nor lie in it; name another"
            )
    for flag, path in (("--out", out), ("--run", run)):
        existing = next(each for each in [path, *path.absolute().parents] if each.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(f"{flag} {path}: nothing can be written below {existing}")
