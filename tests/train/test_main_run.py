"""`dspark train main` from end to end on a model of two layers: text, main model, drafter."""

import json

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.commands.main import main
from dspark_jax.train import data, synthetic, tokenizer

from helpers.quick import compiled_quickly
from helpers.train_parts import CONFIG

pytestmark = pytest.mark.heavy
VOCAB = 400


def prepare(cache, seed, vocab_size, say):
    """In place of what fetches text: what can be generated, for all kinds."""
    kinds = list(synthetic.GENERATORS)
    texts = {
        k: synthetic.documents(kinds[i % len(kinds)], seed, 20_000)
        for i, k in enumerate(data.MIXTURE)
    }
    made = tokenizer.build([text for each in texts.values() for text in each], vocab_size)
    arrays = {}
    for kind, documents in texts.items():
        ids = [[*made.encode(text).ids, 0] for text in documents]
        starts = np.cumsum([0, *map(len, ids)])[:-1]
        for part in ("train", "held_out"):
            arrays[f"{part}.{kind}.tokens"] = np.concatenate(ids).astype(np.uint16)
            arrays[f"{part}.{kind}.starts"] = starts
    cache.mkdir(parents=True)
    np.savez(cache / "corpus.npz", token_bytes=np.ones(vocab_size, np.int32), **arrays)
    made.save(str(cache / "tokenizer.json"))
    (cache / "sources.json").write_text(json.dumps(dict.fromkeys(data.MIXTURE, "generated")))
    (cache / "prompts.json").write_text("{}")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("main")
    config = {**CONFIG.to_dict(), "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    asked = "--steps 1 --rows 2 --length 300 --devices 1 --drafter-steps 1".split()
    out = ["--config", str(folder / "config.json"), "--out", str(folder / "out")]
    return folder, ["train", "main", *asked, *out]


def test_one_command_makes_a_checkpoint_that_says_how(arguments, monkeypatch, capsys):
    folder, asked = arguments
    monkeypatch.setattr(data, "prepare", prepare)
    with compiled_quickly():
        assert main(asked) == 0, capsys.readouterr().err
        model = dspark.load(folder / "out", max_seq_len=32)
        assert len(dspark.generate(model, "1 2 3", max_new_tokens=4).tokens[0]) == 4
    of_drafter, of_main = (
        (folder / "out" / name).read_text() for name in ("README.md", "README-main.md")
    )
    command = " ".join(["dspark", *asked])
    assert command in of_drafter and "1 steps of 2 sequences" in of_drafter
    assert command in of_main and "1 steps of 2 windows of 300 tokens" in of_main
    assert "repeat a phrase of the window against the text are penalised (weight 0.5)" in of_main
    assert "drafter is not trained" in of_main and "embedded" not in of_main + of_drafter
    assert main(asked) == 2 and "something in it already" in capsys.readouterr().err


def test_other_settings_than_before(arguments, capsys):
    folder, asked = arguments
    other = [
        *asked,
        "--out",
        str(folder / "other"),
        "--run",
        str(folder / "out-run"),
        "--seed",
        "1",
    ]
    assert main(other) == 2
    assert "--seed: 0, now 1" in capsys.readouterr().err
