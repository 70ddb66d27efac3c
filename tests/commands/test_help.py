"""Help comes at once: nothing of jax is loaded for it, so what it says of defaults is written down
twice and compared here.
"""

import dataclasses
import subprocess
import sys

import pytest

from dspark_jax.commands import main, replay
from dspark_jax.decode.gate_config import GateConfig

COMMANDS = [
    "generate",
    "bench",
    "inspect",
    "convert",
    "plan",
    "replay",
    "calibrate",
    "synthetic",
    "train",
]
TRAINING = [["train", "drafter"], ["train", "main"], ["train", "text"]]
ASK = """
import sys
from dspark_jax.commands.main import main

try:
    main(sys.argv[1:] + ["--help"])
except SystemExit as end:
    assert end.code == 0
for name in ("jax", "jaxlib", "flax"):
    assert name not in sys.modules, name
"""


def test_these_are_all_commands():
    parsers = next(action for action in main._parser()._actions if action.dest == "command")
    assert list(parsers.choices) == COMMANDS


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), *TRAINING], ids=" ".join)
def test_help_loads_nothing_of_jax(command):
    asked = [sys.executable, "-c", ASK, *command]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(" ".join(["usage: dspark", *command]))


def test_the_defaults_that_replay_shows_are_those_of_the_gate():
    defaults = {field.name: field.default for field in dataclasses.fields(GateConfig)}
    assert {name: defaults[name] for name in replay.VERIFY_COSTS} == replay.VERIFY_COSTS
