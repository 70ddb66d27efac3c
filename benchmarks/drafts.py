"""How often the first draft is accepted where tokens are drawn, beside what theory says, on the
embedded checkpoint.

    python benchmarks/drafts.py [--rounds 2000]

The target's distribution p and the drafter's q are computed anew for every round, from the parts of
a step. With noise shared between both, a draft is accepted with the probability

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

No rule accepts more than 1 - TV of the two. For each kind of prompt and temperature: the share
accepted, the mean of that probability, how many standard errors lie between, and the mean of
1 - TV.
"""

from __future__ import annotations

import argparse

import numpy as np

import dspark_jax as dspark
from dspark_jax.commands.bench import PROMPTS

STREAMS, TEMPERATURES = 8, (0.7, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000, help="of each row (default 2000)")
    rounds = parser.parse_args().rounds
    model = dspark.load()
    print(f"{'T':>4} {'prompt':8}{'accepted':>10}{'theory':>9}{'errors':>8}{'1 - TV':>9}")
    for temperature in TEMPERATURES:
        for kind, prompt in PROMPTS.items():
            accepted, theory, most = measure(model, prompt, temperature, rounds)
            error = np.sqrt(np.sum(theory * (1 - theory))) / len(theory)
            away = (accepted.mean() - theory.mean()) / max(error, 1e-12)
            print(
                f"{temperature:4} {kind:8}{accepted.mean():10.3f}{theory.mean():9.3f}{away:8.2f}"
                f"{most.mean():9.3f}",
                flush=True,
            )


def measure(model, prompt: str, temperature: float, rounds: int):
    """Of so many rounds: whether the first draft was accepted, its probability, and 1 - TV."""
    ids = model.tokenizer.encode(prompt).ids
    length = min(model.limits.max_seq_len - len(ids), 6 * -(-rounds // STREAMS) + 8)
    out = dspark.generate(
        model,
        [ids] * STREAMS,
        max_new_tokens=length,
        temperature=temperature,
        streams=STREAMS,
        stop_token_ids=[],
    )
    # A stream as long as this has at least so many rounds, whatever is accepted.
    each = -(-rounds // STREAMS)
    rows = [
        row
        for tokens, records in zip(out.tokens, out.rounds)
        for row in follow(model, ids, tokens, records[:each], temperature)
    ]
    return tuple(np.array(column) for column in zip(*rows[:rounds]))


def follow(model, ids: list[int], tokens: list[int], records, temperature: float):
    """The rounds of a stream once more, by the parts of a step."""
    cache, at = dspark.prefill(model, ids)[2], 0
    for record in records:
        draft = dspark.draft(model, cache, [tokens[at]])
        count = record.accepted + 1
        logits, _, cache = dspark.extend(model, cache, [tokens[at : at + count]], [count])
        cache = dspark.commit(cache, [count])
        p, q = (softmax(x, temperature) for x in (logits[0, 0], draft.logits[0, 0]))
        yield record.accepted > 0, chance(p, q), np.minimum(p, q).sum()
        at += count


def softmax(logits, temperature: float) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    odds = np.exp(scaled - scaled.max())
    return odds / odds.sum()


def chance(p: np.ndarray, q: np.ndarray) -> float:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i); sorted by q / p, each maximum is one of the two
    from some place on.
    """
    p, q = np.maximum(p, 1e-300), np.maximum(q, 1e-300)
    order = np.argsort(q / p)
    p, q = p[order], q[order]
    up_to, beyond = np.cumsum(p), q.sum() - np.cumsum(q)
    return float(np.sum(1 / (up_to / p + beyond / q)))


if __name__ == "__main__":
    main()
