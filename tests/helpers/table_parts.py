"""The table of streams on the embedded checkpoint: 40 prompts, each greedy and drawn, 128 tokens
each, and what each gives alone in a plain decode.
"""

import numpy as np

import dspark_jax as dspark
from dspark_jax.train.measure import PROMPTS

from helpers.ask_parts import GATE, LEAST, OFF, Ask, among_strangers, answers, differing

# Around the ratios of 4 and 32, and chunks of 64.
LENGTHS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 34, 47, 48, 60, 63, 64, 65, 66, 95, 96, 97),
    *(99, 100, 120, 127, 128, 129, 130, 159, 160, 161, 190, 191, 192, 193, 250),
)
assert len(LENGTHS) == 40
TOKENS = 128
DRAWN = {"temperature": 0.8, "top_p": 0.95}


def text_ids(model) -> list[int]:
    """Some pages of what the checkpoint was trained on."""
    kinds = ["\n\n".join(kind) for kind in PROMPTS.values()]
    return model.tokenizer.encode("\n\n".join(kinds * 8)).ids


def all_asks(model) -> list[Ask]:
    ids, rng, made = text_ids(model), np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        start = int(rng.integers(len(ids) - length))
        prompt = ids[start : start + length]
        made += [Ask(prompt, TOKENS), Ask(prompt, TOKENS, **DRAWN, seed=number)]
    return made


def strangers(model) -> list[Ask]:
    """Shorter ones with other settings."""
    ids, made = text_ids(model), []
    for number, length in enumerate((2, 70, 12, 126, 6, 33)):
        made.append(Ask(ids[number:][:length], 3 + 4 * number, temperature=2.0, seed=number))
    made[3] = made[3]._replace(temperature=0.0)
    return made


def check_mode(model, wanted, mode: str) -> None:
    """The cells of a mode: 4 places in another order and among strangers; 8 places, but for
    sequential verification; 1 place, without a gate. The ones left out take four minutes.
    """
    asks, company, rounds = all_asks(model), strangers(model), []
    gates = [OFF] if mode == "plain" else [OFF, GATE, LEAST]
    for gate in gates:
        cells = {"4, last first": among_strangers(model, asks, company, mode, 4, gate)}
        if mode != "sequential":
            cells["8"] = answers(model, asks, mode, 8, gate)
        if gate is OFF:
            cells["1"] = answers(model, asks, mode, 1, gate)
        for name, got in cells.items():
            assert not differing(got, wanted), (mode, gate, name)
            assert all(len(answer.tokens) == TOKENS for answer in got)
        rounds = [[answer.rounds for answer in got] for got in cells.values()]
        assert all(each == rounds[0] for each in rounds)
        lengths = {record.verified for records in rounds[0] for record in records}
        assert gate is OFF or len(lengths) >= 3, lengths


def alone(model):
    """The plain decode of one stream after the other."""
    return answers(model, all_asks(model), "plain", 1)


def load(max_seq_len: int) -> dspark.Model:
    return dspark.load(max_seq_len=max_seq_len)
