"""Replay against an independent simulation in NumPy, the rounds file both ways, and one test per
refusal.
"""

import argparse
import copy
import json
import types

import numpy as np
import pytest

from dspark_jax.commands import replay as command
from dspark_jax.decode import gate, replay
from dspark_jax.errors import ConfigError
from dspark_jax.loading.calibration import Scale

BLOCK = 4


def synthetic(seed=0, n_rounds=(9, 14, 6)):
    """A recording of three prompts: an easy one, a hard one whose rounds are worth skipping, and
    one in between.
    """
    rng = np.random.default_rng(seed)
    prompts = {}
    for name, level, n in zip(("easy", "hard", "mixed"), (5.0, -2.5, 1.0), n_rounds):
        prompts[name] = []
        for _ in range(n):
            conf = np.round(rng.normal(level, 1.5, BLOCK), 3)
            right = rng.random(BLOCK) < 1 / (1 + np.exp(-conf))
            times = {
                key: float(rng.integers(lo, hi))
                for key, lo, hi in (
                    ("draft_ms", 150, 240),
                    ("verify_ms", 700, 800),
                    ("plain_ms", 280, 340),
                )
            }
            prompts[name].append(
                {"accept": int(np.cumprod(right).sum()), "k": BLOCK}
                | times
                | {"conf": conf.tolist()}
            )
    return {"source": "synthetic", "note": "", "block_size": BLOCK, "prompts": prompts}


def simulate(recording, margin=1.15, min_draft=0, decay=0.9, base=300.0, slope=109.0):
    """(chosen, {accounting: {prompt or "overall": tokens/s}}) by loops over NumPy arrays, sharing
    nothing with the library.
    """
    everything = [r for rounds in recording["prompts"].values() for r in rounds]
    draft, plain = (np.median([r[key] for r in everything]) for key in ("draft_ms", "plain_ms"))
    cost = np.array([plain] + [draft + base + slope * n for n in range(1, BLOCK + 1)])
    chosen, ms = {}, {a: {} for a in ("plain", "always_k", "published", "charged")}
    for name, rounds in recording["prompts"].items():
        matches, observed, chosen[name] = np.zeros(6), np.zeros(6), []
        for r in rounds:
            bucket = np.searchsorted([-0.5, 0.5, 1.5, 3.0, 6.0], r["conf"], side="right")
            p = (matches[bucket] + 1.5) / (observed[bucket] + 2)
            rate = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(p))]) / cost
            n = int(np.argmax(rate))
            if rate[n] < margin * rate[BLOCK]:
                n = BLOCK
            if 0 < n < min_draft:
                n = min_draft
            chosen[name].append(n)
            if n:
                matches, observed = matches * decay, observed * decay
                for i in range(n):
                    if i <= r["accept"]:
                        observed[bucket[i]] += 1
                        matches[bucket[i]] += i < r["accept"]
        n, accept = np.array(chosen[name]), np.array([r["accept"] for r in rounds])
        tokens = (1 + np.minimum(accept, n)).sum()
        ms["plain"][name] = plain
        ms["always_k"][name] = cost[BLOCK] * len(rounds) / (1 + accept).sum()
        ms["published"][name] = cost[n].sum() / tokens
        ms["charged"][name] = (cost[n] + draft * (n == 0)).sum() / tokens
    weights = [len(rounds) for rounds in recording["prompts"].values()]
    for accounting in ms.values():
        accounting["overall"] = np.average(list(accounting.values()), weights=weights)
    return chosen, {a: {name: 1000 / x for name, x in per.items()} for a, per in ms.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"margin": 1.0, "min_draft": 2, "decay": 0.6},
        {"base": 150.0, "slope": 170.0, "margin": 1.02},
    ],
)
def test_replay_equals_the_simulation(seed, numbers):
    recording = synthetic(seed)
    names = {"base": "verify_base_ms", "slope": "verify_slope_ms"}
    result = replay.replay(
        recording, gate.GateConfig(**{names.get(k, k): v for k, v in numbers.items()})
    )
    chosen, rates = simulate(recording, **numbers)
    assert result["chosen"] == chosen
    for accounting, expected in rates.items():
        assert result[accounting] == pytest.approx(expected, rel=1e-12), accounting
    assert result["rounds"] == {"easy": 9, "hard": 14, "mixed": 6}


