"""`--resume`: what is there is kept, what is missing is computed, anything else is refused."""

import dataclasses
import json

import pytest

import dspark_jax as dspark
from dspark_jax.commands import asking
from dspark_jax.decode import run

from helpers.prompts_parts import USUAL, lasting, parsed, resumed


def test_resume_computes_what_is_missing(command, here, whole, runs):
    """Leading results, a torn line, gaps, another order: the same file, but for the times."""
    lines = whole.splitlines(keepends=True)
    for text, left in {
        "": 5,
        "".join(lines[:2]): 3,
        "".join(lines[:2]) + lines[2][:40]: 3,
        lines[0] + '{"li': 4,
        "".join(lines[:3])[:-1]: 2,  # the line break is missing
        lines[0] + lines[3]: 3,
        lines[4] + lines[1]: 3,
    }.items():
        runs.clear()
        status, after, err = resumed(command, here, text)
        assert status == 0 and runs == [(left, 2)], text
        assert lasting(after) == lasting(whole)
        kept = [line for line in lines if line.strip() in text]
        assert [line for line in after.splitlines(keepends=True) if line in lines] == kept
        said = f"{left} of 5 prompts ({5 - left} were there already)" if left < 5 else "5 prompts"
        assert err.startswith(f"{said}: ")


def test_resume_of_what_is_complete_loads_nothing(command, here, whole, runs):
    lines = whole.splitlines(keepends=True)
    for text in (whole, "".join(reversed(lines)), whole + '{"line": 4, "te'):
        status, after, err = resumed(command, here, text)
        assert (status, after, runs) == (0, whole, [])
        assert err == "all 5 results were there already\n"


def test_resume_where_there_is_no_file_begins_one(command, here, whole):
    status, out, _ = command("--prompts", "p.jsonl", "--output", "new", "--resume")
    assert (status, out) == (0, "") and lasting((here / "new").read_text()) == lasting(whole)


def test_resume_goes_on_with_more_prompts(command, here, whole, runs):
    with open(here / "p.jsonl", "a") as file:
        file.write('{"prompt": "more"}\n')
    status, after, _ = resumed(command, here, whole)
    assert status == 0 and runs == [(1, 2)] and after.startswith(whole)
    assert parsed(after)[5]["line"] == 6


def test_what_has_no_influence_on_tokens_may_differ(command, here, whole, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_DRAFT_MS", "7")
    others = ["--mode", "plain", "--streams", "4", "--max-seq-len", "99", "--gate"]
    assert resumed(command, here, whole, *others)[:2] == (0, whole)


def test_the_number_of_streams_is_that_of_all_lines(command, here, whole, monkeypatch):
    """On accelerators it chooses kernels, and with them bits."""

    def stop(self):
        seen.append((len(self.prompts), self.request.streams))
        raise dspark.DsparkError("seen")

    seen, asked_options = [], asking.asked_options
    monkeypatch.setattr(run.Run, "compile", stop)
    left_open = lambda *arguments: asked_options(*arguments) | {"streams": None}
    monkeypatch.setattr(asking, "asked_options", left_open)
    assert resumed(command, here, "".join(whole.splitlines(keepends=True)[:4]))[0] == 1
    assert seen == [(1, 8)]


REFUSED = {
    "other settings": (["--top-p", "0.9"], None, "r, line 1: computed for another prompt, id or"),
    "other seed": (["--seed", "8"], None, "r, line 1: computed for another prompt, id or"),
    "other stop": (["--stop", "4"], None, "r, line 1: computed for another prompt, id or"),
    "forbidden": (["--forbid", "4"], None, "r, line 1: computed for another prompt, id or"),
    "logprobs": (["--logprobs", "1"], None, "r, line 1: computed for another prompt, id or"),
    "scored": (["--prompt-logprobs"], None, "r, line 1: computed for another prompt, id or"),
    "other prompt": ([], {"prompt": "Bb"}, "r, line 4: computed for another prompt, id or"),
    "other id": ([], {"id": 1}, "id or settings than line 4 of the prompts has now"),
    "own seed": ([], {"seed": 7}, "id or settings than line 4 of the prompts has now"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_results_of_something_else_are_refused(refused, command, here, whole, case):
    arguments, change, message = REFUSED[case]
    if change is not None:
        rows = parsed((here / "p.jsonl").read_text())
        rows[3] |= change
        (here / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (here / "r").write_text(whole)
    asked = [*USUAL, "--prompts", "p.jsonl", "--output", "r", "--resume"]
    assert message in refused(*asked, *arguments)
    assert (here / "r").read_text() == whole


@pytest.mark.parametrize(
    "text, message",
    [
        ("notes\n", "r, line 1: not a result of --prompts; name another file"),
        ("notes", "r, line 1: not a result of --prompts; name another file"),
        ("{}\n", "r, line 1: not a result of --prompts; name another file"),
        (b"\xff\n", "r, line 1: not a result of --prompts; name another file"),
        ('{"line": 1}\n', "r, line 1: not a result of --prompts; name another file"),
        ('{"line": 2, "te\n', "r, line 1: not a result of --prompts; name another file"),
        (
            '{"line": 3, "finish_reason": "stop", "key": "", "model": ""}\n',
            "r, line 1: this is the result of prompt line 3, and there are 1; name another file",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(refused, here, text, message):
    (here / "p").write_text("a")
    before = text if isinstance(text, bytes) else text.encode()
    (here / "r").write_bytes(before)
    assert message in refused("--prompts", "p", "--output", "r", "--resume")
    assert (here / "r").read_bytes() == before


def test_results_of_another_model_are_refused(command, here, whole, model):
    lines = whole.splitlines(keepends=True)
    (here / "r").write_text(lines[0])
    asked = ["--prompts", "p.jsonl", "--output", "r", "--resume"]
    status, _, err = command(*asked, loaded=other_numerics(model))
    assert status == 2 and "r: the result of prompt line 1 was computed by another model" in err
    assert (here / "r").read_text() == lines[0]


def other_numerics(model):
    numerics = dataclasses.replace(model.numerics, activation_quant=False)
    return dataclasses.replace(model, numerics=numerics)
