"""`dspark calibrate` on a small checkpoint: what it collects, writes, prints, draws and refuses."""

import dataclasses
import importlib.util
import json
import types

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.commands import calibrate as command
from dspark_jax.commands import calibration_figure, calibration_prompts
from dspark_jax.commands.main import main
from dspark_jax.decode import calibrate, slots
from dspark_jax.decode.emission import RoundRecord
from dspark_jax.decode.request import make_request
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.calibration import Calibration

from helpers.quick import compiled_quickly
from helpers.round_parts import BLOCK, byte_tokenizer
from helpers.small_model import write_small_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_small_checkpoint(path, byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "held_out.txt"
    path.write_text(TEXT)
    return path


def arguments(directory, data, *more):
    sizes = ["--prompts", "8", "--prompt-tokens", "12", "--max-new-tokens", "24", "--streams", "1"]
    return ["calibrate", "--checkpoint", str(directory), "--data", str(data), *sizes, *more]


@pytest.fixture(scope="module")
def calibrated(directory, data):
    """The result of --json, after which calibration.json lies beside the checkpoint."""
    with compiled_quickly(), pytest.MonkeyPatch.context() as patch:
        shown = []
        patch.setattr(command, "print_json", shown.append)
        assert main(arguments(directory, data, "--json")) == 0
    return shown[0]


def test_the_result_is_written_beside_the_checkpoint_and_loaded(directory, calibrated):
    file = directory / "calibration.json"
    assert calibrated["file"] == str(file) and calibrated["prompts"] == 8
    stored, model = json.loads(file.read_text()), dspark.load(directory, max_seq_len=64)
    for kind, temperature in (("greedy", 0), ("sampled", 1)):
        found = calibrated[kind]
        assert found["temperature"] == temperature and len(found["temperatures"]) == BLOCK
        assert found["prompts"] == {"fit": 4, "held_out": 4}
        assert stored[kind] == {name: found[name] for name in stored[kind]}
        assert (
            found["rounds"]["held_out"]
            == sum(row["count"] for row in found["reliability"]["products"]) / BLOCK
        )
    assert model.calibration == Calibration(
        *(calibrate.scale_of(calibrated[kind]) for kind in ("greedy", "sampled"))
    )


def test_greedy_and_sampled_streams_of_one_batch_have_scales_of_their_own(directory, calibrated):
    model = dspark.load(directory, max_seq_len=64)
    request = make_request(model, ["a", "b"], max_new_tokens=4, temperature=[0.0, 0.7])
    seen = slots.Slots(model, request, request.gate, 2).settings([*request.prompts, None])
    for column, name in ((seen.temperatures, "temperatures"), (seen.offsets, "offsets")):
        idle = [1.0 if name == "temperatures" else 0.0] * BLOCK
        rows = [calibrated["greedy"][name], calibrated["sampled"][name], idle]
        np.testing.assert_array_equal(np.asarray(column), np.array(rows, np.float32))
    off = dataclasses.replace(request, gate=dspark.GateConfig(calibration=False))
    seen = slots.Slots(model, off, off.gate, 2).settings(off.prompts)
    assert set(np.asarray(seen.temperatures).ravel().tolist()) == {1.0}


def test_the_table_says_everything_once(calibrated):
    text = command.render(calibrated)
    assert "8 prompts of 1 documents" in text and text.endswith(f"written to {calibrated['file']}")
    for kind in ("greedy, temperature 0:", "sampled, temperature 1:"):
        assert text.count(kind) == 1
    assert text.count("what is observed") == 2 and text.count("[   6,  inf)") == 2
    assert f"{100 * calibrated['greedy']['ece']['all']:6.2f}%" in text


def records(accepted, verified=BLOCK, scores=(1.0,) * BLOCK):
    return RoundRecord(BLOCK, verified, accepted, tuple(scores), 1.0, "")


def test_rounds_that_the_cache_cut_short_are_left_out():
    rounds = calibrate._rounds([[records(2), records(1, verified=3)], [], [records(5)]], BLOCK)
    assert rounds.accepted.tolist() == [2, 5] and rounds.prompt.tolist() == [0, 2]
    assert rounds.scores.shape == (2, BLOCK)
    assert calibrate._rounds([[]], BLOCK).scores.shape == (0, BLOCK)


def test_halves_are_of_prompts_and_the_held_out_one_is_judged():
    """Drafts of even prompts are always right, of odd ones never: the fit is wrong there."""
    number = np.arange(40) // 5
    accepted = np.where(number % 2 == 0, BLOCK, 0)
    judged = calibrate.judge(calibrate.Rounds(np.full((40, BLOCK), 3.0), accepted, number))
    assert judged["rounds"] == {"fit": 20, "held_out": 20}
    assert judged["temperatures"] == [1.0] * BLOCK, "nothing was ever rejected"
    assert judged["ece"]["by_position"][0] == pytest.approx(1 / (1 + np.exp(-3)))


def test_a_half_without_rounds_is_an_error():
    rounds = calibrate._rounds([[records(2)]], BLOCK)
    with pytest.raises(ConfigError, match="too few rounds"):
        calibrate.judge(rounds)


def test_a_figure_is_drawn(calibrated, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    calibration_figure.check(str(path))
    calibration_figure.draw(str(path), {kind: calibrated[kind] for kind in calibrate.KINDS})
    assert "<svg" in path.read_text()


@pytest.fixture
def refused(monkeypatch, capsys, directory, data):
    """refused(*arguments) -> the one line said of them, before anything is loaded."""

    def load(*arguments, **options):
        raise AssertionError("loaded")

    def run(*more, where=directory, text=data):
        assert main(arguments(where, text, *more)) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("dspark calibrate: ")
        return err

    monkeypatch.setattr(dspark, "load", load)
    return run


def test_a_missing_matplotlib_names_the_extra(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused("--figure", str(tmp_path / "x.png"))
    assert "pip install 'dspark-jax[figures]'" in said


@pytest.mark.parametrize(
    "more, message",
    [
        (["--prompts", "0"], "--prompts: 0 is not a positive integer"),
        (["--prompts", "1"], "--prompts: 1 is too few"),
        (["--prompt-tokens", "-1"], "--prompt-tokens: -1 is not a positive integer"),
        (["--max-new-tokens", "1"], "--max-new-tokens: 1 makes no round"),
        (["--seed", "-1"], "seed: -1 is not an integer from 0"),
        (["--streams", "0"], "streams: 0 is not a positive integer"),
        (["--figure", "x.gif"], "--figure x.gif: its name must end in .png, .svg, .pdf"),
        (["--out", "absent/x.json"], "absent is not a directory"),
    ],
)
def test_what_is_wrong_is_said_before_loading(refused, more, message):
    assert message in refused(*more)


def test_a_folder_that_cannot_be_written_points_to_out(refused, monkeypatch):
    from dspark_jax.runtime import files

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "check_writable", denied)
    said = refused()
    assert "calibration.json cannot be written (Permission denied); name another file" in said
    assert "--out" in said and "dspark.load(..., calibration=FILE)" in said


def test_data_that_cannot_be_read_is_named(refused, tmp_path):
    assert "absent.txt: cannot be read (No such file" in refused(text=tmp_path / "absent.txt")
    assert f"--data {tmp_path}: this is a directory" in refused(text=tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    assert "there is no text in" in refused(text=tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "latin.txt: not text in UTF-8" in refused(text=tmp_path / "latin.txt")


LINES = {
    "{": "not readable as JSON",
    "[1]": "expected an object with text",
    '{"text": ""}': "expected an object with text",
    '{"prompt": [1, -2]}': "expected an object with text",
    '{"prompt": 5}': "expected an object with text",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_is_no_document_is_named(refused, tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine", "id": 7}\n\n' + line + "\n")
    assert f"data.jsonl, line 3: {LINES[line]}" in refused(text=path)


def of_bytes():
    """A model whose tokens are bytes, as far as prompts are concerned."""
    encode = lambda text, add_special_tokens: types.SimpleNamespace(ids=list(text.encode()))
    return types.SimpleNamespace(tokenizer=types.SimpleNamespace(encode=encode))


def test_prompts_are_pieces_spread_over_all_texts():
    texts = ["0123456789abcdefghij", list(range(100, 107)), "xy"]
    pieces = [[48, 49, 50], [56, 57, 97], [103, 104, 105], [100, 101, 102], [120, 121]]
    model = of_bytes()
    assert calibration_prompts.cut(model, texts, 99, length=3, gap=5) == pieces
    assert calibration_prompts.cut(model, texts, 2, length=3, gap=5) == [pieces[0], pieces[2]]
    with pytest.raises(PromptError, match="half of the prompts are for fitting"):
        calibration_prompts.cut(model, ["short"], 9, length=30, gap=5)


def test_text_needs_a_tokenizer():
    without = types.SimpleNamespace(tokenizer=None)
    with pytest.raises(PromptError, match="no tokenizer.json; give token ids"):
        calibration_prompts.cut(without, ["text"], 9, length=3, gap=5)
    assert len(calibration_prompts.cut(without, [[1, 2], [3, 4]], 9, length=3, gap=5)) == 2
