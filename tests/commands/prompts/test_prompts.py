"""Prompts from a file give the results of one call, whatever ends the run."""

import io
import json
import signal
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands import prompts_file, results_file
from dspark_jax.decode import engine

from helpers.prompts_parts import (
    AS_USUAL,
    LENGTHS,
    LINES,
    json_file,
    lasting,
    parsed,
    resumed,
    text_file,
)
from helpers.round_parts import with_nan_tokens


def test_results_are_those_of_one_call(command, model, here):
    """Of text lines, with log-probabilities of all tokens: as `generate` numbers the prompts."""
    text_file(here / "p.txt")
    asked = ["--logprobs", "1", "--prompt-logprobs", "--stop", "255"]
    status, out, err = command("--prompts", "p.txt", *asked)
    options = {"logprobs": 1, "prompt_logprobs": True, "stop_token_ids": [255]}
    want = dspark.generate(model, LINES, 12, **AS_USUAL, **options)
    results = parsed(out)
    assert status == 0 and [result["line"] for result in results] == [1, 2, 3, 4, 5]
    assert [result["text"] for result in results] == want.texts
    assert [result["tokens"] for result in results] == want.tokens
    assert [result["finish_reason"] for result in results] == want.finish_reasons
    assert len({str(tokens) for tokens in want.tokens}) == 5, "no two have the same noise"
    for result, logprobs, of_prompt in zip(results, want.logprobs, want.prompt_logprobs):
        assert result["logprobs"] == as_json(logprobs)
        assert result["prompt_logprobs"] == as_json(of_prompt)
        assert len(result["logprobs"][0]["best"]) == 1
        assert result["prompt_logprobs"][0]["logprob"] is None
        assert result["stats"]["tokens"] == 12 and result["stats"]["seconds"] > 0
        assert "id" not in result
    assert err.startswith("5 prompts: 60 tokens in ") and "(block, 2 at a time, places busy" in err


def as_json(logprobs):
    return [
        {"token": token, "logprob": value, "best": [list(pair) for pair in best]}
        for token, value, best in logprobs
    ]


@pytest.mark.heavy
def test_settings_of_lines_are_those_of_generate(command, model, here):
    """Every one of them, with ids in place of text too."""
    cold = AS_USUAL | {"temperature": [0.0, 0.0, 0.0, 0.0, 0.1]}
    letters = dspark.generate(model, LINES, 12, **cold).tokens
    settings = {
        "max_new_tokens": LENGTHS,
        "temperature": [0.0, 0.5, 1.0, 0.0, 2.0],
        "top_k": [0, 3, 0, 0, 50],
        "top_p": [1.0, 0.9, 0.5, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.1, 0.0, 0.2],
        "seed": [1, 2, 3, 4, 5],
        "stop": [[], "q", ["x", "yz"], chr(letters[3][5]), []],
        "stop_token_ids": [[], [10, 11], [], [], [12]],
        "forbidden_tokens": [letters[0][:1], [], [], [], [1]],
        "logit_bias": [{}, {}, {5: 2.0}, {}, {7: -100.0}],
    }
    json_file(here / "p", **settings)
    lines = prompts_file.read("p")
    rows = [{"prompt": list(line.prompt.encode()), "id": -line.number} for line in lines]
    for row, *values in zip(rows, *settings.values()):
        row.update(zip(settings, values))
    (here / "p").write_text("\n".join(map(json.dumps, rows)))
    # What the command asks for counts in no line.
    status, out, _ = command("--prompts", "p", "--seed", "9", "--stop", "0", "--top-k", "1")
    lists = settings | {"stop": [[s] if isinstance(s, str) else s for s in settings["stop"]]}
    want = dspark.generate(model, LINES, streams=2, **lists)
    results = parsed(out)
    assert status == 0 and [result["id"] for result in results] == [-1, -2, -3, -4, -5]
    assert [result["tokens"] for result in results] == want.tokens
    assert [result["text"] for result in results] == want.texts
    assert [result["finish_reason"] for result in results] == want.finish_reasons
    assert [result["stop_reason"] for result in results] == want.stop_reasons
    assert want.stop_reasons[3] == chr(letters[3][5]), "one was ended by a text"
    assert want.tokens[0][0] != letters[0][0], "one was forbidden"