def test_the_synthetic_rounds_reach_skips_truncation_and_full_blocks():
    recording = synthetic(1)
    result = replay.replay(
        recording, gate.GateConfig(verify_base_ms=150, verify_slope_ms=170, margin=1.02)
    )
    choices = {n for chosen in result["chosen"].values() for n in chosen}
    assert {0, BLOCK} < choices
    assert result["published"]["hard"] > result["charged"]["hard"] > result["always_k"]["hard"]


def test_two_rounds_by_hand():
    # Cold gate, one draft: rate(0) = 1/303, rate(1) = 1.75/605; 605 / 303 / 1.75 = 1.141 < 1.15, so
    # the draft is verified, and is wrong. Then p = 1.5 / (0.5 * 0 + 1 + 2) = 1/2: rate(0) wins by
    # 605 / 303 / 1.5 = 1.33, and the round is skipped.
    rounds = [
        {
            "accept": 0,
            "k": 1,
            "draft_ms": 196.0,
            "verify_ms": 409.0,
            "plain_ms": 303.0,
            "conf": [0.0],
        }
    ] * 2
    result = replay.replay({"block_size": 1, "prompts": {"p": rounds}}, gate.GateConfig())
    assert result["chosen"] == {"p": [1, 0]}
    assert result["plain"] == pytest.approx({"p": 1000 / 303, "overall": 1000 / 303})
    assert result["always_k"]["p"] == pytest.approx(1000 / 605)
    assert result["published"]["p"] == pytest.approx(2000 / (605 + 303))
    assert result["charged"]["p"] == pytest.approx(2000 / (605 + 303 + 196))


def test_each_prompt_starts_cold():
    prompts = synthetic(2)["prompts"]
    recording = {
        "block_size": BLOCK,
        "prompts": {"hard": prompts["hard"], "again": prompts["hard"]},
    }
    chosen = replay.replay(recording, gate.GateConfig())["chosen"]
    assert chosen["again"] == chosen["hard"] and chosen["hard"][0] == BLOCK and 0 in chosen["hard"]


def test_costs_come_from_the_config_where_the_rounds_have_none():
    recording = synthetic()
    for rounds in recording["prompts"].values():
        for record in rounds:
            del record["draft_ms"], record["verify_ms"], record["plain_ms"]
    result = replay.replay(recording, gate.GateConfig(draft_ms=1.5, plain_ms=20))
    assert result["costs"] == {
        "draft_ms": 1.5,
        "verify_base_ms": 300,
        "verify_slope_ms": 109,
        "plain_ms": 20,
    }
    assert result["recorded_verify_ms"] is None and result["plain"]["easy"] == 50


def fast_verifies():
    """Rounds of a machine and model whose full verify takes 2 ms: the defaults say 736."""
    recording = synthetic()
    for rounds in recording["prompts"].values():
        for i, record in enumerate(rounds):
            record |= {"draft_ms": 1.0, "plain_ms": 1.5, "verify_ms": 1.0 + i % 3}
    return recording


def test_a_recording_brings_its_own_verify_costs(tmp_path, capsys):
    """Nobody says what a verify costs and the defaults are far from what was recorded: the median,
    whatever n is.
    """
    recording = fast_verifies()
    result, (chosen, rates) = replay.replay(recording), simulate(recording, base=2.0, slope=0.0)
    assert result["costs"] == {
        "draft_ms": 1,
        "verify_base_ms": 2,
        "verify_slope_ms": 0,
        "plain_ms": 1.5,
    }
    assert result["verify_costs_from"] == "recording" and result["chosen"] == chosen
    for accounting, expected in rates.items():
        assert result[accounting] == pytest.approx(expected, rel=1e-12), accounting
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(recording))
    assert run_cli(path) == 0
    text = capsys.readouterr().out
    assert (
        "verify(n) = 2 + 0 n ms" in text
        and "note: a verify is charged 2 ms whatever n is, the median of the recorded" in text
    )
    assert run_cli(path, "--json") == 0 and json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize("given", ["option", "variable", "config"])
