"""Text for a drafter: the user's files and what is refused of them, prompts, and the file that the
main model's own text is kept in.
"""

import json
import types

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode import documents
from dspark_jax.errors import ConfigError
from dspark_jax.train import drafter_text, prompts

from helpers.round_parts import byte_tokenizer

TOKENIZER = byte_tokenizer()
PLAN = drafter_text.Plan(count=9, length=24, greedy=0.5, streams=1, seed=0)


def made(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "", "a.txt: there is no text in it"),
        ("a.txt", " \n\n", "a.txt: there is no text in it"),
        ("a.bin", b"\x80\x02\xff", "a.bin: not text in UTF-8 .byte 0"),
        ("a.bin", b"ab\0cd", "a.bin: holds a NUL character"),
        ("a.jsonl", "", "a.jsonl: there is no text in it"),
        ("a.jsonl", '{"text": "x"}\n{"text"', "a.jsonl, line 2: not readable as JSON"),
        ("a.jsonl", '{"words": "x"}', "a.jsonl, line 1: expected an object with text"),
        ("a.jsonl", '["x"]', "a.jsonl, line 1: expected an object"),
        ("a.jsonl", '{"prompt": [5, 6]}', "a.jsonl, line 1: expected an object with text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        documents.read([made(tmp_path / name, content)])


def test_all_files_that_are_wrong_are_named(tmp_path):
    good = made(tmp_path / "good.txt", "hello")
    empty = made(tmp_path / "empty.txt", "")
    with pytest.raises(ConfigError, match=r"(?s)empty.txt: there is no.*none.txt: cannot be read"):
        documents.read([good, empty, str(tmp_path / "none.txt")])
    with pytest.raises(ConfigError, match="this is a directory"):
        documents.read([str(tmp_path)])


def test_less_than_a_block_is_refused(tmp_path):
    files = documents.read([made(tmp_path / "a.txt", "abcde")])
    prompts.require_enough(files, TOKENIZER, 5)
    with pytest.raises(
        ConfigError, match="5 tokens in all, and a draft block with its anchor is 6"
    ):
        prompts.require_enough(files, TOKENIZER, 6)


def test_prompts_are_beginnings_of_lines_and_depend_on_their_number_alone(tmp_path):
    lines = [f"line {n}: {'x' * (n % 7)}" for n in range(50)]
    given = [{"text": "\n".join(lines)}, {"prompt": "\nanother document"}]
    name = made(tmp_path / "a.jsonl", "".join(json.dumps(d) + "\n" for d in given))
    drawer = prompts.Prompts(documents.read([name]), TOKENIZER, 3, least=4, most=20)
    drawn = [drawer.tokens(number) for number in range(200)]
    assert drawn[7] == drawer.tokens(7)
    texts = [TOKENIZER.decode(ids) for ids in drawn]
    assert all(text.startswith(("line", "anot", "\nano")) for text in texts)
    assert all(len(ids) <= 20 for ids in drawn) and {len(ids) for ids in drawn} >= {4, 20}
    assert len({text[:8] for text in texts}) > 20


@pytest.fixture
def generated(monkeypatch):
    """Prompts come out as themselves and their seed; -> how many each call was given."""
    calls = []

    def generate(model, prompts, lengths, mode, temperature, seed, streams):
        calls.append(len(prompts))
        tokens = [[s % 256] * n for s, n in zip(seed, lengths)]
        return types.SimpleNamespace(tokens=tokens)

    monkeypatch.setattr(dspark, "generate", generate)
    return calls


def write(path, plan=PLAN, advance=lambda sequences, tokens: None):
    prompts = types.SimpleNamespace(tokens=lambda number: [number, number])
    drafter_text.write(None, prompts, plan, path, advance)
    return path.read_bytes()


def test_a_stopped_text_goes_on_to_the_same(tmp_path, generated):
    whole = write(tmp_path / "whole")
    assert generated == [4, 4, 1]

    def stop(sequences, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "parts", advance=stop)
    with open(tmp_path / "parts", "a") as file:
        file.write('{"number": 4, "pro')  # torn by a crash
    assert write(tmp_path / "parts") == whole
    assert generated == [4, 4, 1, 4, 4, 1]
    assert write(tmp_path / "parts") == whole and len(generated) == 6


def test_greedy_and_sampled_are_mixed_and_loaded(tmp_path, generated):
    write(tmp_path / "text")
    sequences = drafter_text.load(tmp_path / "text", PLAN)
    assert sequences.greedy.tolist() == [False, True] * 4 + [False]
    assert sequences.tokens.shape == (9, 24) and sequences.starts.tolist() == [2] * 9
    assert (sequences.ends == 24).all() and (sequences.tokens[:, 0] == np.arange(9)).all()
    assert len({tuple(row[2:]) for row in sequences.tokens}) == 9  # a seed each
    assert len(sequences[:-2].tokens) == 7


@pytest.mark.parametrize("greedy, count", [(0.0, 0), (0.25, 25), (1.0, 100)])
def test_the_share_of_greedy_sequences(greedy, count):
    plan = drafter_text.Plan(100, 24, greedy, 1, 0)
    assert sum(plan.is_greedy(number) for number in range(100)) == count


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"number": 1, "prompt": 1, "tokens": [1, 2]}\n', "line 1: not a sequence"),
        ("results\n", "line 1: not a sequence"),
        ('{"number": 0, "prompt": 1, "tokens": [1, 2, 3, 4]}\n', "more than 3 tokens"),
    ],
)
def test_another_file_in_its_place_is_refused(tmp_path, content, message):
    (tmp_path / "text").write_text(content)
    with pytest.raises(ConfigError, match=message):
        drafter_text.written(tmp_path / "text", 3)
