"""States of a training run on disk: what can go wrong with them is one error, and the older one
stays.
"""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.train import loop, states

STATE = states.State({"a.b": jnp.arange(4.0)}, (jnp.ones(2), {"count": jnp.array(3)}), step=5)


def later(step: int) -> states.State:
    return states.State(STATE.params, STATE.optimiser, step)


def test_what_was_saved_is_read_and_the_newest_stays(tmp_path):
    for step in (5, 12):
        states.save(tmp_path, later(step))
    read = states.load(tmp_path, STATE)
    assert read.step == states.newest(tmp_path) == 12 and os.listdir(tmp_path) == ["12"]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, read.optimiser, STATE.optimiser)))
    np.testing.assert_array_equal(read.params["a.b"], np.arange(4.0))


def test_only_states_are_removed(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    states.save(tmp_path, later(4))
    states.save(tmp_path, STATE)
    assert sorted(os.listdir(tmp_path)) == ["5", "notes"]


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_full_disk_leaves_the_state_before(tmp_path, monkeypatch, error):
    states.save(tmp_path, STATE)

    def full(*_, **__):
        raise error(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left.*bytes are free"):
        states.save(tmp_path, later(6))
    assert states.load(tmp_path, STATE).step == 5


def test_a_damaged_state_is_named(tmp_path):
    states.save(tmp_path, STATE)
    for path in sorted((tmp_path / "5").rglob("*"), reverse=True):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CheckpointError, match="5: the state cannot be read"):
        states.load(tmp_path, STATE)


def test_another_optimiser_is_refused(tmp_path):
    states.save(tmp_path, STATE)
    with pytest.raises(ConfigError, match="made by another optimiser"):
        states.load(tmp_path, states.State(STATE.params, (jnp.ones(3),)))


def test_a_device_without_memory_says_what_to_lower():
    with pytest.raises(ConfigError, match="does not fit in memory .*lower --rows"):
        with loop.naming_what_to_lower():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError):
        with loop.naming_what_to_lower():
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_a_log_drops_the_steps_that_come_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = loop.Log(path)
    for step in (1, 2, 3):
        log.write(step=step, loss=float("nan"), accepted=[np.float32(0.123456), None])
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # torn by a crash
    loop.Log(path, done=2).write(step=3, loss=1.0)
    lines = loop.read_log(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0] == {"step": 1, "loss": None, "accepted": [0.1235, None]}
