"""The command line on a small checkpoint, in this process; one Ctrl-C in a process of its own."""

import io
import json
import os
import select
import signal
import subprocess
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands.main import main
from dspark_jax.decode import engine, run

from helpers.round_parts import with_nan_tokens
from helpers.small_model import PROMPT
from helpers.support import GOLDENS

STATS = {
    "tokens",
    "rounds",
    "proposed",
    "verified",
    "accepted",
    "accept_rate",
    "tokens_per_round",
    "seconds",
    "tokens_per_second",
    "accepted_by_position",
    "compile_seconds",
    "time_to_first_token",
    "time_per_token",
    "streams",
    "busy_share",
    "gate",
    "per_prompt",
}
TIMES = {
    "seconds",
    "tokens_per_second",
    "compile_seconds",
    "time_to_first_token",
    "time_per_token",
    "per_prompt",
}
KEYS = {"mode", "text", "tokens", "finish_reason", "stop_reason", "rounds", "stats"}


def test_text_to_standard_output_and_a_summary_to_standard_error(command, expected):
    status, out, err = command()
    assert status == 0 and out == expected.texts[0]
    rounds = len(expected.rounds[0])
    for part in (
        "20 tokens in",
        "tok/s (block, ended by length",
        f"{rounds} rounds",
        "drafts accepted per round",
    ):
        assert part in err
    assert "gate" not in err, "there is none"


def test_json(command, expected):
    status, out, err = command("--json")
    result = json.loads(out)
    assert status == 0 and err == "" and out.count("\n") == 1
    assert result.keys() == KEYS and result["stop_reason"] is None
    assert (result["mode"], result["text"], result["tokens"]) == (
        "block",
        expected.texts[0],
        expected.tokens[0],
    )
    assert result["finish_reason"] == "length" and result["stats"].keys() == STATS
    assert [
        dspark.RoundRecord(**r | {"confidence": tuple(r["confidence"])}) for r in result["rounds"]
    ] == expected.rounds[0]
    for key in STATS - TIMES:
        assert result["stats"][key] == expected.stats[key], key


@pytest.mark.heavy
def test_plain_gives_the_same(command, expected):
    status, out, err = command("--mode", "plain")
    assert (
        (status, out) == (0, expected.texts[0])
        and "(plain, ended by length" in err
        and "rounds" not in err
    )


def test_prompt_from_standard_input(command, expected):
    for prompt, end in (((), ""), ((), "\n"), (("-",), "\r\n"), (("-",), "")):
        assert command(prompt=prompt, stdin=PROMPT + end)[:2] == (0, expected.texts[0])


@pytest.mark.parametrize("separator", [" ", ",", ", "])
def test_prompt_as_ids(command, expected, separator):
    ids = separator.join(str(byte) for byte in PROMPT.encode())
    assert command("--prompt-ids", ids, prompt=())[:2] == (0, expected.texts[0])


