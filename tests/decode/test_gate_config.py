"""The numbers of a gate: their defaults, variables, ranges, and how they may be given."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import gate, gate_config
from dspark_jax.errors import ConfigError

ON = gate.GateConfig(enabled=True)


def test_the_defaults_are_those_of_the_published_gate():
    assert (
        gate.GateConfig.from_env({})
        == gate.GateConfig()
        == gate.GateConfig(False, 0.0, 1.15, 0, 0.9, 196, 300, 109, 303)
    )


def test_every_variable_is_read(monkeypatch):
    values = {
        "MARGIN_THRESHOLD": 0.5,
        "MARGIN": 1.3,
        "MIN_DRAFT": 2,
        "DECAY": 0.8,
        "DRAFT_MS": 1,
        "VERIFY_BASE_MS": 2.5,
    }
    for name, value in (values | {"VERIFY_SLOPE_MS": 3, "PLAIN_MS": 4}).items():
        monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_" + name, str(value))
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE", "1")
    assert gate.GateConfig.from_env() == gate.GateConfig(True, 0.5, 1.3, 2, 0.8, 1, 2.5, 3, 4)
    monkeypatch.setenv("DEEPSEEK_DSPARK_GATE_CALIBRATION", "0")
    assert gate.GateConfig.from_env().calibration is False


@pytest.mark.parametrize(
    "suffix",
    [
        "",
        "_MARGIN_THRESHOLD",
        "_MARGIN",
        "_MIN_DRAFT",
        "_DECAY",
        "_DRAFT_MS",
        "_PLAIN_MS",
        "_CALIBRATION",
    ],
)
@pytest.mark.parametrize("text", ["fast", " ", "1,15", "nan", "inf", "-1"])
def test_a_bad_variable_is_refused_by_name(suffix, text):
    name = "DEEPSEEK_DSPARK_GATE" + suffix
    with pytest.raises(ConfigError, match=rf"{name}\b"):
        gate.GateConfig.from_env({name: text})


@pytest.mark.parametrize(
    "name, text",
    [
        ("", "2"),
        ("_CALIBRATION", "2"),
        ("_DECAY", "1.5"),
        ("_MIN_DRAFT", "2.5"),
        ("_MARGIN", "0"),
        ("_PLAIN_MS", "0"),
        ("_DRAFT_MS", "1e39"),
    ],
)
def test_a_variable_out_of_range_is_refused_by_name(name, text):
    with pytest.raises(ConfigError, match=f"DEEPSEEK_DSPARK_GATE{name}: "):
        gate.GateConfig.from_env({"DEEPSEEK_DSPARK_GATE" + name: text})


def test_an_unknown_variable_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="DEEPSEEK_DSPARK_GATE_MARGN is not known.*DEEPSEEK_DSPARK_GATE_MARGIN,"
    ):
        gate.GateConfig.from_env({"DEEPSEEK_DSPARK_GATE_MARGN": "1.2"})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"enabled": "yes"}, "enabled: 'yes'"),
        ({"calibration": "no"}, "calibration: 'no' is neither on nor off"),
        ({"margin": float("nan")}, "margin: nan"),
        ({"min_draft": float("inf")}, "min_draft: inf"),
        ({"decay": "slow"}, "decay: 'slow' is not a number"),
        ({"decay": -0.1}, "decay: -0.1"),
        ({"min_draft": 6}, "min_draft: 6 exceeds the draft block of 5"),
        ({"min_draft": 1.5}, "min_draft: 1.5 must be a whole number"),
        ({"draft_ms": None}, "draft_ms: None"),
        ({"draft_ms": "196"}, "draft_ms: '196' is not a number"),
        ({"min_draft": "2"}, "min_draft: '2' is not a number"),
        ({"decay": True}, "decay: True is not a number"),
        ({"plain_ms": [303]}, r"plain_ms: \[303\] is not a number"),
        ({"draft_ms": 1e39}, r"draft_ms: 1e\+39 is not a finite number of float32"),
        (
            {"draft_ms": 10**5000},
            "draft_ms: an integer of 16610 bits is not a finite number of float32",
        ),
        ({"margin": jnp.array(1j)}, "margin: .* is not a number"),
        ({"margin": 1e-46}, "margin: 1e-46 must be more than 0, in float32"),
        (
            {"verify_slope_ms": 1e38},
            "draft_ms, verify_base_ms and verify_slope_ms: a block of 5 drafts would cost "
            "5e\\+38 ms",
        ),
        ({"draft_ms": 0, "verify_base_ms": 0, "verify_slope_ms": 0}, "must cost something"),
    ],
)
def test_validate_refuses_by_field(change, message):
    with pytest.raises(ConfigError, match=message):
        gate.validate(dataclasses.replace(ON, **change), block_size=5)


def test_validate_accepts_what_fits():
    gate.validate(gate.GateConfig(), block_size=1)
    gate.validate(dataclasses.replace(ON, min_draft=5), block_size=5)
    gate.validate(
        dataclasses.replace(
            ON, draft_ms=np.float32(3), plain_ms=jnp.float32(2), min_draft=np.int64(1)
        ),
        block_size=5,
    )


@pytest.mark.parametrize("six", [6, np.int64(6), np.array(6), jnp.int32(6)])
def test_a_min_draft_longer_than_the_block_is_refused_however_it_is_given(six):
    config = dataclasses.replace(ON, min_draft=six)
    with pytest.raises(ConfigError, match="min_draft: 6 exceeds the draft block of 5"):
        gate.validate(config, block_size=5)
    with pytest.raises(ConfigError, match="min_draft: 6 exceeds the draft block of 5"):
        gate.choose(config, gate.init(ON, 1), jnp.zeros((1, 5)))


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
def test_numbers_in_arrays_are_checked_as_numbers_are(array):
    for field, wrong, message in (
        ("min_draft", 1.5, "min_draft: 1.5 must be a whole number"),
        ("decay", 1.5, "decay: 1.5 must lie in 0..1"),
        ("margin", np.nan, "margin: nan is not a finite number"),
        ("enabled", 2, "enabled: 2 is neither on nor off"),
        ("draft_ms", [196.0], "draft_ms: .* is not a number"),
    ):
        with pytest.raises(ConfigError, match=message):
            gate.validate(dataclasses.replace(ON, **{field: array(wrong)}), block_size=5)


def test_numbers_in_arrays_become_pythons():
    given = dataclasses.replace(
        ON,
        min_draft=jnp.int32(3),
        margin=np.array(1.5),
        decay=jnp.bfloat16(0.5),
        enabled=jnp.int8(1),
    )
    plain = gate_config.with_plain_numbers(given)
    assert plain == dataclasses.replace(ON, min_draft=3, margin=1.5, decay=0.5)
    types = {f.name: type(getattr(plain, f.name)) for f in dataclasses.fields(plain)}
    assert types == {f.name: type(getattr(ON, f.name)) for f in dataclasses.fields(ON)}
    assert type(given.margin) is float, "what needs no device's answer is so at once"
