"""Rounds kept by `--record`, what `replay` makes of them, and what is timed for them."""

import json

import pytest

import dspark_jax as dspark
from dspark_jax.commands import bench, costs
from dspark_jax.commands.main import main
from dspark_jax.decode import steps
from dspark_jax.decode.replay import replay

from helpers.round_parts import BLOCK, with_nan_drafter
from helpers.small_model import PROMPT
from helpers.support import MAX_SEQ_LEN


def medians(monkeypatch, *values):
    """The timed calls are made once, and take so many ms."""
    left = iter(values)
    monkeypatch.setattr(costs, "_median_ms", lambda call, repeats: call() is None or next(left))


@pytest.mark.heavy
def test_record_and_replay(command, expected, tmp_path, capsys, monkeypatch):
    """A draft of 5 ms, a plain step of 3 ms and a round of 11 ms: 6 ms of it verified."""
    file = tmp_path / "rounds.json"
    medians(monkeypatch, 5.0, 3.0, 11.0)
    status, out, err = command("--record", str(file))
    assert (status, out) == (0, expected.texts[0]) and "tok/s" in err
    recorded = json.loads(file.read_text())
    rounds = recorded["prompts"]["prompt"]
    assert [(r["accept"], r["k"]) for r in rounds] == [
        (r.accepted, BLOCK) for r in expected.rounds[0]
    ]
    assert [r["conf"] for r in rounds] == [
        pytest.approx(r.confidence, abs=1e-6) for r in expected.rounds[0]
    ]
    assert all((r["draft_ms"], r["plain_ms"], r["verify_ms"]) == (5, 3, 6) for r in rounds)
    assert main(["replay", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(json.dumps(replay(str(file)))) and result["rounds"] == {
        "prompt": len(rounds)
    }
    assert result["plain"]["prompt"] == pytest.approx(1000 / rounds[0]["plain_ms"])
    assert main(["replay", str(file)]) == 0 and "always-k" in capsys.readouterr().out
    assert (
        main(["replay", str(tmp_path / "absent.json")]) == 2
        and "cannot be read" in capsys.readouterr().err
    )


def test_a_recording_without_rounds_is_refused_after_the_summary(command, expected, tmp_path):
    """Nobody knew that the first token would be the last."""
    status, out, err = command(
        "--record", str(tmp_path / "rounds.json"), "--stop", str(expected.tokens[0][0])
    )
    assert status == 2 and out and "1 token in" in err and not list(tmp_path.iterdir())
    assert "no round verified the whole block" in err


def test_a_recording_that_fills_the_cache_is_kept(command, model, tmp_path):
    """The last rounds, several of them, verify what fits: they are left out, and no gate is said to
    have truncated them.
    """
    length = MAX_SEQ_LEN - len(PROMPT.encode())
    rounds = dspark.generate(model, PROMPT, length, stop_token_ids=[]).rounds[0]
    whole = [r.accepted for r in rounds if r.verified == BLOCK]
    assert len(whole) < len(rounds) - 1, "more than one is short"
    assert {r.skipped for r in rounds} == {""}
    file = tmp_path / "rounds.json"
    status, _, err = command(
        "--record", str(file), "--max-new-tokens", str(length), "--stop", "255"
    )
    assert status == 0 and f"{len(rounds)} rounds" in err and "gate" not in err
    assert [r["accept"] for r in json.loads(file.read_text())["prompts"]["prompt"]] == whole


def test_a_damaged_drafter_is_status_1(command, model, expected, tmp_path, monkeypatch):
    """What was emitted before is shown, no JSON and no recording of it is written."""
    damaged = with_nan_drafter(model, "norm.weight")
    monkeypatch.setattr(dspark, "load", lambda *args, **options: damaged)
    for options in ([], ["--json"], ["--record", str(tmp_path / "rounds.json")]):
        status, out, err = command(*options)
        assert (
            status == 1
            and "not finite" in err
            and "mtp.*" in err
            and "Traceback" not in err
            and "{" not in out
        )
        assert out == (
            "" if "--json" in options else dspark.generate(model, PROMPT, 1).texts[0] + "\n"
        )  # the error begins a line
    assert not list(tmp_path.iterdir())


def test_bench_takes_the_gate_of_the_environment(model, capsys, monkeypatch):
    """As generate does; --gate switches it on too."""
    gates = []
    monkeypatch.setattr(dspark, "load", lambda *args, **options: model)
    monkeypatch.setattr(
        bench,
        "measure",
        lambda model, length, repeats, gate, advance: gates.append(gate.enabled) or {},
    )
    for value, options in (("0", []), ("1", []), ("0", ["--gate"])):
        monkeypatch.setenv("DEEPSEEK_DSPARK_GATE", value)
        assert main(["bench", "--json", *options]) == 0
    assert gates == [False, True, True]


def test_costs(model, directory, monkeypatch):
    """After a prompt that fills the cache, too: it is cut. Where two rounds do not fit, the error
    says so.
    """
    for prompt in ([1, 2, 3], [1] * MAX_SEQ_LEN):
        times = costs.measure(model, prompt)
        assert (
            times.keys() == {"draft_ms", "verify_ms", "plain_ms"}
            and times["draft_ms"] > 0 < times["plain_ms"]
        )
    medians(monkeypatch, 5.0, 3.0, 4.0)
    assert costs.measure(model, [1])["verify_ms"] == 0, (
        "a round that seems shorter than its draft costs no less than nothing"
    )
    short = dspark.load(directory, max_seq_len=13)
    with pytest.raises(
        dspark.ConfigError, match="max_seq_len 13 has no room to measure two rounds of 6 tokens"
    ):
        costs.measure(short, [1])


def test_costs_time_rounds_that_happen(model, monkeypatch):
    """Every timed call is a round: none comes after the end of its stream."""
    counts = []

    def count(call, repeats):
        counts.append(sum(bool(call()) for _ in range(repeats + 1)))
        return 1.0

    monkeypatch.setattr(costs, "_median_ms", count)
    monkeypatch.setattr(steps, "draft", lambda *arguments: 1)
    for length in (1, 60, 128):
        costs.measure(model, [5] * length)
    assert counts == [17] * 9


def test_public_functions_keep_their_arguments(model):
    """prefill, draft and commit leave the caches they are given usable, and unchanged."""
    _, _, cache = steps.prefill(model, [1, 2, 3])
    first = dspark.draft(model, cache, [4])
    dspark.commit(cache, [0])
    again = dspark.draft(model, cache, [4])
    assert first.tokens.tolist() == again.tokens.tolist() and cache.position.tolist() == [3]