def test_gate(command, expected, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_PLAIN_MS", "1")
    result = json.loads(command("--gate", "--json")[1])
    assert result["tokens"] == expected.tokens[0]
    assert [r["skipped"] for r in result["rounds"]] == ["gate"] * 19 and result["stats"]["gate"][
        "skipped"
    ] == 19
    assert (
        "19 skipped (0 by margin)" in command("--gate")[2]
        and "none verified" in command("--gate")[2]
    )


def test_stop_as_id_and_as_text(command, expected, directory):
    """Of single bytes, `z` is the text of id 122, and a blank is a token that the vocabulary spells
    otherwise.
    """
    tokens = expected.tokens[0]
    at = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    status, out, err = command("--stop", str(tokens[at]), "--json")
    result = json.loads(out)
    assert result["tokens"] == tokens[: at + 1] and result["finish_reason"] == "stop"
    letter = next(i for i in range(20) if chr(tokens[i]).isascii() and chr(tokens[i]).isalpha())
    for stops, end in (
        ((chr(tokens[letter]),), letter),
        ((" ",), tokens.index(32)),
        (("z", " "), tokens.index(32)),
    ):
        seen = json.loads(
            command(*(part for stop in stops for part in ("--stop", stop)), "--json")[1]
        )["tokens"]
        assert seen == tokens[: end + 1]


def test_stop_text(command, expected):
    """The text ends before the first of them, and is shown up to there."""
    text, tokens = expected.texts[0], expected.tokens[0]
    stops = ["\x00 nowhere", text[9:11], text[5:7]]
    ends = {stop: text.find(stop) + len(stop) for stop in stops[1:]}
    stop = min(ends, key=ends.get)
    given = [part for each in stops for part in ("--stop-text", each)]
    status, out, err = command(*given)
    assert (status, out) == (0, text[: text.index(stop)]) and "ended by stop" in err
    result = json.loads(command(*given, "--json")[1])
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", stop)
    assert result["text"] == out and tokens[: len(result["tokens"])] == result["tokens"]


@pytest.mark.heavy
def test_logprobs(command, model, expected):
    status, out, _ = command("--json", "--logprobs", "2", "--prompt-logprobs")
    result = json.loads(out)
    options = {"logprobs": 2, "prompt_logprobs": True}
    want = dspark.generate(model, PROMPT, 20, **options)
    assert status == 0 and result.keys() == KEYS | options.keys()
    assert result["tokens"] == [each["token"] for each in result["logprobs"]] == expected.tokens[0]
    for name in options:
        told = [
            {"token": token, "logprob": value, "best": [list(pair) for pair in best]}
            for token, value, best in getattr(want, name)[0]
        ]
        assert result[name] == told and len(told[1]["best"]) == 2


@pytest.mark.heavy
@pytest.mark.parametrize(
    "arguments, options",
    [
        ("", {}),
        ("--seed 5", {"seed": 5}),
        ("--top-k 3", {"top_k": 3}),
        ("--top-p 0.5", {"top_p": 0.5}),
        ("--min-p 0.4", {"min_p": 0.4}),
        ("--logit-bias 104=9 --logit-bias 11=-2.5", {"logit_bias": {104: 9.0, 11: -2.5}}),
        ("--forbid z --forbid 5", {"forbidden_tokens": [5, ord("z")]}),
    ],
)
def test_sampling(command, model, expected, arguments, options):
    """Each option reaches `generate`, and changes something there."""
    drawn = dspark.generate(model, PROMPT, 20, temperature=1.5)
    if "--forbid" in arguments:  # what would have come
        arguments += f" --forbid {drawn.tokens[0][3]}"
        options = {"forbidden_tokens": [*options["forbidden_tokens"], drawn.tokens[0][3]]}
    want = dspark.generate(model, PROMPT, 20, temperature=1.5, **options)
    status, out, _ = command("--temperature", "1.5", *arguments.split())
    assert (status, out) == (0, want.texts[0])
    assert out != (drawn if options else expected).texts[0]


WRONG_USE = {
    "too long": (
        ["--max-new-tokens", "124"],
        "max_new_tokens 124 together exceed max_seq_len 128",
    ),
    "stop id": (["--stop", "256"], "stop_token_ids: 256"),
    "stop text": (["--stop", "ab"], "--stop 'ab': neither a token id nor a single token"),
    "record no room": (
        ["--record", "x.json", "--max-seq-len", "13", "--max-new-tokens", "4"],
        "no room to measure two rounds",
    ),
    "forbid text": (["--forbid", "ab"], "--forbid 'ab': neither a token id nor a single token"),
    "forbid id": (["--forbid", "256"], "forbidden_tokens: 256 is not a token id (0 to 255)"),
    "bias id": (["--logit-bias", "256=1"], "logit_bias: 256 is not a token id (0 to 255)"),
    "stop dashes": (["--stop=--5"], "--stop '--5': neither a token id nor a single token"),
    "stop digits": (["--stop", "9" * 5000], "neither a token id nor a single token"),
}


@pytest.mark.parametrize("case", WRONG_USE)
def test_wrong_use_is_status_2(command, case):
    arguments, message = WRONG_USE[case]
    status, out, err = command(*arguments)
    assert (
        (status, out) == (2, "")
        and err.startswith("dspark generate: ")
        and message in err
        and err.count("\n") == 1
    )


def test_text_that_is_no_utf8_is_status_2(command, monkeypatch):
    """An argument's bytes come as surrogates; standard input fails or has them too, as the locale
    says.
    """
    for arguments in ({"prompt": ("a\udcff\udcfe",)}, {"prompt": (), "stdin": "a\udcff"}):
        status, out, err = command(**arguments)
        assert (status, out) == (
            2,
            "",
        ) and "prompt 0: character 1, '\\udcff', is no valid Unicode; give text in UTF-8" in err
    monkeypatch.setattr(
        io, "StringIO", lambda text: io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8")
    )
    status, out, err = command(prompt=(), stdin="")
    assert (status, out) == (
        2,
        "",
    ) and "standard input is not valid utf-8: invalid start byte at byte 2" in err


def test_no_prompt_is_status_2(command):
    assert command(prompt=())[0] == 2
    status, _, err = command(prompt=(), stdin="")
    assert status == 2 and "the prompt is empty" in err


def test_a_wrong_environment_variable_is_status_2(command, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_DRAFT_MS", "fast")
    status, _, err = command()
    assert status == 2 and "DEEPSEEK_DSPARK_GATE_DRAFT_MS" in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["generte"], ["generate", "x", "--mode", "blocks"], ["generate", "x", "--seed", "many"]],
)
def test_unknown_arguments_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and "usage: dspark" in capsys.readouterr().err