def test_verify_costs_that_are_given_are_used(given, tmp_path, capsys, monkeypatch):
    path, options = (
        tmp_path / "rounds.json",
        ["--verify-base-ms", "300"] if given == "option" else [],
    )
    path.write_text(json.dumps(fast_verifies()))
    if given == "variable":
        monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_VERIFY_SLOPE_MS", "109")
    if given == "config":
        text = command.render(replay.replay(path, gate.GateConfig()))
    else:
        assert run_cli(path, *options) == 0
        text = capsys.readouterr().out
    assert "verify(n) = 300 + 109 n ms" in text and "note: a full verify took 2 ms" in text


def test_defaults_that_agree_with_the_recording_stay():
    result = replay.replay(synthetic())
    assert (
        result["verify_costs_from"] == "config"
        and result["costs"]["verify_slope_ms"] == 109
        and 700 < result["recorded_verify_ms"]
    )


def test_the_environment_sets_the_gate(monkeypatch):
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_MARGIN", "1e6")
    assert set().union(*replay.replay(synthetic())["chosen"].values()) == {BLOCK}


def run_cli(*argv):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["replay", *map(str, argv)])
    return args.run(args)


def test_the_command_prints_a_table_that_says_which_is_which(tmp_path, capsys):
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(synthetic()))
    assert run_cli(path) == 0
    text, (_, rates) = capsys.readouterr().out, simulate(synthetic())
    rows = {line[:17].strip(): line[17:].split() for line in text.splitlines()}
    assert rows["tokens/s"] == ["easy", "hard", "mixed", "overall"]
    labels = {
        "plain": "plain",
        "always-k": "always_k",
        "gated, published": "published",
        "gated, charged": "charged",
    }
    for label, key in labels.items():
        assert rows[label] == [f"{rates[key][name]:.2f}" for name in rows["tokens/s"]]
    assert "published: a round that the gate skips is charged plain_ms only" in text
    assert "charged:   it is charged draft_ms + plain_ms" in text
    assert "note:" not in text


def test_the_command_prints_json(tmp_path, capsys):
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(synthetic()))
    assert run_cli(path, "--json", "--verify-base-ms", "1", "--verify-slope-ms", "2") == 0
    assert json.loads(capsys.readouterr().out) == replay.replay(
        path, gate.GateConfig(verify_base_ms=1, verify_slope_ms=2)
    )


def test_a_verify_cost_far_from_the_recorded_one_is_pointed_out():
    assert "a full verify took 7" in command.render(
        replay.replay(synthetic(), gate.GateConfig(verify_base_ms=1))
    )


def scaled_recording():
    """A recording of a calibrated drafter, and the same with its scores scaled already."""
    recording = synthetic(3)
    scale = {"temperatures": [2.0, 0.5, 4.0, 1.0], "offsets": [-0.5, 0.25, 0.0, -1.0]}
    done = copy.deepcopy(recording)
    for rounds in done["prompts"].values():
        for record in rounds:
            columns = zip(record["conf"], scale["temperatures"], scale["offsets"])
            record["conf"] = [score / t + o for score, t, o in columns]
    return recording | {"scale": scale}, done


def test_a_calibrated_drafters_scores_are_scaled_as_they_were():
    recording, done = scaled_recording()
    chosen = replay.replay(recording, gate.GateConfig())["chosen"]
    assert chosen == simulate(done)[0] != simulate(recording)[0]
    off = replay.replay(recording, gate.GateConfig(calibration=False))["chosen"]
    assert off == simulate(recording)[0]


