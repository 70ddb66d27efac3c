"""calibration.json: written, read, refused, and whose it is."""

import json
import math

import jax.numpy as jnp
import pytest

import dspark_jax as dspark
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading import calibration
from dspark_jax.loading.calibration import Calibration, Scale

BLOCK = 5
GREEDY = Scale((1.0, 0.5, 2.0, 1.25, 3.0), (0.0, 0.25, -0.5, 0.125, 1.0))
SAMPLED = Scale((2.0,) * BLOCK, (-1.0,) * BLOCK)
FITTED = {
    "greedy": {**GREEDY._asdict(), "rounds": {"fit": 3, "held_out": 2}},
    "sampled": SAMPLED._asdict(),
}


@pytest.fixture
def file(small_model, tmp_path):
    path = tmp_path / calibration.FILE
    calibration.write(path, small_model.module, BLOCK, FITTED)
    return path


def found(small_model, path, asked=None):
    return calibration.find(asked, path.parent, small_model.module, BLOCK)


def test_what_is_written_is_read(small_model, file):
    assert found(small_model, file) == Calibration(GREEDY, SAMPLED)
    content = json.loads(file.read_text())
    assert content["format"] == "dspark calibration" and content["version"] == 1
    assert content["greedy"]["rounds"] == {"fit": 3, "held_out": 2}
    assert [path.name for path in file.parent.iterdir()] == [calibration.FILE]


def test_streams_above_temperature_0_have_their_own():
    both = Calibration(GREEDY, SAMPLED)
    assert both.of(0.0) is GREEDY and both.of(0.3) is both.of(1.0) is SAMPLED


def test_which_is_taken(small_model, file, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("empty")
    assert found(small_model, elsewhere / "config.json") is None, "there is none"
    assert found(small_model, file, asked=False) is None
    asked = calibration.find(str(file), elsewhere, small_model.module, BLOCK)
    assert asked == Calibration(GREEDY, SAMPLED)
    with pytest.raises(CheckpointError, match="absent.json: no such file"):
        found(small_model, file, asked=str(file.parent / "absent.json"))
    with pytest.raises(ConfigError, match="True is no path"):
        found(small_model, file, asked=True)


def test_that_of_another_drafter_is_warned_of_and_not_used(small_model, file):
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"drafter": "00000000"}))
    with pytest.warns(UserWarning, match="made for another drafter than this checkpoint's, so it"):
        assert found(small_model, file) is None
    with pytest.raises(ConfigError, match="another drafter.*; run dspark calibrate"):
        found(small_model, file, asked=str(file))


def test_that_of_another_block_is_warned_of_and_not_used(small_model, file):
    short = {"temperatures": [1.0], "offsets": [0.0]}
    calibration.write(file, small_model.module, 1, {"greedy": short, "sampled": short})
    with pytest.warns(UserWarning, match="a draft block of 1, not of 5"):
        assert found(small_model, file) is None


def test_the_drafter_is_known_by_its_tensors(small_model):
    """One bit of its confidence head makes it another; main model and dtype do not matter."""
    before = calibration.drafter_identity(small_model.module)
    head = small_model.module.drafter.confidence
    held = head[...]
    try:
        head[...] = held.astype(jnp.bfloat16)
        assert calibration.drafter_identity(small_model.module) == before
        head[...] = held.at[0, 0].multiply(1.5)
        assert calibration.drafter_identity(small_model.module) != before
    finally:
        head[...] = held
    assert len(before) == 8


BAD = {
    "no object": ([], "this is not a calibration"),
    "other file": ({"format": "x"}, "this is not a calibration"),
    "version": ({"version": 2}, "version 2, this library reads 1; run dspark calibrate"),
    "drafter": ({"drafter": None}, "drafter: None is not a checksum"),
    "no sampled": ({"sampled": None}, "sampled: expected an object with temperatures"),
    "no offsets": (
        {"greedy": {"temperatures": [1.0] * 5}},
        "greedy: offsets: expected 5 finite numbers",
    ),
    "short": (
        {"greedy": {"temperatures": [1.0] * 4, "offsets": [0.0] * 5}},
        "greedy: temperatures: expected 5 finite numbers",
    ),
    "cold": (
        {"greedy": {"temperatures": [1.0, 0.0, 1.0, 1.0, 1.0], "offsets": [0.0] * 5}},
        "greedy: temperatures: 0.0 is not above 0",
    ),
    "nan": (
        {"greedy": {"temperatures": [1.0, math.nan, 1.0, 1.0, 1.0], "offsets": [0.0] * 5}},
        "greedy: temperatures: expected 5 finite numbers",
    ),
    "truth": (
        {"greedy": {"temperatures": [1.0] * 5, "offsets": [True] * 5}},
        "greedy: offsets: expected 5 finite numbers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_an_error_that_names_it(small_model, file, case):
    change, message = BAD[case]
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | change if isinstance(change, dict) else change))
    with pytest.raises(CheckpointError, match=message) as error:
        found(small_model, file)
    assert str(file) in str(error.value)


def test_no_json_and_no_file_are_errors_that_name_it(small_model, file):
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"calibration\.json: not readable as JSON"):
        found(small_model, file)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match=r"calibration\.json: this is a directory"):
        found(small_model, file)


def test_load_takes_it_and_what_is_beside_it_may_be_left(small_model, tmp_path):
    from helpers.small_model import write_small_checkpoint

    write_small_checkpoint(tmp_path)
    calibration.write(tmp_path / calibration.FILE, small_model.module, BLOCK, FITTED)
    assert dspark.load(tmp_path, max_seq_len=64).calibration == Calibration(GREEDY, SAMPLED)
    assert dspark.load(tmp_path, max_seq_len=64, calibration=False).calibration is None