def broken_copy(directory, tmp_path, change):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(change(name, (directory / name).read_bytes()))
    return str(tmp_path)


def test_failures_are_status_1(command, directory, tmp_path, model, monkeypatch):
    status, out, err = command("--checkpoint", str(tmp_path / "absent"))
    assert (status, out) == (1, "") and "no such checkpoint directory" in err and "absent" in err
    cut = broken_copy(
        directory, tmp_path, lambda name, raw: raw[:-9] if name.startswith("model") else raw
    )
    status, _, err = command("--checkpoint", cut)
    assert status == 1 and "model.safetensors" in err and "truncated" in err
    damaged = with_nan_tokens(model, [ord("A")])
    monkeypatch.setattr(dspark, "load", lambda *args, **options: damaged)
    status, _, err = command()
    assert status == 1 and "logits at position 4 are not finite" in err and "Traceback" not in err


def test_a_serial_mtp_checkpoint_is_refused(command, directory, tmp_path):
    def change(name, raw):
        kept = (
            {key: value for key, value in json.loads(raw).items() if "dspark" not in key}
            if name == "config.json"
            else None
        )
        return raw if kept is None else json.dumps(kept).encode()

    status, out, err = command("--checkpoint", broken_copy(directory, tmp_path, change))
    assert status in (1, 2) and out == "" and "dspark" in err and err.count("dspark generate:") == 1


def test_ctrl_c_keeps_what_was_emitted(command, expected, monkeypatch):
    def interrupted(self, *arguments, **options):
        for count, emission in enumerate(stream(self, *arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield emission

    stream = engine.Engine.stream
    monkeypatch.setattr(engine.Engine, "stream", interrupted)
    status, out, err = command("--json")
    kept, result = 1 + sum(r.accepted + 1 for r in expected.rounds[0][:2]), json.loads(out)
    assert status == 130 and result["finish_reason"] == "interrupted"
    assert result["tokens"] == expected.tokens[0][:kept] and len(result["rounds"]) == 2
    status, out, err = command()
    assert (
        status == 130
        and out
        and expected.texts[0].startswith(out)
        and f"{kept} tokens in" in err
        and "interrupted" in err
    )


def test_ctrl_c_before_the_first_token_has_a_summary(command, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "__iter__", interrupted)
    status, out, err = command()
    assert (status, out) == (130, "")
    assert "0 tokens in 0.00 s, 0.0 tok/s (block, ended by interrupted" in err


QUICK = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def test_sigint(directory):
    """A real signal to a real process, once it has begun to write; it could go on for 60,000
    tokens.
    """
    arguments = [
        "generate",
        PROMPT,
        "--checkpoint",
        str(directory),
        "--max-seq-len",
        "65536",
        "--max-new-tokens",
        "60000",
        "--mode",
        "plain",
        "--stop",
        "255",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_jax.commands.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | QUICK,
        cwd=GOLDENS.parents[1],
    )
    try:
        assert select.select([process.stdout], [], [], 500)[0], "it writes something"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130 and out
    assert b"interrupted" in err and b"tok/s" in err and b"Traceback" not in err


# Help and inspect

UNITS = {
    "generate": [
        "tokens to emit (default 128)",
        "tokens of prompt and output",
        "default block",
        "DEEPSEEK_DSPARK_GATE_*",
        "(default 0.0)",
        "0: from all (default 0)",
        "at most 8)",
        "natural logarithms",
        "times in seconds",
        "ends in .jsonl",
    ],
    "bench": ["tokens to emit per run (default 128)", "default 5"],
    "inspect": ["bytes"],
    "replay": ["in ms", "default 300", "default 109"],
}


@pytest.mark.parametrize("name", UNITS)
def test_help_says_units_and_defaults(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and all(part in shown for part in UNITS[name])


def test_inspect(directory, capsys):
    assert main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "drafter" in shown and "fp4" in shown
    assert main(["inspect", str(directory / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
