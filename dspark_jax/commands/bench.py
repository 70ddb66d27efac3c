"""`dspark bench`: plain, sequential and block decoding of four kinds of prompt, measured in turn in
one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable

from dspark_jax.commands.arguments import require_positive, require_room
from dspark_jax.commands.generate import asked_gate
from dspark_jax.commands.output import print_json, progress_bar, status
from dspark_jax.decode.modes import MODES

ONE_ROW = "plain, 1 row"
PROMPTS = {
    "prose": "It was a fine morning in the country, and she had",
    "math": "3 + 4 = 7\n5 + 2 = 7\n6 + 3 = ",
    "repeat": "red green blue red green blue red green blue",
    "code": "def add(a, b):\n    ",
}


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="tokens per second of the three modes",
        description=(
            "Runs four kinds of prompt (prose, math, repeat, code) in each mode and prints "
            "tokens per second, acceptance and the ratio to the fastest plain decoding there is. "
            "Modes take turns within each repetition, so that a busy machine slows all of them."
        ),
    )
    add = parser.add_argument
    add("--checkpoint", metavar="DIR", help="checkpoint directory (default: the embedded tiny one)")
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to emit per run (default %(default)s)",
    )
    add(
        "--max-seq-len",
        type=int,
        default=1024,
        metavar="N",
        help="most tokens of prompt and output together (default %(default)s)",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="repetitions; the median counts (default %(default)s)",
    )
    add(
        "--gate",
        action="store_true",
        help="with the gate, as DEEPSEEK_DSPARK_GATE=1 asks for too; numbers from the "
        "DEEPSEEK_DSPARK_GATE_* variables",
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    require_positive("--repeats", args.repeats)
    require_room(args)
    with status("loading ..."):
        import dspark_jax as dspark
        from dspark_jax.decode.request import check_options

        gate = asked_gate(args)
        check_options(max_new_tokens=args.max_new_tokens, gate=gate)
        model = dspark.load(args.checkpoint, max_seq_len=args.max_seq_len)
    ways = len(MODES) + 1  # with that of one row
    text = f"runs (each of the first {ways} compiles)"
    with progress_bar(text, len(PROMPTS) * args.repeats * ways) as advance:
        results = measure(model, args.max_new_tokens, args.repeats, gate, advance)
    if args.json:
        print_json(results)
    else:
        print(_table(results))
    return 0 if all(row["same_tokens"] for row in results.values()) else 1


def measure(
    model,
    max_new_tokens: int,
    repeats: int,
    gate,
    advance: Callable[[], None] = lambda: None,
) -> dict:
    """For each kind of prompt: tok/s by mode (median), speed-up over the fastest plain decode
    (median of the ratios within a repetition), acceptance, and whether all modes gave the same
    tokens.

    The fastest plain decode carries one row a step. Our own carries as many as give the bits of a
    verify (see runtime/backend.py); on a CPU that is two, and the single row may differ in the last
    bits, so its tokens are not compared.

    advance: called after every run.
    """
    return {
        kind: _measure_prompt(model, prompt, max_new_tokens, repeats, gate, advance)
        for kind, prompt in PROMPTS.items()
    }


def _measure_prompt(model, prompt: str, max_new_tokens: int, repeats: int, gate, advance) -> dict:
    import dspark_jax as dspark

    single = dataclasses.replace(model, limits=dataclasses.replace(model.limits, decode_rows=1))
    variants = {mode: (model, mode) for mode in MODES} | {ONE_ROW: (single, "plain")}
    runs = {name: [] for name in variants}
    for _ in range(repeats):
        for name, (variant, mode) in variants.items():
            runs[name].append(
                dspark.generate(variant, prompt, max_new_tokens, mode, gate, stop_token_ids=[])
            )
            advance()
    speeds = {name: [out.stats["tokens_per_second"] for out in outs] for name, outs in runs.items()}
    fastest = [max(pair) for pair in zip(speeds["plain"], speeds[ONE_ROW])]
    stats = runs["block"][0].stats
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "over_fastest_plain": {
            mode: statistics.median(a / b for a, b in zip(speeds[mode], fastest)) for mode in MODES
        },
        "accept_rate": stats["accept_rate"],
        "tokens_per_round": stats["tokens_per_round"],
        "same_tokens": all(
            out.tokens == runs["plain"][0].tokens for mode in MODES for out in runs[mode]
        ),
    }


def _table(results: dict) -> str:
    head = (
        f"{'prompt':8}{'plain, 1 row':>14}{'plain':>9}{'sequential':>12}{'block':>9}  tok/s "
        f"{'block/fastest plain':>20}{'accepted':>10}{'tok/round':>11}  same tokens"
    )
    return "\n".join([head, *(_row(kind, row) for kind, row in results.items())])


def _row(kind: str, row: dict) -> str:
    speed, ratio = row["tokens_per_second"], row["over_fastest_plain"]["block"]
    rate = "-" if row["accept_rate"] is None else f"{100 * row['accept_rate']:.0f}%"
    rounds = "-" if row["tokens_per_round"] is None else f"{row['tokens_per_round']:.2f}"
    speeds = (
        f"{speed[ONE_ROW]:14.1f}{speed['plain']:9.1f}{speed['sequential']:12.1f}"
        f"{speed['block']:9.1f}"
    )
    same = "yes" if row["same_tokens"] else "NO"
    return f"{kind:8}{speeds}{'':8}{ratio:20.2f}{rate:>10}{rounds:>11}  {same}"
