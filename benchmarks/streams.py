"""Many streams, sampling, streaming and prefixes on the embedded checkpoint, as ratios within one
run, medians over repetitions that take turns.

    python benchmarks/streams.py [--repeats 5] [--only NAME ...]

together   8 prompts at a time / 8 one after another, tokens per second of equal lengths; plain and
           block
busy       32 prompts on 8 places, 20 to 120 tokens each, evenly: share of the places' rounds that
           did work
sampled    T 0.8 / greedy, plain, one stream, the same number of tokens
stream     stream() / generate(), one stream, tokens per second; plain and block
prefix     64 continuations, of 32 tokens each, of a prefix of 1,000 tokens: tokens per second with
           `prefix` / without
steps      milliseconds of a step in the loop at 1, 2, 4, 8 and 16 streams, plain and block, greedy
           and sampled
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import dspark_jax as dspark
from dspark_jax.decode.request import make_request
from dspark_jax.decode.run import Run

PROMPTS = (
    "The king said that",
    "def add(a, b):",
    "3+4=7\n",
    "tick tock tick tock",
    "Once upon a time",
    "import os\n",
    "12+30=42\n",
    "one two three four",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    model = dspark.load()
    results = {}
    for name in args.only or MEASUREMENTS:
        results[name] = MEASUREMENTS[name](model, args.repeats)
        if not args.json:
            print(f"{name:10}{json.dumps(results[name])}", flush=True)
    if args.json:
        print(json.dumps(results))


def speed(model, prompts, **options) -> float:
    """Tokens per second, prefill included, compilation not."""
    out = dspark.generate(model, prompts, stop_token_ids=[], **options)
    return out.stats["tokens_per_second"]


def ratio(new: Callable[[], float], old: Callable[[], float], repeats: int) -> dict:
    """Median of new / old, each pair measured one after the other; once before, to compile."""
    new(), old()
    pairs = [(new(), old()) for _ in range(repeats)]
    return {
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "new": round(statistics.median(a for a, _ in pairs), 1),
        "old": round(statistics.median(b for _, b in pairs), 1),
    }


def together(model, repeats: int) -> dict:
    def run(mode, streams):
        return speed(model, PROMPTS, max_new_tokens=128, mode=mode, streams=streams)

    return {
        mode: ratio(lambda m=mode: run(m, 8), lambda m=mode: run(m, 1), repeats)
        for mode in ("plain", "block")
    }


def busy(model, repeats: int) -> dict:
    lengths = [20 + round(100 * i / 31) for i in range(32)]
    order = lengths  # rising: the worst order, were prompts run as they come
    shares = {}
    for mode in ("plain", "block"):
        out = dspark.generate(
            model,
            [PROMPTS[i % len(PROMPTS)] for i in range(32)],
            max_new_tokens=order,
            mode=mode,
            streams=8,
            stop_token_ids=[],
        )
        shares[mode] = round(out.stats["busy_share"], 3)
    return shares


def sampled(model, repeats: int) -> dict:
    def run(temperature, **options):
        return speed(
            model,
            PROMPTS[0],
            max_new_tokens=256,
            mode="plain",
            temperature=temperature,
            **options,
        )

    return {
        "no filter": ratio(lambda: run(0.8), lambda: run(0.0), repeats),
        "top-p 0.95": ratio(lambda: run(0.8, top_p=0.95), lambda: run(0.0), repeats),
    }


def stream(model, repeats: int) -> dict:
    def streamed(mode):
        options = {"max_new_tokens": 256, "mode": mode, "stop_token_ids": []}
        events = dspark.stream(model, PROMPTS[1], **options)
        started = time.perf_counter()
        tokens = sum(len(event.tokens) for event in events)
        return tokens / (time.perf_counter() - started)

    def whole(mode):
        return speed(model, PROMPTS[1], max_new_tokens=256, mode=mode)

    return {
        mode: ratio(lambda m=mode: streamed(m), lambda m=mode: whole(m), repeats)
        for mode in ("plain", "block")
    }


def prefix(model, repeats: int) -> dict:
    ids = model.tokenizer.encode("def add(a, b):\n    return a + b\n" * 200).ids[:1000]
    session = dspark.Session(model).feed(ids)
    ends = [model.tokenizer.encode(f"# {i}\n").ids for i in range(64)]
    options = {"max_new_tokens": 32, "temperature": 0.8}

    def continued():
        return speed(model, ends, prefix=session, **options)

    def anew():
        return speed(model, [ids + end for end in ends], **options)

    return ratio(continued, anew, repeats)


def steps(model, repeats: int) -> dict:
    """Milliseconds of a round, by the difference of two lengths of run."""
    return {
        f"{mode}, {'T 0.8' if temperature else 'greedy'}": {
            streams: round(_step(model, mode, temperature, streams, repeats), 3)
            for streams in (1, 2, 4, 8, 16)
        }
        for mode in ("plain", "block")
        for temperature in (0.0, 0.8)
    }


def _step(model, mode: str, temperature: float, streams: int, repeats: int) -> float:
    def timed(tokens):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(streams)]
        request = make_request(
            model,
            prompts,
            max_new_tokens=tokens,
            mode=mode,
            temperature=temperature,
            streams=streams,
            stop_token_ids=[],
        )
        run = Run(model, request)
        run.complete()
        return 1e3 * run.output().stats["seconds"], run.engine.slot_rounds / run.engine.width

    timed(8)
    slopes = []
    for _ in range(repeats):
        (short, few), (long, many) = timed(40), timed(200)
        slopes.append((long - short) / (many - few))
    return statistics.median(slopes)


MEASUREMENTS = {
    "together": together,
    "busy": busy,
    "sampled": sampled,
    "stream": stream,
    "prefix": prefix,
    "steps": steps,
}

if __name__ == "__main__":
    main()
