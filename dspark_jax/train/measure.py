"""What the finished checkpoint can do, through the library's own `load` and `generate`."""

import re

import dspark_jax as dspark

PROMPTS = {
    "prose": (
        "It was a fine morning, and",
        "She had not been in the house long before",
        '"My dear," said Mr. Bennet,',
        "Emma was very happy to see",
    ),
    "code": (
        "def add(a, b):",
        "def total(items):\n    result = 0",
        "class Point:\n    def __init__(self, x, y):",
        "def is_even(n):\n    return",
    ),
    "math": (
        "3 + 4 = 7\n5 + 2 = 7\n6 + 3 =",
        "7 x 1 = 7\n7 x 2 = 14\n7 x 3 =",
        "What is 8 - 3? 5.\nWhat is 9 - 4?",
        "12 + 1 = 13\n12 + 2 = 14\n12 + 3 =",
    ),
    "repeat": (
        "red green blue red green",
        "one two three one two three one",
        "1 2 3 4 5 6 7",
        "The cat sat on the mat. The cat sat on the mat. The",
    ),
}
COUNTS = (
    (1, 7),
    (5, 8),
    (17, 22),
    (34, 40),
    (95, 99),
    (126, 131),
    (196, 199),
    (345, 349),
    (597, 602),
    (888, 893),
)


def texts(model: dspark.Model, tokens: int = 96) -> dict[str, list[tuple[str, str]]]:
    """By kind of prompt, (prompt, what follows greedily). Plain: the drafter may be any."""
    out = {}
    for kind, prompts in PROMPTS.items():
        result = dspark.generate(model, list(prompts), tokens, "plain", stop_token_ids=[])
        out[kind] = list(zip(prompts, result.texts, strict=True))
    return out


def by_position(
    model: dspark.Model, prompts: list[list[int]], lengths: list[int], stop_token_ids=None
) -> dict:
    """Greedy decoding of up to `lengths` new tokens after each prompt, the whole block drafted
    always.

    -> prompts, tokens: how many. accepted: by position, the share of rounds in which this draft and
    all before it were accepted; accept_rate: of all drafts; tokens_per_round.
    """
    stats = dspark.generate(model, prompts, lengths, stop_token_ids=stop_token_ids).stats
    rounds = max(1, stats["rounds"])
    return {
        "prompts": len(prompts),
        "tokens": stats["tokens"],
        "accepted": [count / rounds for count in stats["accepted_by_position"]],
        "accept_rate": stats["accept_rate"] or 0.0,
        "tokens_per_round": stats["tokens_per_round"] or 1.0,
    }


def by_kind(model: dspark.Model, room: int) -> dict[str, dict]:
    """`by_position` of the prompts of each kind, 96 new tokens each, fewer where `room` tokens are
    all that a stream may have.
    """
    out = {}
    for kind, prompts in PROMPTS.items():
        ids = [model.tokenizer.encode(prompt).ids[: room // 2] for prompt in prompts]
        lengths = [min(96, room - len(each)) for each in ids]
        out[kind] = by_position(model, ids, lengths, stop_token_ids=[])
    return out


def counting(model: dspark.Model, tokens: int = 48) -> tuple[int, int]:
    """How many numbers that follow the runs of COUNTS are right, each run up to its first wrong
    one; and of how many.
    """
    right = total = 0
    for first, last in COUNTS:
        prompt = " ".join(map(str, range(first, last + 1)))
        text = dspark.generate(model, prompt, tokens, "plain", stop_token_ids=[]).texts[0]
        numbers = re.findall(r"\S+", text)[:-1]  # the last may be cut
        total += len(numbers)
        for expected, number in enumerate(numbers, last + 1):
            if number != str(expected):
                break
            right += 1
    return right, total
