"""`dspark replay FILE`: what the gate would have gained on recorded rounds (decode/replay.py)."""

from __future__ import annotations

import dataclasses

from dspark_jax.commands.output import print_json

# Flag -> GateConfig's default, here as well so that --help loads nothing of jax; a test compares
# them.
VERIFY_COSTS = {"verify_base_ms": 300, "verify_slope_ms": 109}


def add_parser(subparsers):
    """Adds the `replay` command to an argparse subparsers object; `args.run(args)` runs it and
    returns the exit code.
    """
    parser = subparsers.add_parser(
        "replay",
        help="what the gate would have gained on recorded rounds",
        description=(
            "Replays rounds recorded by `dspark generate --record FILE` (gate off) and prints "
            "tokens per second of plain decode, of always verifying the whole block, and of the "
            "gate. The gate's numbers are those of the DEEPSEEK_DSPARK_GATE_* variables; draft "
            "and plain costs are the medians of the file. So is the cost of a verify, whatever "
            "its length, where neither an option nor a variable gives it and the defaults are "
            "far from the recorded ones."
        ),
    )
    parser.add_argument("file", metavar="rounds.json", help="the recorded rounds")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    for flag, default in VERIFY_COSTS.items():
        text = f"in ms, instead of the variable's (default {default:g})"
        parser.add_argument("--" + flag.replace("_", "-"), type=float, metavar="MS", help=text)
    parser.set_defaults(run=run)
    return parser


def run(args) -> int:
    """Runs `dspark replay` and prints its result."""
    from dspark_jax.decode.gate import GateConfig
    from dspark_jax.decode.replay import replay

    given = {name: getattr(args, name) for name in VERIFY_COSTS if getattr(args, name) is not None}
    result = replay(
        args.file, dataclasses.replace(GateConfig.from_env(), **given) if given else None
    )
    if args.json:
        print_json(result)
    else:
        print(render(result))
    return 0


def render(result: dict) -> str:
    """The result of `replay` as text for a terminal."""
    from dspark_jax.decode.replay import OVERALL

    costs, names = result["costs"], [*result["rounds"], OVERALL]
    total, source = sum(result["rounds"].values()), result["source"] or "no source given"
    widths = [max(7, len(name)) for name in names]
    labels = {
        "plain": "plain",
        "always_k": "always-k",
        "published": "gated, published",
        "charged": "gated, charged",
    }

    def row(label, cells):
        return f"{label:<17}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths))

    lines = [
        f"{total} recorded rounds, draft block {result['block_size']}: {source}",
        f"draft {costs['draft_ms']:g} ms, plain {costs['plain_ms']:g} ms, "
        f"verify(n) = {costs['verify_base_ms']:g} + {costs['verify_slope_ms']:g} n ms",
        "",
        row("tokens/s", names),
        *(
            row(label, [f"{result[key][name]:.2f}" for name in names])
            for key, label in labels.items()
        ),
        row("rounds", [*result["rounds"].values(), total]),
        row("skipped by gate", _skipped(result)),
        "",
        "published: a round that the gate skips is charged plain_ms only, as the table published "
        "with the gate does",
        "charged:   it is charged draft_ms + plain_ms, since its draft was already paid for",
        "overall:   ms per token, averaged with the rounds as weights",
    ]
    return "\n".join(lines + _verify_note(result))


def _skipped(result):
    counts = [sum(n == 0 for n in chosen) for chosen in result["chosen"].values()]
    return [*counts, sum(counts)]


def _verify_note(result):
    """A line where the costs of a verify are the recording's, or another one than the config's is
    recorded.
    """
    from dspark_jax.decode.gate import GateConfig, verify_ms
    from dspark_jax.decode.replay import far_from

    recorded = result["recorded_verify_ms"]
    assumed = verify_ms(GateConfig(**result["costs"]), result["block_size"])
    if result["verify_costs_from"] == "recording":
        return [
            "",
            f"note: a verify is charged {recorded:g} ms whatever n is, the median of the "
            "recorded full verifies: the defaults are far "
            "from them; --verify-base-ms and --verify-slope-ms say otherwise",
        ]
    if not far_from(recorded, assumed):
        return []
    return [
        "",
        f"note: a full verify took {recorded:g} ms in the recording, the costs above say "
        f"{assumed:g} ms; "
        "set --verify-base-ms and --verify-slope-ms to what was measured",
    ]
