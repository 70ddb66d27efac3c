"""A run is continued with the settings that it was begun with."""

import pytest

from dspark_jax.errors import ConfigError
from dspark_jax.train import settings


def test_the_same_settings_go_on(tmp_path):
    asked = {"--rows": 8, "--decay": None, "files": [["a", 1, 2]]}
    assert not settings.keep(tmp_path / "run", asked)
    assert settings.keep(tmp_path / "run", asked | {"files": [("a", 1, 2)]})


def test_all_that_differ_are_named(tmp_path):
    settings.keep(tmp_path, {"--rows": 8, "--seed": 0, "--decay": None, "--gone": 1})
    with pytest.raises(ConfigError) as error:
        settings.keep(tmp_path, {"--rows": 4, "--seed": 0, "--decay": 4.0, "--new": "x"})
    assert str(error.value).split("\n  ")[1:] == [
        "--rows: 8, now 4",
        "--decay: not given, now 4.0",
        "--gone: 1, now not given",
        '--new: not given, now "x"',
    ]


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / settings.NAME).write_text("{")
    with pytest.raises(ConfigError, match="not readable"):
        settings.keep(tmp_path, {})


def test_what_nothing_depends_on_yet_may_change(tmp_path):
    settings.keep(tmp_path, {"--rows": 8, "--seed": 0})
    assert settings.keep(tmp_path, {"--rows": 4, "--seed": 0}, free={"--rows"})
    with pytest.raises(ConfigError, match="--rows: 4, now 8$"):
        settings.keep(tmp_path, {"--rows": 8, "--seed": 0})
    with pytest.raises(ConfigError, match="--seed: 0, now 1$"):
        settings.keep(tmp_path, {"--rows": 4, "--seed": 1}, free={"--rows"})