@pytest.mark.parametrize(
    "scale, message",
    [
        (None, "scale: expected an object with temperatures and offsets"),
        ({"temperatures": [1.0] * BLOCK}, f"scale: offsets: expected {BLOCK} finite numbers"),
        (
            {"temperatures": [0.0] * BLOCK, "offsets": [0.0] * BLOCK},
            "scale: temperatures: 0.0 is not above 0",
        ),
    ],
)
def test_a_scale_that_is_none_is_refused(scale, message):
    with pytest.raises(ConfigError, match=message):
        replay.check(synthetic() | {"scale": scale})


def test_the_recorder_says_by_what_scores_are_scaled(tmp_path):
    scale = Scale((2.0, 0.5, 4.0, 1.0), (-0.5, 0.25, 0.0, -1.0))
    recorder = replay.RoundsRecorder(BLOCK, source="a test", scale=scale)
    recorder.add("one", [round_record(4)])
    recorder.write(tmp_path / "rounds.json")
    held = replay.load(tmp_path / "rounds.json")
    assert held["scale"] == {name: list(column) for name, column in scale._asdict().items()}
    assert held["prompts"]["one"][0]["conf"] == [0.5, 1.25, -2.0, 3.0], "raw"


def round_record(accepted=2, verified=BLOCK, skipped="", scores=(0.5, 1.25, -2.0, 3.0)):
    confidence = None if skipped == "margin" else np.asarray(scores, np.float32)
    return types.SimpleNamespace(
        proposed=BLOCK,
        verified=verified,
        accepted=accepted,
        confidence=confidence,
        margin=1.0,
        skipped=skipped,
    )


