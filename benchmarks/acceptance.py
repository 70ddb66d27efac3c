"""How many drafts are accepted on text that is held out of training: ten prompts a kind, chosen by
rule (dspark_jax/train/held_out.py; `dspark train text` writes them as prompts.json), the whole
block drafted every round.

The default prompts are held out of the text of `dspark train text`. The embedded checkpoint is
older: of its training text they were a part (prose, code) or of one kind with it. Code is read from
the standard library of the Python that runs; a function that it does not have is missing.

    python benchmarks/acceptance.py [--checkpoint DIR] [--prompts FILE] [--tokens 200] [--json]

A greedy run loops where fewer than half of the 4-grams of its last 100 tokens are distinct. Such a
run flatters a drafter: it is replaced by one at temperature 1 with a fixed seed, and counted. Of
repetitions (kind "repeat") that is not asked, coming round is what they are for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import dspark_jax as dspark
from dspark_jax.train import held_out

PROMPTS = Path(__file__).with_name("held_out_prompts.json")
SEED = 0
GRAM, LAST, FEWEST = 4, 100, 0.5


def distinct(tokens: list[int]) -> float:
    """The share of distinct 4-grams."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(set(grams)) / max(1, len(grams))


def loops(tokens: list[int]) -> bool:
    return distinct(tokens[-LAST:]) < FEWEST


def run(model, prompts: list[str], tokens: int, temperature: float):
    return dspark.generate(
        model,
        prompts,
        max_new_tokens=tokens,
        temperature=temperature,
        seed=SEED,
        stop_token_ids=[],
    )


def greedy(model, kind: str, prompts: list[str], tokens: int) -> dict:
    """Runs that loop are drawn instead."""
    out = run(model, prompts, tokens, 0.0)
    looping = [kind != "repeat" and loops(t) for t in out.tokens]
    counts = out.stats["per_prompt"]
    if any(looping):
        # All of them, so that a prompt's noise is its own.
        drawn = run(model, prompts, tokens, 1.0).stats["per_prompt"]
        counts = [d if loop else g for d, g, loop in zip(drawn, counts, looping)]
    return {
        **summary(counts),
        "loops": sum(looping),
        "distinct": statistics.mean(distinct(t) for t in out.tokens),
    }


def summary(counts: list[dict]) -> dict:
    """Accepted a round, and by position the share accepted of the rounds that came so far."""
    rounds = sum(c["rounds"] for c in counts)
    by_position = [sum(column) for column in zip(*(c["accepted_by_position"] for c in counts))]
    reached = [rounds, *by_position[:-1]]
    return {
        "prompts": len(counts),
        "accepted": sum(c["accepted"] for c in counts) / rounds,
        "given": [a / r if r else None for a, r in zip(by_position, reached)],
    }


def measure(model, prompts: dict[str, list[str]], tokens: int) -> dict:
    return {
        kind: {
            "greedy": greedy(model, kind, texts, tokens),
            "drawn": summary(run(model, texts, tokens, 1.0).stats["per_prompt"]),
        }
        for kind, texts in prompts.items()
    }


def show(results: dict) -> None:
    print(
        f"{'kind':8}{'prompts':>8}{'T':>4}{'accepted':>10}{'  by position, given those before':34}"
        "loops  distinct"
    )
    for kind, both in results.items():
        for name, r in both.items():
            given = " ".join("   -" if g is None else f"{g:.2f}" for g in r["given"])
            more = f"{r['loops']:5}{r['distinct']:10.2f}" if "loops" in r else ""
            print(
                f"{kind:8}{r['prompts']:8}{0 if name == 'greedy' else 1:4}{r['accepted']:10.2f}  "
                f"{given:32}{more}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="default: the embedded one")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=PROMPTS,
        metavar="FILE",
        help="default: held_out_prompts.json, beside this file",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="new tokens a prompt (default 200)"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args()
    prompts = held_out.load(options.prompts)
    model = dspark.load(options.checkpoint, max_seq_len=512)
    results = measure(model, prompts, options.tokens)
    print(json.dumps(results, indent=1)) if options.json else show(results)


if __name__ == "__main__":
    main()
