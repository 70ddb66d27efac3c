"""What load and make_mesh refuse of their arguments, and what counts as a number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.loading import load as loading
from dspark_jax.runtime.scalars import truth, whole_number


@pytest.fixture
def unread(monkeypatch):
    """The weights are not."""

    def source(*arguments):
        raise AssertionError("read")

    monkeypatch.setattr(loading, "_source", source)


@pytest.mark.parametrize("wrong", ["no", "false", "", None, 2, [], 1.0, np.array([1, 2])])
def test_a_switch_that_is_neither_on_nor_off(unread, wrong):
    """By Python's rules "no" would switch it on."""
    with pytest.raises(dspark.ConfigError, match="activation_quant: .* is neither True nor False"):
        dspark.load(activation_quant=wrong)


def test_switches():
    for on in (True, 1, np.True_, np.array(True), jnp.array(True), np.int64(1)):
        assert truth("switch", on) is True
    for off in (False, 0, np.False_, np.array(False), jnp.array(False)):
        assert truth("switch", off) is False


@pytest.mark.parametrize("wrong", [False, 0, [], "1x1", (1, 1)])
def test_a_mesh_that_is_none(unread, wrong):
    with pytest.raises(dspark.ConfigError, match="mesh: .* is not a mesh with the axes"):
        dspark.load(mesh=wrong)


def test_a_tokenizer_is_refused_before_the_weights_are_read(unread, tmp_path):
    from helpers.small_model import write_small_checkpoint

    write_small_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(dspark.CheckpointError, match="not a readable tokenizer.json"):
        dspark.load(tmp_path)


@pytest.mark.parametrize("argument", ["max_seq_len", "prefill_chunk"])
def test_numbers_of_tokens(unread, argument):
    for wrong in (0, -1, True, "64", 64.0, [64], np.array([64]), 2**70):
        with pytest.raises(dspark.ConfigError, match=f"{argument}: .* is not an integer from 1 to"):
            dspark.load(**{argument: wrong})
    for right in (64, np.int64(64), np.array(64), jnp.int32(64)):
        with pytest.raises(AssertionError, match="read"):
            dspark.load(**{argument: right})


# Meshes


@pytest.mark.parametrize("sizes", [("1", "1"), (1.0, 1), (True, True), (None, 1), (1, [1])])
def test_sizes_that_are_no_whole_numbers(sizes):
    with pytest.raises(dspark.ConfigError, match="mesh: .* are not two whole numbers"):
        dspark.make_mesh(*sizes)


def test_sizes_that_are_numpys_or_jaxs():
    for one in (np.int64(1), np.array(1), jnp.int32(1)):
        assert dspark.make_mesh(one, one) == dspark.make_mesh(1, 1)


@pytest.mark.parametrize(
    "devices, said",
    [
        (5, "devices must be a list, such as jax.devices"),
        ("cpu", "'c' is not a device"),
        ([None], "None is not a device"),
        ([0], "0 is not a device"),
        (jax.devices()[0], "devices must be a list"),
        (jax.devices() * 2, "a device is given twice"),
        ([], "1x1 needs 1 devices; available: 0"),
    ],
)
def test_devices_that_are_none(devices, said):
    with pytest.raises(dspark.ConfigError, match=f"mesh: {said}"):
        dspark.make_mesh(1, 1, devices)


# Numbers


def test_whole_numbers():
    for five in (5, np.int8(5), np.uint64(5), np.array(5), jnp.int32(5)):
        number = whole_number("n", five, 1, 9)
        assert number == 5 and type(number) is int
    for wrong in (True, np.True_, 5.0, np.float32(5), jnp.float32(5), "5", None, [5], 0, 10):
        with pytest.raises(dspark.ConfigError, match="n: .* is not an integer from 1 to 9"):
            whole_number("n", wrong, 1, 9)


def test_what_is_traced_is_no_number_yet():
    with pytest.raises(dspark.ConfigError, match="is not an integer"):
        jax.eval_shape(lambda n: whole_number("n", n, 1, 9), jnp.int32(5))
