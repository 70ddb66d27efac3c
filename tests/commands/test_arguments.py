"""What is wrong with the arguments is said before a model is loaded. Loads none."""

import io
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands.main import main

GATE = "DEEPSEEK_DSPARK_GATE"


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(*arguments) -> the one line that the command says of them."""

    def load(*arguments, **options):
        raise AssertionError("loaded")

    def run(*arguments):
        assert main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    monkeypatch.setattr(dspark, "load", load)
    return run


@pytest.fixture
def misused(capsys):
    """misused(*arguments) -> what argparse says of them."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run


GENERATE = {
    "nothing wanted": (["--max-new-tokens", "0"], "max_new_tokens: 0 is not a positive integer"),
    "too long": (["--max-new-tokens", "4096"], "1 token and --max-new-tokens 4096 together exceed"),
    "cache": (["--max-seq-len", "0"], "--max-seq-len: 0 is not a positive integer"),
    "temperature": (["--temperature", "-1"], "temperature: -1.0 is not a finite number"),
    "no temperature": (["--temperature", "nan"], "temperature: nan is not a finite number"),
    "top-k": (["--top-k", "-1"], "top_k: -1 is not an integer of 0 or more"),
    "top-p": (["--top-p", "0"], "top_p: 0.0 is not a number above 0 and at most 1"),
    "min-p": (["--min-p", "1"], "min_p: 1.0 is not a number of at least 0 and below 1"),
    "seed": (["--seed", "-1"], "seed: -1 is not an integer from 0 to 4294967295"),
    "streams": (["--streams", "0"], "streams: 0 is not a positive integer"),
    "logprobs": (["--json", "--logprobs", "-1"], "logprobs: -1 is not an integer from 0 to 128"),
    "logprobs in text": (["--logprobs", "1"], "--logprobs: numbers have no place in text; ask for"),
    "scores in text": (["--prompt-logprobs"], "--prompt-logprobs: numbers have no place in text"),
    "stop text": (["--stop-text", ""], "stop: an empty string stands everywhere"),
    "bias": (["--logit-bias", "5"], "--logit-bias '5': expected a token id and what is added"),
    "bias of text": (["--logit-bias", "x=1"], "--logit-bias 'x=1': expected a token id and"),
    "bias of words": (["--logit-bias", "5=x"], "--logit-bias '5=x': expected a token id and"),
    "bias twice": (
        ["--logit-bias", "5=1", "--logit-bias", "5=2"],
        "--logit-bias 5=2: token 5 was given one before",
    ),
    "endless bias": (["--logit-bias", "5=-inf"], "logit_bias: token 5: -inf is not a finite"),
    "forbid negative": (["--forbid", "-1"], "--forbid -1: token ids are 0 or more"),
    "stop negative": (["--stop", "-1"], "--stop -1: token ids are 0 or more"),
    "stop surrogate": (
        ["--stop", "\udcff"],
        "--stop '\\udcff': character 0, '\\udcff', is no valid Unicode; give text in UTF-8",
    ),
    "record plain": (
        ["--record", "x.json", "--mode", "plain"],
        "--record needs a speculative mode with the gate off",
    ),
    "record gate": (
        ["--record", "x.json", "--gate"],
        "--record needs a speculative mode with the gate off",
    ),
    "record nowhere": (["--record", "absent/x.json"], "absent is not a directory"),
    "record directory": (["--record", "/"], "--record /: this is a directory; name a file in it"),
    "record one token": (
        ["--record", "x.json", "--max-new-tokens", "1"],
        "--record with --max-new-tokens 1: the first token comes from",
    ),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_refuses_before_loading(refused, case):
    arguments, message = GENERATE[case]
    said = refused("generate", "hi", *arguments)
    assert said.startswith("dspark generate: ") and message in said


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"_DECAY": "2"}, "DEEPSEEK_DSPARK_GATE_DECAY: 2 must lie in 0..1"),
        ({"_DRAFT_MS": "0", "_VERIFY_BASE_MS": "0", "_VERIFY_SLOPE_MS": "0"}, "are all 0"),
        ({"_MIN_DRAFT": "3", "_VERIFY_SLOPE_MS": "3e38"}, "a block of 3 drafts would cost"),
    ],
)
def test_numbers_of_the_gate_are_refused_before_loading(
    refused, monkeypatch, command, numbers, message
):
    for name, value in numbers.items():
        monkeypatch.setenv(GATE + name, value)
    assert message in refused(*command)


