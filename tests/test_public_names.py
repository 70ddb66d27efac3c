"""The public names, written down: losing one breaks programs, and a new one is a promise.

Whoever adds a name adds it here, and to the README.
"""

import subprocess
import sys
import types

import dspark_jax as dspark

NAMES = {
    "CheckpointError",
    "ConfigError",
    "DsparkError",
    "GateConfig",
    "GenerateOutput",
    "Interrupted",
    "Model",
    "NumericsError",
    "PromptError",
    "RoundRecord",
    "Session",
    "StreamEvent",
    "TokenLogprob",
    "commit",
    "draft",
    "extend",
    "gate",
    "generate",
    "load",
    "make_mesh",
    "new_cache",
    "prefill",
    "stream",
    "warm_up",
}
GATE = {
    "GateConfig",
    "GateState",
    "Outcome",
    "choose",
    "init",
    "learn",
    "margin_skip",
    "note_skipped",
    "observe",
    "round_ms",
    "scaled",
    "stats",
    "validate",
    "verify_ms",
}
ERRORS = {"CheckpointError", "ConfigError", "DsparkError", "NumericsError", "PromptError"}


def test_the_names_of_the_package():
    assert sorted(dspark.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(dspark, name) is not None, name


def test_the_names_of_the_gate():
    assert sorted(dspark.gate.__all__) == sorted(GATE)
    for name in GATE:
        assert getattr(dspark.gate, name) is not None, name


def test_the_errors_are_one_family():
    """And all there are: `except DsparkError` catches what the library raises on purpose."""
    assert {name for name in NAMES if name.endswith("Error")} == ERRORS
    for name in ERRORS:
        assert issubclass(getattr(dspark, name), dspark.DsparkError)
    assert issubclass(dspark.Interrupted, KeyboardInterrupt)


LOOK = """
import sys
import dspark_jax
print(*dir(dspark_jax))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_importing_shows_the_names_and_loads_nothing_heavy():
    """In a new process, before any name was used: a completing editor sees all of them."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60
    )
    shown, loaded = (set(line.split()) for line in done.stdout.splitlines())
    assert loaded >= {"dspark_jax"}
    assert not loaded & {"jax", "jaxlib", "numpy", "flax", "orbax", "tokenizers", "rich"}
    assert shown >= NAMES
    unlisted = {name for name in shown - NAMES if not name.startswith("_")}
    assert {name for name in unlisted if is_of_the_library(getattr(dspark, name))} == set()


def is_of_the_library(value) -> bool:
    """A module or a thing of ours, not one that a file imports for its own use."""
    where = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return where.partition(".")[0] == "dspark_jax"


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(dspark, "generate_fast")