@pytest.mark.heavy
def test_a_seed_of_its_own_is_the_noise_of_a_prompt_alone(command, model, here):
    json_file(here / "p.jsonl", seed=[None, None, 3, None, None])
    results = parsed(command("--prompts", "p.jsonl")[1])
    want = dspark.generate(model, LINES, LENGTHS, **AS_USUAL).tokens
    own = dspark.generate(model, LINES[2], LENGTHS[2], **AS_USUAL | {"seed": 3}).tokens[0]
    assert own != want[2]
    assert [result["tokens"] for result in results] == [*want[:2], own, *want[3:]]


def test_prompts_from_standard_input(command, here):
    text_file(here / "p.txt")
    status, out, _ = command("--prompts", "p.txt")
    for text in ((here / "p.txt").read_text("utf-8"), "\ufeff" + "\n".join(LINES)):
        again = command("--prompts", "-", stdin=text)
        assert (status, lasting(out)) == (again[0], lasting(again[1])) == (0, lasting(out))


def test_ids_without_a_tokenizer_have_no_text(command, small_model, here):
    (here / "p").write_text('{"prompt": [5, 6]}\n{"prompt": [7]}')
    status, out, _ = command("--prompts", "p", loaded=small_model)
    assert status == 0 and [result["text"] for result in parsed(out)] == [None, None]
    assert len(parsed(out)[0]["tokens"]) == 12
    (here / "p").write_text('{"prompt": [5, 6]}\n{"prompt": "a"}')
    status, out, err = command("--prompts", "p", loaded=small_model)
    assert (status, out) == (2, "") and "p, line 2: prompt 0 is text, but this checkpoint" in err


def test_what_only_a_model_knows_is_refused_with_its_line(command, here):
    (here / "p").write_text('{"prompt": [5, 6]}\n{"prompt": [256]}')
    status, out, err = command("--prompts", "p")
    assert (status, out) == (2, "")
    assert err.startswith("dspark generate: p, line 2: token id 256 at index 0 is outside")
    (here / "p").write_text('{"prompt": [5]}\n{"prompt": [5], "stop_token_ids": [256]}')
    assert "p, line 2: stop_token_ids: 256 is not a token id" in command("--prompts", "p")[2]
    assert ": forbidden_tokens: 256 is not" in command("--prompts", "p", "--forbid", "256")[2]


@pytest.mark.parametrize("nan_tokens", [(), (ord("t"),)])
def test_each_result_is_written_when_it_and_all_before_it_have_ended(
    command, here, model, monkeypatch, nan_tokens
):
    """Seen from within the run: the file's lines at every emission, and who had ended by then; with
    an error, too.
    """
    json_file(here / "p.jsonl")
    file, seen, ended = here / "r.jsonl", [], []

    def watched(self, *arguments, **options):
        for emission in stream(self, *arguments, **options):
            yield emission  # which has been told when the next is asked for
            if emission.last:
                ended.append(emission.prompt)
            seen.append((len(file.read_text().splitlines()), {*ended, *self.failures}))

    stream = engine.Engine.stream
    monkeypatch.setattr(engine.Engine, "stream", watched)
    damaged = with_nan_tokens(model, nan_tokens)
    status, out, _ = command("--prompts", "p.jsonl", "--output", "r.jsonl", loaded=damaged)
    assert (status, out) == (1 if nan_tokens else 0, "")
    for written, done in seen:
        assert written == next((i for i in range(5) if i not in done), 5)
    if nan_tokens:
        assert {1, 3} <= seen[-1][1] and seen[-2][0] > 2, "what follows an error does not wait"
    else:
        assert ended != sorted(ended), "one waits for another"