@pytest.mark.parametrize("flag", ["--repeats", "--max-new-tokens", "--max-seq-len"])
@pytest.mark.parametrize("number", ["0", "-3"])
def test_bench_refuses_before_loading(refused, flag, number):
    assert refused("bench", flag, number) == (
        f"dspark bench: {flag}: {number} is not a positive integer\n"
    )


def test_bench_refuses_what_has_no_room(refused):
    assert "--max-seq-len 1024" in refused("bench", "--max-new-tokens", "1024")


@pytest.mark.parametrize(
    "ids, message",
    [
        ("", "the prompt is empty"),
        (" ", "the prompt is empty"),
        ("5 x 7", "'x' at index 1 is not a token id"),
        ("5,-6", "'-6' at index 1 is not a token id"),
        ("5,,6", "'' at index 1 is not a token id"),
        ("2.5", "'2.5' at index 0 is not a token id"),
        ("\u0665", "at index 0 is not a token id"),
        ("5 " * 4096, "4096 tokens and --max-new-tokens 128 together exceed --max-seq-len 4096"),
    ],
)
def test_ids_that_are_none(refused, ids, message):
    assert message in refused("generate", "--prompt-ids", ids)


def test_ids_and_text_exclude_each_other(misused):
    assert "not allowed with" in misused("generate", "hi", "--prompt-ids", "5")
    assert "not allowed with" in misused("generate", "--prompt-ids", "5", "hi")
    assert "not allowed with" in misused("generate", "--prompts", "file", "hi")
    assert "not allowed with" in misused("generate", "--prompts", "file", "--prompt-ids", "5")


def test_text_needs_a_tokenizer(refused, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    here = ["--checkpoint", str(tmp_path)]
    missing = f"{tmp_path} has no tokenizer.json; "
    assert missing + "give token ids with --prompt-ids" in refused("generate", "hi", *here)
    ids = ["--prompt-ids", "5", "--stop-text", "x"]
    assert missing + "use --stop with token ids" in refused("generate", *ids, *here)


def test_an_option_is_refused_before_standard_input_is_waited_for(refused, monkeypatch):
    class Endless(io.StringIO):
        def read(self, *_):
            raise AssertionError("read")

    monkeypatch.setattr(sys, "stdin", Endless())
    assert "temperature: -1.0 is" in refused("generate", "--temperature", "-1")


@pytest.mark.parametrize(
    "arguments, unknown, meant",
    [
        ("generate --max-tokens 5 hi", "--max-tokens", "--max-new-tokens"),
        ("generate --max-tokens 5 --prompt-ids 7", "--max-tokens", "--max-new-tokens"),
        ("generate hi --max-tokens=5", "--max-tokens", "--max-new-tokens"),
        ("generate hi --jsno --stops x", "--jsno --stops", "--json, --stop"),
        ("bench --repeat-count 5", "--repeat-count", "--repeats"),
        ("inspect --jsno", "--jsno", "--json"),
        ("convert a --verfy", "--verfy", "--verify"),
        ("plan --contxt 4", "--contxt", "--context"),
        ("replay --verify-bse-ms 4 x", "--verify-bse-ms", "--verify-base-ms"),
        ("--versoin", "--versoin", "--version"),
    ],
)
def test_the_flag_that_was_meant_is_named(misused, arguments, unknown, meant):
    said = misused(*arguments.split())
    assert said.endswith(f": error: unrecognized arguments: {unknown}; did you mean {meant}?\n")
    assert "usage: dspark" in said


def test_a_flag_like_no_other_has_no_hint(misused):
    assert misused("bench", "--xyzzy").endswith("error: unrecognized arguments: --xyzzy\n")
    assert misused("bench", "spare").endswith("error: unrecognized arguments: spare\n")


def test_what_is_no_flag_is_not_taken_for_one(refused):
    """After --, within a text, and the beginning of a flag, which stands for it."""
    for arguments in (["--", "--hi"], ["--hi there"], ["hi", "--max-n", "3"]):
        assert "temperature: -1.0 is" in refused("generate", "--temp", "-1", *arguments)
