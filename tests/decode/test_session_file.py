"""Sessions in files: what is read goes on as what was written, also where max_seq_len is another
one; what is no session, is damaged or belongs elsewhere is refused in one line.
"""

import dataclasses
import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import load_file, save_file

import dspark_jax as dspark
from dspark_jax.decode import identity
from dspark_jax.model.dspark import make_limits
from dspark_jax.runtime import files

from helpers.ask_parts import bits
from helpers.round_parts import byte_tokenizer, same_bits, scripted, with_nan_tokens
from helpers.state_parts import committed, with_limits

PROMPT = np.random.default_rng(11).integers(0, 256, 60).tolist()
HEAVY = pytest.mark.heavy
GREEDY = {"stop_token_ids": []}  # the programs of test_generate.py
DRAWN = {"temperature": 4.0, "logprobs": 2, "stop_token_ids": []}


@pytest.fixture(scope="module")
def model(short_reference):
    return scripted(short_reference, tokenizer=byte_tokenizer())


@pytest.fixture(
    scope="module",
    params=[pytest.param(GREEDY, id="greedy"), pytest.param(DRAWN, id="drawn", marks=HEAVY)],
)
def options(request):
    return request.param


@pytest.fixture(scope="module")
def session(model, options):
    session = dspark.Session(model, seed=12).feed(PROMPT[:37])
    session.generate(10, **options)
    return session


@pytest.fixture(scope="module")
def next_turn(options):
    def run(session, mode="block"):
        out = session.fork(seed=session.seed).generate(12, mode=mode, **options)
        return out.tokens, bits(out.logprobs[0]) if out.logprobs else (), out.rounds

    return run


@pytest.fixture(scope="module")
def file(session, tmp_path_factory):
    path = tmp_path_factory.mktemp("sessions") / "session"
    session.save(path)
    return path


@pytest.mark.parametrize("mode", ["block", "plain"])
def test_what_is_read_goes_on_as_what_was_written(model, session, file, mode, next_turn):
    read = dspark.Session.load(model, file)
    assert (read.tokens, read.seed, read.pending) == (session.tokens, 12, session.pending)
    assert next_turn(read, mode) == next_turn(session, mode)
    assert next_turn(read.feed(PROMPT[:20]), mode) == next_turn(
        session.fork(seed=12).feed(PROMPT[:20]), mode
    )


def test_sessions_that_hold_little(model, tmp_path, next_turn, options):
    """Nothing, one token, and tokens that are not computed."""
    plain = dspark.Session(model, 5).feed(PROMPT[:9])
    plain.generate(4, mode="plain", **options)
    for session in (dspark.Session(model, 3), dspark.Session(model).feed([7]), plain):
        session.save(tmp_path / "session")
        read = dspark.Session.load(model, tmp_path / "session")
        assert (read.tokens, read.seed, read.pending) == (
            session.tokens,
            session.seed,
            session.pending,
        )
        assert next_turn(read.feed([1, 2])) == next_turn(session.fork(session.seed).feed([1, 2]))


def test_a_file_is_written_whole_or_not_at_all(
    model, session, file, tmp_path, monkeypatch, next_turn
):
    path = tmp_path / "session"
    dspark.Session(model).feed(PROMPT[:3]).save(path)
    before = path.read_bytes()

    def full(self, content):
        with open(self, "wb") as half:
            half.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        session.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["session"]
    with pytest.raises(OSError, match="No space left"):
        session.save("/dev/full")
    with pytest.raises(OSError):
        session.save(tmp_path / "nowhere" / "session")
    session.save(path)
    assert next_turn(dspark.Session.load(model, path)) == next_turn(session)


# Another max_seq_len


def of_length(model, max_seq_len):
    return with_limits(model, max_seq_len=max_seq_len)


def longest_entries(cache):
    return max(
        leaf.shape[2]
        for path, leaf in jax.tree_util.tree_flatten_with_path(cache)[0]
        if "entries" in str(path[-1])
    )


@pytest.mark.parametrize("max_seq_len", [48, 600])
def test_another_max_seq_len(model, session, file, max_seq_len):
    """All that belongs to tokens is there; in test_another_max_seq_len_goes_on it goes on."""
    other = of_length(model, max_seq_len)
    read = dspark.Session.load(other, file)
    assert longest_entries(read.cache) == (64 if max_seq_len == 48 else 192)
    own, wanted = (committed(each.cache, model.config) for each in (read, session))
    for name, array in wanted.items():
        if name.endswith("entries"):  # the rest is zero
            longer = max(own[name], array, key=np.size)
            common = min(own[name].shape[2], array.shape[2])
            assert common >= 46 // 8 and not longer[:, :, common:].any()
            own[name], array = own[name][:, :, :common], array[:, :, :common]
        assert same_bits(own.pop(name), array)
    assert not own
    assert read.tokens == session.tokens
    with pytest.raises(dspark.PromptError, match=f"max_seq_len {max_seq_len}"):
        read.feed([1] * 600)