def test_a_bar_leaves_the_results_alone(command, here, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text_file(here / "p.txt")
    want = command("--prompts", "p.txt")[1]
    terminal = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert lasting(command("--prompts", "p.txt")[1]) == lasting(want)
    assert "prompts" in terminal.getvalue() and "5/5" in terminal.getvalue()
    assert '"line"' not in terminal.getvalue()


# How it ends


def test_ctrl_c_keeps_what_is_finished(command, here, whole, monkeypatch):
    """The third has ended when the second is still at work: it is written too, and both are kept
    when the run is resumed.
    """

    def interrupted(self, *arguments, **options):
        ended = set()
        for emission in stream(self, *arguments, **options):
            yield emission
            ended |= {emission.prompt} if emission.last else set()
            if ended >= {0, 2}:
                raise KeyboardInterrupt

    stream = engine.Engine.stream
    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "stream", interrupted)
        for arguments in (["--output", "r"], []):
            status, out, err = command("--prompts", "p.jsonl", *arguments)
            text = (here / "r").read_text() if arguments else out
            numbers = [result["line"] for result in parsed(text)]
            assert status == 130 and numbers[:2] == [1, 3] and len(numbers) < 5
            assert f"interrupted: {len(numbers)} of 5 finished" in err
            assert ("--resume goes on" in err) == bool(arguments)
            want = [result for result in lasting(whole) if result["line"] in numbers]
            assert lasting(text) == want
    status, after, _ = resumed(command, here, (here / "r").read_text())
    assert status == 0 and lasting(after) == lasting(whole)


def test_ctrl_c_does_not_tear_a_line():
    """A signal amid a line waits for its end."""
    written = []

    def write(text):
        written.append(text[:1])
        signal.raise_signal(signal.SIGINT)
        written[-1] += text[1:]

    results = results_file.InOrder([1, 2, 3, 4], write)
    results.add(2, "two")
    with pytest.raises(KeyboardInterrupt):
        results.add(1, "one")
    assert written == ["one", "two"]
    results.add(4, "four")
    with pytest.raises(KeyboardInterrupt):
        results.end()
    assert written == ["one", "two", "four"]


def test_numbers_that_are_not_finite_end_their_line_only(command, here, whole, model):
    """The second prompt has a t, and others may come to one."""
    damaged = with_nan_tokens(model, [ord("t")])
    json_file(here / "p.jsonl")
    status, out, err = command("--prompts", "p.jsonl", loaded=damaged)
    results = lasting(out)
    assert status == 1 and [result["line"] for result in results] == [1, 2, 3, 4, 5]
    wrong = [result["line"] for result in results if result["finish_reason"] == "error"]
    assert 2 in wrong and len(wrong) < 5
    assert all(("error" in result) == (result["line"] in wrong) for result in results)
    assert results[1]["error"].startswith("the logits at position 12 are not finite")
    for result, want in zip(results, lasting(whole)):
        if result["line"] not in wrong:
            assert result["tokens"] == want["tokens"]
    assert f"dspark generate: p.jsonl, line {wrong[0]}: the logits at position" in err
    assert "Traceback" not in err
    (here / "p").write_text("t")
    status, out, err = command("--prompts", "p", loaded=damaged)
    assert status == 1 and lasting(out)[0]["finish_reason"] == "error", "nothing comes after it"


def test_an_error_is_computed_again(command, here, whole, runs):
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[1] |= {"finish_reason": "error", "tokens": []}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    status, after, _ = resumed(command, here, text)
    assert status == 0 and runs == [(1, 2)] and lasting(after) == lasting(whole)


def test_a_full_disk_names_the_file(command, here):
    text_file(here / "p.txt")
    (here / "r").symlink_to("/dev/full")
    status, _, err = command("--prompts", "p.txt", "--output", "r")
    assert status == 1 and "dspark generate: /dev/full: No space left on device" in err
