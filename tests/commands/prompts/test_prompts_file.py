"""What a file of prompts says, and what is refused before a model is loaded."""

import json

import pytest

import dspark_jax as dspark
from dspark_jax.commands import prompts_file


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
    "same": ("--prompts p --output p --resume", "--output p: this is the file of --prompts"),
    "same through a link": ("--prompts p --output link --resume", "this is the file of --prompts"),
    "full": ("--prompts p --output full", "--output full: there is something in it already; go on"),
    "device": ("--prompts p --output /dev/null --resume", "/dev/null: only a file can be resumed"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_does_not_go_together_is_refused(refused, here, case):
    arguments, message = ARGUMENTS[case]
    (here / "p").write_text("a")
    (here / "full").write_text("x")
    (here / "link").symlink_to("p")
    assert message in refused(*arguments.split(), stdin="")
    assert (here / "full").read_text() == "x"