@pytest.mark.heavy
@pytest.mark.parametrize("max_seq_len", [72, 600])
def test_another_max_seq_len_goes_on(model, session, file, tmp_path, max_seq_len, next_turn):
    """And back again."""
    read = dspark.Session.load(of_length(model, max_seq_len), file)
    assert next_turn(read) == next_turn(session)
    read.save(tmp_path / "session")
    again = dspark.Session.load(model, tmp_path / "session")
    assert next_turn(again, "plain") == next_turn(session, "plain")


def test_tokens_that_do_not_fit(model, file):
    with pytest.raises(dspark.ConfigError) as error:
        dspark.Session.load(of_length(model, 46), file)
    assert "its 47 tokens do not fit into max_seq_len 46; load the model with a larger one" in str(
        error.value
    )


# Of another model


def others(model, short_float):
    config = dataclasses.replace(model.config, rms_norm_eps=1e-5)
    yield "config was", dataclasses.replace(model, config=config)
    yield "weights was", with_nan_tokens(model, [3])
    yield "activation_quant was True, is False", scripted(short_float)
    rows = make_limits(model.config, 128, prefill_chunk=8).rows
    assert rows != model.limits.rows
    yield "most rows of a call (prefill_chunk) was 16, is 8", with_limits(model, rows=rows)


def test_another_model_is_named(model, short_float, file):
    for says, other in others(model, short_float):
        with pytest.raises(dspark.ConfigError) as error:
            dspark.Session.load(other, file)
        said = str(error.value)
        assert said.startswith(f"{file}: this session was made by another model or version: {says}")
        assert said.count(" was ") == 2, "nothing else differs"
        assert said.endswith("load what made it, or feed the tokens again") and "\n" not in said


def test_another_version_is_named(model, session, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "__version__", "0.0.9")
    session.save(tmp_path / "older")
    monkeypatch.undo()
    with pytest.raises(dspark.ConfigError, match="version of dspark-jax was 0.0.9, is "):
        dspark.Session.load(model, tmp_path / "older")


# Damage


def without(name):
    return lambda about, arrays: (about.pop(name, None), arrays.pop(name, None))


def array(name, change):
    return lambda about, arrays: arrays.update({name: change(arrays[name])})


def one_bit(array):
    changed = np.array(array)
    changed.view(np.uint8).flat[100] ^= 1
    return jnp.asarray(changed)


WRONG = {
    "no tokens": without("tokens"),
    "no seed": without("seed"),
    "no maker": without("made_by"),
    "no checksum": without("checksum"),
    "another number of computed tokens": lambda about, arrays: about.update(computed="45"),
    "other tokens": array("tokens", lambda a: a + 1),
    "tokens of another kind": array("tokens", lambda a: a.astype(jnp.uint32)),
    "a ring of another shape": array("drafter.rings", lambda a: a[:, :, :, :-1]),
    "another bit in a ring": array("drafter.rings", one_bit),
    "no position": without("position"),
    "an array that nobody has": lambda about, arrays: arrays.update(more=jnp.zeros(3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_was_changed_is_refused(model, file, tmp_path, what):
    with safe_open(file, "flax") as opened:
        about = dict(opened.metadata())
    arrays = dict(load_file(file))
    path = tmp_path / "damaged"
    save_file(arrays, path, about)
    assert dspark.Session.load(model, path).tokens
    WRONG[what](about, arrays)
    save_file(arrays, path, about)
    with pytest.raises(dspark.CheckpointError) as error:
        dspark.Session.load(model, path)
    assert str(error.value).startswith(f"{path}: damaged: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["length", "header", "end"])
def test_bytes_that_are_lost_or_changed(model, file, tmp_path, place):
    path, content = tmp_path / "damaged", bytearray(file.read_bytes())
    if place == "length":
        content = content[: len(content) // 2]
    else:
        content[{"header": 20, "end": -1}[place]] ^= 64
    path.write_bytes(content)
    with pytest.raises(dspark.CheckpointError, match="damaged|not a readable") as error:
        dspark.Session.load(model, path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_what_is_no_session(model, tmp_path):
    path = tmp_path / "other"
    for write in (
        lambda: save_file({"tokens": jnp.zeros(3, jnp.int32)}, path),
        lambda: save_file({"tokens": jnp.zeros(3, jnp.int32)}, path, {"format": "pt"}),
        lambda: path.write_text("a text\n"),
        lambda: path.write_bytes(b""),
        lambda: (path.unlink(), path.mkdir()),
        lambda: path.rmdir(),
    ):
        write()
        with pytest.raises(dspark.CheckpointError) as error:
            dspark.Session.load(model, path)
        assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    with pytest.raises(dspark.CheckpointError, match="there is no such file"):
        dspark.Session.load(model, files.real_path(path))
