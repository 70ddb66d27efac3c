"""`dspark generate --prompts`: many prompts from a file, and their results. On a small checkpoint
with a tokenizer of single bytes, in this process.
"""

import dataclasses
import io
import json
import signal
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands import asking, prompts_file, results_file
from dspark_jax.commands.main import main
from dspark_jax.decode import engine, run

from helpers.quick import compiled_quickly
from helpers.round_parts import byte_tokenizer, with_nan_tokens
from helpers.small_model import write_small_checkpoint
from helpers.support import MAX_SEQ_LEN

LINES = ["Ab", "one two three", "x" * 40, "\u00e9t\u00e9", "12 34"]
SIZES = ["--max-new-tokens", "12", "--max-seq-len", str(MAX_SEQ_LEN), "--streams", "2"]
USUAL = [*SIZES, "--temperature", "0.9", "--top-p", "0.95", "--seed", "7"]
AS_USUAL = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "streams": 2}
LENGTHS = [3, 12, 5, 20, 8]  # of JSON lines: the second and the fourth are the last to end


@pytest.fixture(scope="module", autouse=True)
def quick():
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_small_checkpoint(path, byte_tokenizer())
    return dspark.load(path, max_seq_len=MAX_SEQ_LEN)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(model, here, capsys, monkeypatch):
    """command(*arguments, stdin=None) -> status, standard output, standard error; two prompts at a
    time, 12 tokens of each, sampled.
    """

    def run(*arguments, stdin=None, loaded=model):
        monkeypatch.setattr(dspark, "load", lambda *_, **__: loaded)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        status = main(["generate", *USUAL, *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refused(here, monkeypatch, capsys):
    """refused(*arguments) -> the one line that is said of them, before a model is loaded."""

    def load(*_, **__):
        raise AssertionError("loaded")

    def run(*arguments, stdin=None):
        monkeypatch.setattr(dspark, "load", load)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        assert main(["generate", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("dspark generate: ")

    return run


def text_file(path):
    path.write_text("\n".join(LINES) + "\n", "utf-8")


def json_file(path, **settings):
    """The prompts with lengths of their own, and settings: name -> one value a line."""
    rows = [{"prompt": prompt, "max_new_tokens": length} for prompt, length in zip(LINES, LENGTHS)]
    for name, values in settings.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def parsed(text):
    return [json.loads(line) for line in text.splitlines()]


def lasting(text):
    """The results without their times."""
    return [{k: v for k, v in result.items() if k != "stats"} for result in parsed(text)]


# What a file says


@pytest.mark.parametrize(
    "name, text, prompts",
    [
        ("a.txt", "a b \n\tc", ["a b ", "\tc"]),
        ("a.txt", "a\r\nb\r\n\r\n \n", ["a", "b"]),
        ("a.txt", '{"prompt": "x"}', ['{"prompt": "x"}']),
        ("a", '\n{"prompt": "x"}'[1:], ["x"]),
        ("a", '  {"prompt": [5, 6]}\n\n', [[5, 6]]),
        ("a.dat", "a {\n{", ["a {", "{"]),
        ("a.jsonl", '{"prompt": "\\n"}', ["\n"]),
        ("a", "\ufeffa\u2028b\x0cc", ["a\u2028b\x0cc"]),
    ],
)
def test_what_is_a_prompt(here, name, text, prompts):
    (here / name).write_bytes(text.encode())
    assert [line.prompt for line in prompts_file.read(name)] == prompts


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL"])
def test_the_name_says_json(here, name):
    (here / name).write_text("a")
    with pytest.raises(dspark.ConfigError, match="line 1: not readable as JSON"):
        prompts_file.read(name)


def test_settings_of_a_line(here):
    bias = {"17": -2.5, "4": 1}
    row = {"prompt": "x", "top_k": None, "stop": ["a", "b"], "logit_bias": bias, "id": {"a": None}}
    (here / "a.jsonl").write_text(json.dumps(row))
    (line,) = prompts_file.read("a.jsonl")
    assert line.settings == {"stop": ["a", "b"], "logit_bias": {17: -2.5, 4: 1}}
    assert (line.number, line.about) == (1, {"id": {"a": None}})


BAD_LINES = {
    "blank": ("a\n \nb", "p.txt, line 2: this line is blank"),
    "no UTF-8": (b"a\nb\nc\xff\nd", "p.txt, line 3: not valid UTF-8"),
    "too long": ("a\n" * 3, "p.txt, line 1: a prompt of at least 1 token and max_new_tokens 128"),
    "empty": ("", "p.txt: there is no prompt in it"),
    "blanks": (" \n\n", "p.txt: there is no prompt in it"),
    "no JSON": ('{"prompt": "a"}\n{"prompt": "b"', "p.jsonl, line 2: not readable as JSON: "),
    "no object": ('{"prompt": "a"}\n["b"]', "p.jsonl, line 2: expected an object, such as"),
    "blank JSON": ('{"prompt": "a"}\n\n{"prompt": "b"}', "p.jsonl, line 2: this line is blank"),
    "no prompt": ('{"id": 1}', "p.jsonl, line 1: prompt: expected text or a list of token ids"),
    "number": ('{"prompt": 5}', "p.jsonl, line 1: prompt: expected text or a list of token ids"),
    "no ids": ('{"prompt": []}', "p.jsonl, line 1: the prompt is empty"),
    "negative": ('{"prompt": [5, -1]}', "p.jsonl, line 1: prompt: -1 at index 1 is not a token"),
    "truth": ('{"prompt": [true]}', "p.jsonl, line 1: prompt: True at index 0 is not a token"),
    "surrogate": ('{"prompt": "a\\ud800"}', "p.jsonl, line 1: character 1, '\\ud800', is no"),
    "many ids": (
        json.dumps({"prompt": [1] * 60}),
        "p.jsonl, line 1: a prompt of at least 60 tokens and max_new_tokens 5 together exceed "
        "--max-seq-len 64",
    ),
    "long": (
        '{"prompt": "a", "max_new_tokens": 64}',
        "p.jsonl, line 1: a prompt of at least 1 token and max_new_tokens 64 together exceed",
    ),
    "unknown": ('{"prompt": "a", "temprature": 1}', "'temprature' is unknown; did you mean temp"),
    "far": ('{"prompt": "a", "messages": []}', "'messages' is unknown; known are prompt, id and"),
    "twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "JSON: key given twice: 'seed'"),
    "NaN": ('{"prompt": "a", "top_p": NaN}', "JSON: NaN is no number of JSON"),
    "huge id": ('{"prompt": "a", "id": 1e999}', "line 1: id: too large a number"),
    "deep": ('{"prompt": ' + "[" * 100_000, "p.jsonl, line 1: not readable as JSON: "),
    "digits": ('{"prompt": ' + "9" * 5000 + "}", "p.jsonl, line 1: not readable as JSON: "),
    "temperature": (
        '{"prompt": "a"}\n{"prompt": "a", "temperature": -1}',
        "p.jsonl, line 2: temperature: -1 is not a finite number",
    ),
    "infinite": ('{"prompt": "a", "temperature": 1e999}', "line 1: temperature: inf is not"),
    "text": ('{"prompt": "a", "temperature": "1"}', "line 1: temperature: '1' is not"),
    "list": ('{"prompt": "a", "temperature": [1]}', "temperature: [1] is a list; a line has one"),
    "top_k": ('{"prompt": "a", "top_k": 1.5}', "line 1: top_k: 1.5 is not an integer"),
    "top_p": ('{"prompt": "a", "top_p": 0}', "line 1: top_p: 0 is not a number above 0"),
    "min_p": ('{"prompt": "a", "min_p": 1}', "line 1: min_p: 1 is not a number of at least 0"),
    "seed": ('{"prompt": "a", "seed": 4294967296}', "line 1: seed: 4294967296 is not"),
    "none wanted": ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: 0 is not a pos"),
    "stop": ('{"prompt": "a", "stop": 5}', "line 1: stop: expected a string or a list"),
    "empty stop": ('{"prompt": "a", "stop": [""]}', "line 1: stop: an empty string stands every"),
    "stops": ('{"prompt": "a", "stop": [["x"]]}', "stop: [['x']] is no list for one prompt"),
    "no stop": ('{"prompt": "a", "stop": [null]}', "stop: [None] is no list for one prompt"),
    "stop ids": ('{"prompt": "a", "stop_token_ids": ["x"]}', "stop_token_ids: 'x' is not a token"),
    "forbidden": ('{"prompt": "a", "forbidden_tokens": 5}', "forbidden_tokens: expected a list"),
    "bias": ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: 'x' is not a token id"),
    "biases": ('{"prompt": "a", "logit_bias": [{}]}', "logit_bias: [{}] is a list; a line has one"),
    "no bias": ('{"prompt": "a", "logit_bias": {"1": null}}', "token 1: None is not a finite"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_before_anything_is_loaded(refused, here, case):
    text, message = BAD_LINES[case]
    name = "p.txt" if message.startswith("p.txt") else "p.jsonl"
    (here / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    new = ["--max-new-tokens", "5"] if name == "p.jsonl" else []
    said = refused("--prompts", name, "--max-seq-len", "64", *new)
    assert said.startswith(name) and message in said


def test_text_needs_a_tokenizer(refused, here):
    (here / "config.json").write_text("{}")
    (here / "p.jsonl").write_text('{"prompt": [5]}\n{"prompt": "a"}')
    said = refused("--prompts", "p.jsonl", "--checkpoint", str(here))
    assert said.startswith(f"p.jsonl, line 2: the prompt is text, but {here} has no tokenizer.json")
    (here / "p.jsonl").write_text('{"prompt": [5], "stop": "x"}')
    said = refused("--prompts", "p.jsonl", "--checkpoint", str(here))
    assert said.startswith(f"p.jsonl, line 1: stop is text, but {here} has no tokenizer.json")


ARGUMENTS = {
    "absent": ("--prompts absent", "--prompts absent: cannot be read (No such file or directory)"),
    "directory": ("--prompts .", "--prompts .: cannot be read (Is a directory)"),
    "nothing": ("--prompts -", "standard input: there is no prompt in it"),
    "option first": ("--prompts absent --top-p 0", "top_p: 0.0 is not a number above 0"),
    "record": ("--prompts p --record x.json", "--record keeps the rounds of a single prompt"),
    "resume what": ("--prompts p --resume", "--resume goes with --output"),
    "output of one": ("hi --output x", "--output takes the results of --prompts"),
    "resume one": ("hi --resume", "--resume goes with --prompts and --output"),
    "nowhere": ("--prompts p --output absent/x", "absent is not a directory"),
    "into a folder": ("--prompts p --output .", "this is a directory; name a file in it"),
    "full": ("--prompts p --output full", "--output full: there is something in it already; go on"),
    "device": ("--prompts p --output /dev/null --resume", "/dev/null: only a file can be resumed"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_does_not_go_together_is_refused(refused, here, case):
    arguments, message = ARGUMENTS[case]
    (here / "p").write_text("a")
    (here / "full").write_text("x")
    assert message in refused(*arguments.split(), stdin="")
    assert (here / "full").read_text() == "x"


# What comes of it


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


# What is there already


@pytest.fixture
def whole(command, here):
    """What a run that nothing happened to writes, of JSON lines."""
    json_file(here / "p.jsonl")
    assert command("--prompts", "p.jsonl", "--output", "whole")[0] == 0
    return (here / "whole").read_text()


@pytest.fixture
def runs(monkeypatch):
    """How many prompts each run has had."""
    counts = []

    def counted(self):
        counts.append((len(self.prompts), self.request.streams))
        return complete(self)

    complete = run.Run.__iter__
    monkeypatch.setattr(run.Run, "__iter__", counted)
    return counts


def resumed(command, here, text, *arguments):
    """(status, text of the file after it, standard error) of a run that finds this text."""
    (here / "r").write_text(text)
    asked = ["--prompts", "p.jsonl", "--output", "r", "--resume", *arguments]
    status, out, err = command(*asked)
    assert out == ""
    return status, (here / "r").read_text(), err


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
    "other settings": (["--top-p", "0.9"], None, "r, line 1: computed for another prompt, or with"),
    "other seed": (["--seed", "8"], None, "r, line 1: computed for another prompt, or with"),
    "other stop": (["--stop", "4"], None, "r, line 1: computed for another prompt, or with"),
    "forbidden": (["--forbid", "4"], None, "r, line 1: computed for another prompt, or with"),
    "logprobs": (["--logprobs", "1"], None, "r, line 1: computed for another prompt, or with"),
    "scored": (["--prompt-logprobs"], None, "r, line 1: computed for another prompt, or with"),
    "other prompt": ([], {"prompt": "Bb"}, "r, line 4: computed for another prompt, or with"),
    "other id": ([], {"id": 1}, "with other settings, than line 4 of the prompts has now"),
    "own seed": ([], {"seed": 7}, "with other settings, than line 4 of the prompts has now"),
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
