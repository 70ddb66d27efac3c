"""`dspark train drafter`: a drafter for a frozen main model, on text that the model writes."""

from __future__ import annotations

import argparse
from typing import Any

from dspark_jax.commands.train_options import add_shared, devices, run_folder

DESCRIPTION = (
    "Trains the draft module of a checkpoint; its main model stays as it is. The main model first "
    "goes on from beginnings of your text, greedily and at temperature 1. On what it wrote, the "
    "drafter learns to say what the main model would: 0.1 cross-entropy + 0.9 |p_draft - "
    "p_main|_1 + 1.0 BCE(confidence, 1 - TV), where TV is the total variation distance and draft k "
    "weighs exp(-(k - 1) / K). OUT becomes a whole checkpoint in the official layout: the main "
    "model byte for byte, the new drafter, the log, and a README that says what was run and "
    "measured."
)
EPILOG = (
    "The log has a line of JSON a step; by position: accepted (share of greedy drafts that were "
    "right, with all before them), overlap (1 - TV, the most that any rule would accept), bias (of "
    "the confidence against it), and tokens_per_round (accepted + 1). Shares are from 0 to 1."
)


def add_parsers(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drafter",
        help="a drafter for the main model of a checkpoint",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        metavar="DIR",
        help="checkpoint in the official layout (default: the embedded tiny one)",
    )
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help='text in UTF-8: a document each, or with .jsonl a document a line, {"text": ...} or '
        '{"prompt": ...}; documents count by their length',
    )
    add("--out", required=True, metavar="DIR", help="folder for the checkpoint, new or empty")
    add(
        "--init",
        choices=("drafter", "none"),
        default="drafter",
        help="what to begin with: the checkpoint's drafter, or nothing, that is random values "
        "(default %(default)s)",
    )
    add_shared(parser, "sequences", steps=1500)
    add_drafter_options(parser)
    parser.set_defaults(start=start)


def add_drafter_options(parser: argparse.ArgumentParser) -> None:
    """Those that only the training of a drafter has."""
    _add_text_options(parser.add_argument)
    _add_loss_options(parser.add_argument)


def _add_text_options(add) -> None:
    add(
        "--sequences",
        type=int,
        default=4096,
        metavar="N",
        help="that the main model writes; more than --steps times --rows are of no use (default "
        "%(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=64,
        metavar="N",
        help="of your text that a sequence begins with, at most; at least an eighth of it (default "
        "%(default)s)",
    )
    add(
        "--greedy",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the sequences written at temperature 0, from 0 to 1; the others are at "
        "temperature 1 (default %(default)s)",
    )
    add(
        "--streams",
        type=int,
        default=32,
        metavar="N",
        help="sequences written at a time on each device (default %(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="that both models compute in; the drafter's parameters are float32 while they are "
        "trained (default: float32 on a CPU, bfloat16 elsewhere)",
    )


def _add_loss_options(add) -> None:
    add(
        "--anchors",
        type=int,
        default=48,
        metavar="N",
        help="drafts that begin in each sequence, at places drawn anew each step (default "
        "%(default)s)",
    )
    for flag, default, of in (
        ("--ce-weight", 0.1, "the cross-entropy to the text, in nats"),
        ("--l1-weight", 0.9, "|p_draft - p_main|_1, from 0 to 2"),
        ("--confidence-weight", 1.0, "the confidence's binary cross-entropy to 1 - TV, in nats"),
    ):
        add(
            flag,
            type=float,
            default=default,
            metavar="X",
            help=f"of {of} (default %(default)s)",
        )
    add(
        "--decay",
        type=float,
        metavar="X",
        help="draft k weighs exp(-(k - 1) / X), X in drafts (default: the block size K, as "
        "published with the method; the code published with it has 4)",
    )
    add(
        "--quantise-from",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="of the steps after which weights (FP8, FP4) and activations are quantised as they "
        "are stored and run, straight through, from 0 to 1 (default %(default)s)",
    )


def start(args: argparse.Namespace, command: str) -> None:
    cut = devices(args)
    from dspark_jax.train import drafter_run

    drafter_run.run(options(args, cut, command))


def options(args: argparse.Namespace, devices: int, command: str):
    """The Options of drafter_options.py."""
    from dspark_jax.checkpoints.paths import expanded
    from dspark_jax.train.drafter_loss import Weights
    from dspark_jax.train.drafter_options import Options

    return Options(
        checkpoint=args.checkpoint,
        data=tuple(args.data),
        out=expanded(args.out),
        run=run_folder(args),
        from_nothing=args.init == "none",
        seed=args.seed,
        sequences=args.sequences,
        length=args.length,
        prompt_tokens=args.prompt_tokens,
        greedy=args.greedy,
        streams=args.streams,
        steps=args.steps,
        rows=args.rows,
        anchors=args.anchors,
        loss=Weights(args.ce_weight, args.l1_weight, args.confidence_weight, args.decay),
        muon_rate=args.muon_rate,
        adam_rate=args.adam_rate,
        quantise_from=args.quantise_from,
        devices=devices,
        dtype=args.dtype,
        save_every=args.save_every,
        command=command,
    )
