"""Text that training never sees, and prompts that are chosen from it by rule."""

import itertools
import json
import os
import pathlib
import re
import shutil
import types

import numpy as np
import pytest

from dspark_jax.errors import CheckpointError
from dspark_jax.train import data, fetch_text, held_out, main_run, main_stage, synthetic


def chapter(number: int) -> str:
    return f"It was {number} in the morning, and the whole of the party had come to the hall. " * 9


@pytest.fixture(scope="module")
def novels():
    return [
        "TITLE\n\n" + "".join(f"Chapter {n}\n\n{chapter(n * m)}\n\n" for n in range(1, m))
        for m in (32, 40, 36)
    ]


def test_the_shortest_novel_is_held_out_and_chapters_are_documents(novels):
    train, kept = data._split("prose", novels)
    assert "".join(kept) == novels[0] and "".join(train) == novels[1] + novels[2]
    assert len(kept) == 31 and len(train) == 39 + 35
    assert kept[0].startswith("TITLE") and all(c.startswith("Chapter ") for c in kept[1:])


def test_other_documents_are_held_out_whole():
    documents = [f"document {n}" for n in range(100)]
    train, kept = data._split("math", documents)
    assert sorted(train + kept) == sorted(documents) and not set(train) & set(kept)
    assert len(kept) == 4


def test_prompts_of_prose_begin_long_paragraphs(novels):
    prompts = held_out.prose(data._chapters(novels[0]))
    assert len(prompts) == held_out.PROMPTS
    for number, prompt in zip(range(2, 32, 3), prompts):
        assert chapter(32 * number).startswith(prompt + " ") and 110 <= len(prompt) <= 125


FILE = """
import os

def short(a):
    return a

def long(a,
         b):
    \"\"\"What it does.\"\"\"
{body}

class C:
    def method(self):
        first = 1
{body2}
"""


def test_prompts_of_code_are_heads_of_long_functions():
    body = "\n".join(f"    a += {n}" for n in range(9))
    text = FILE.format(body=body, body2=re.sub("(?m)^", "    ", body))
    heads = held_out._heads(text)
    assert heads == {
        "long": 'def long(a,\n         b):\n    """What it does."""',
        "method": "def method(self):\n    first = 1",
    }
    files = [("a.py", text), ("b.py", "def f("), ("c.py", text)]
    assert held_out.code(files) == [{"file": name, "function": "long"} for name in ("a.py", "c.py")]


def test_generated_prompts_are_of_documents_that_training_has_not():
    math, repeat = held_out.math(), held_out.repeat()
    assert len(set(math)) == len(set(repeat)) == held_out.PROMPTS
    seen = {kind: set(synthetic.documents(kind, 0, 300_000)) for kind in ("math", "count", "cycle")}
    known = [prompt for prompt in math if any(d.startswith(prompt) for d in seen["math"])]
    assert all(re.match(r"\d+ [x*] 1 = ", prompt) for prompt in known)  # there are few of these
    for prompt in repeat[5:]:
        period = held_out._period(prompt)
        assert 2.3 < len(prompt) / period <= 2.5


def test_prompts_are_read_with_code_of_this_python(tmp_path, files, monkeypatch):
    monkeypatch.setattr(fetch_text, "code_files", lambda root=None: files)
    assert [text for _, text in files] == fetch_text.code()[0]
    chosen = held_out.choose(["A" + " word" * 100] * 31, files[::3])
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(chosen))
    prompts = held_out.load(path)
    assert {kind: len(of) for kind, of in prompts.items()} == dict.fromkeys(chosen, 10)
    texts = dict(files)
    for at, head in zip(chosen["code"], prompts["code"]):
        assert head.splitlines()[0].strip() in texts[at["file"]]


def test_the_prompts_of_the_benchmark_are_chosen_by_the_rule():
    """Those that can be had without fetching text."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "held_out_prompts.json"
    kept = json.loads(path.read_text())
    assert kept["math"] == held_out.math() and kept["repeat"] == held_out.repeat()
    assert {kind: len(prompts) for kind, prompts in kept.items()} == dict.fromkeys(kept, 10)


@pytest.fixture(scope="module")
def files():
    """Some of the standard library, read once."""
    return fetch_text.code_files()[::6]


@pytest.fixture(scope="module")
def text(tmp_path_factory, files):
    """A folder of text, of what is quickly made."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        chapters = "".join(f"Chapter {n}\n\n{chapter(n)}\n\n" for n in range(1, 32))
        patch.setattr(fetch_text, "code_files", lambda root=None: files)
        patch.setattr(fetch_text, "prose", lambda: ([chapters, chapters * 2], "made up"))
        patch.setattr(data, "GENERATED_BYTES", 40_000)
        main_run.text(folder, 0, types.SimpleNamespace(vocab_size=600))
    return folder


def test_text_is_written_whole(text):
    assert {*data.FILES, *(f"{kind}.jsonl" for kind in data.MIXTURE)} == set(os.listdir(text))
    main_run.text(text, 0, None)  # is there already


@pytest.mark.parametrize(
    "name, cut", [*itertools.product(data.FILES[:-1], (True, False)), (data.FILES[-1], True)]
)
def test_text_that_is_damaged_is_one_error(text, tmp_path, name, cut):
    shutil.copytree(text, tmp_path / "text")
    path = tmp_path / "text" / name
    if cut:
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    with pytest.raises(
        CheckpointError, match=f"{name}: missing or damaged .*remove .*text to have"
    ):
        main_run.text(tmp_path / "text", 0, None)


def test_no_generated_file_defines_a_name_twice():
    for text in synthetic.documents("functions", 3, 60_000):
        names = re.findall(r"(?m)^(?:def|class) (\w+)", text)
        assert len(names) == len(set(names))


def test_the_penalty_on_repeats_is_that_of_plain_loops():
    """Few token ids, so that what stood before comes round often."""
    rng, shape = np.random.default_rng(0), (3, 40)
    tokens = rng.integers(0, 3, (3, 41))
    logprobs = np.log(rng.dirichlet(np.ones(3), shape))
    n, expected = main_stage.REPEATED, np.zeros(3)
    for b, now, before in itertools.product(range(3), range(n - 1, 40), range(n - 1, 40)):
        same = (
            tokens[b, now - n + 1 : now + 1].tolist()
            == tokens[b, before - n + 1 : before + 1].tolist()
        )
        then = tokens[b, before + 1]
        if before < now and same and then != tokens[b, now + 1]:
            expected[b] -= np.log1p(-np.exp(logprobs[b, now, then])) / 40
    got = main_stage.repeat_penalty(logprobs.astype(np.float32), tokens)
    assert expected.min() > 0.05 and np.allclose(got, expected, rtol=1e-5)


def test_nothing_is_penalised_where_nothing_came_before():
    tokens = np.arange(41)[None] % 50
    logprobs = np.full((1, 40, 50), -np.log(50), np.float32)
    assert float(main_stage.repeat_penalty(logprobs, tokens)[0]) == 0