def test_what_is_recorded_can_be_replayed(tmp_path):
    recorder = replay.RoundsRecorder(BLOCK, source="a test", note="nothing")
    recorder.add(
        "one",
        [round_record(4), round_record(0)],
        draft_ms=np.float32(2),
        verify_ms=[7.5, 8.5],
        plain_ms=3,
    )
    recorder.add(
        "two",
        [round_record(1), round_record(2, verified=2)],
        draft_ms=2,
        verify_ms=[9, 10],
        plain_ms=3,
    )
    recorder.add("none", [], draft_ms=2, verify_ms=9, plain_ms=3)
    path = tmp_path / "rounds.json"
    recorder.write(path)
    common = {"k": 4, "draft_ms": 2.0, "plain_ms": 3.0, "conf": [0.5, 1.25, -2.0, 3.0]}
    assert json.loads(path.read_text()) == {
        "source": "a test",
        "note": "nothing",
        "block_size": BLOCK,
        "prompts": {
            "one": [
                {"accept": 4, "verify_ms": 7.5} | common,
                {"accept": 0, "verify_ms": 8.5} | common,
            ],
            "two": [
                {"accept": 1, "verify_ms": 9.0} | common
            ],  # the round cut short at the end is left out
        },
    }
    assert replay.replay(path)["rounds"] == {"one": 2, "two": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["rounds.json"]


def test_unmeasured_times_are_left_out(tmp_path):
    recorder = replay.RoundsRecorder(BLOCK, source="a test")
    recorder.add("one", [round_record()])
    recorder.write(tmp_path / "rounds.json")
    rounds = json.loads((tmp_path / "rounds.json").read_text())["prompts"]["one"]
    assert rounds == [{"accept": 2, "k": 4, "conf": [0.5, 1.25, -2.0, 3.0]}]


def test_all_rounds_that_the_end_of_the_cache_cut_short_are_left_out():
    """Each has room for accepted + 1 fewer than the one before; the last may have room for none."""
    ends = [
        [round_record(0, 3), round_record(1, 2), round_record(0, 0)],
        [round_record(0, 2), round_record(0, 1)],
        [round_record(0, 0)],
    ]
    for end in ends:
        recorder = replay.RoundsRecorder(BLOCK, source="")
        recorder.add(
            "p", [round_record(4), round_record(1), *end], draft_ms=[1, 2, *range(len(end))]
        )
        assert [(r["accept"], r["draft_ms"]) for r in recorder.content["prompts"]["p"]] == [
            (4, 1),
            (1, 2),
        ]


@pytest.mark.parametrize(
    "records",
    [
        [round_record(0, verified=2), round_record(0, verified=2)],
        [round_record(2, verified=2), round_record()],
        [round_record(0, 0, "gate")],
        [round_record(0, 0, "margin"), round_record()],
    ],
)
def test_rounds_that_a_gate_shortened_are_not_recorded(records):
    with pytest.raises(
        ConfigError, match="round 0 of prompt 'p' verified .* record with the gate off"
    ):
        replay.RoundsRecorder(BLOCK, source="").add("p", records)


def test_times_must_match_the_rounds():
    with pytest.raises(ConfigError, match="draft_ms has 1 entries for 2 rounds"):
        replay.RoundsRecorder(BLOCK, source="").add("p", [round_record()] * 2, draft_ms=[1.0])


def test_an_empty_or_unwritable_recording_is_refused(tmp_path):
    recorder = replay.RoundsRecorder(BLOCK, source="")
    with pytest.raises(ConfigError, match="recorded rounds: no round verified the whole block"):
        recorder.write(tmp_path / "rounds.json")
    recorder.add("p", [round_record()])
    with pytest.raises(ConfigError, match="cannot be written"):
        recorder.write(tmp_path / "absent" / "rounds.json")


DELETE = object()


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["block_size"], DELETE, "block_size must be a whole number"),
        (["block_size"], 0, "block_size must be a whole number"),
        (["prompts"], DELETE, "prompts must be an object"),
        (["prompts"], {}, "prompts must be an object"),
        (["prompts", "overall"], [], "must not be named 'overall'"),
        (["prompts", "hard"], [], "prompt 'hard': must be a list of one or more rounds"),
        (["prompts", "hard", 1], 7, "prompt 'hard', round 1: must be an object"),
        (["prompts", "hard", 1, "accept"], DELETE, "prompt 'hard', round 1: accept is missing"),
        (["prompts", "hard", 1, "accept"], 5, r"accept must be a whole number in 0\.\.4, not 5"),
        (["prompts", "hard", 1, "accept"], True, "accept must be a whole number"),
        (["prompts", "hard", 1, "k"], 3, "k is 3, not the block of 4; record with the gate off"),
        (["prompts", "hard", 1, "conf"], [1.0, 2.0], "conf must be a list of 4 finite numbers"),
        (
            ["prompts", "hard", 1, "conf", 2],
            float("nan"),
            "conf must be a list of 4 finite numbers",
        ),
        (["prompts", "hard", 1, "conf", 2], "1", "conf must be a list of 4 finite numbers"),
        pytest.param(
            ["prompts", "hard", 1, "conf", 2],
            10**400,
            "conf must be a list of 4 finite numbers",
            id="huge conf",
        ),
        pytest.param(
            ["prompts", "hard", 1, "draft_ms"],
            10**400,
            "draft_ms must be a time in ms",
            id="huge time",
        ),
        (["prompts", "hard", 1, "draft_ms"], -1, "draft_ms must be a time in ms, not -1"),
        (["prompts", "hard", 1, "draft_ms"], DELETE, "draft_ms must be in every round or in none"),
    ],
)
def test_a_malformed_recording_is_refused_with_the_place(path, value, message, tmp_path):
    content = synthetic()
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        replay.replay(copy.deepcopy(content))
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"rounds file .*broken\.json.*" + message):
        replay.load(file)


def test_a_file_that_is_absent_or_no_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent.json cannot be read: No such file"):
        replay.replay(tmp_path / "absent.json")
    (tmp_path / "cut.json").write_text(json.dumps(synthetic())[:-9])
    with pytest.raises(ConfigError, match="cut.json is not JSON"):
        replay.replay(tmp_path / "cut.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="list.json: the top level must be an object"):
        replay.replay(tmp_path / "list.json")


def test_a_minimum_draft_longer_than_the_recorded_block_is_refused():
    with pytest.raises(ConfigError, match="min_draft: 5 exceeds the draft block of 4"):
        replay.replay(synthetic(), gate.GateConfig(min_draft=5))
