"""What extend, commit, prefill and draft refuse of their arguments, and what they leave alone:
arrays of the device, traced ones.
"""

import dataclasses
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark

from helpers.round_parts import compilations

RAGGED = [[1, 2], [3]]


@pytest.fixture(scope="module")
def caches(golden_float):
    """Of one and of two streams, said to be at position 3."""
    return {
        batch: dspark.new_cache(golden_float, batch).replace(position=jnp.full(batch, 3, jnp.int32))
        for batch in (1, 2)
    }


WIDTH = 3 * 128  # captured layers times channels
REFUSALS = {
    "token of two streams": (
        1,
        "draft",
        ([8, 9],),
        r"draft: token \(2,\) does not fit a cache of 1 streams; it must be \[1\]",
    ),
    "token of one stream": (
        2,
        "draft",
        ([8],),
        r"draft: token \(1,\) does not fit a cache of 2 streams",
    ),
    "token alone": (
        1,
        "draft",
        (8,),
        r"draft: token \(\) does not fit a cache of 1 streams; it must be \[1\]",
    ),
    "token in a row": (1, "draft", ([[8]],), r"draft: token \(1, 1\) does not fit"),
    "token ragged": (1, "draft", (RAGGED,), "draft: token: the rows differ in length"),
    "token fraction": (1, "draft", ([8.5],), "token ids must be integers, got float64"),
    "hidden narrow": (
        1,
        "draft",
        ([8], np.zeros((1, 128), np.float32)),
        r"draft: hidden \(1, 128\) of float32 must be \[1, 384\]",
    ),
    "hidden of two": (
        1,
        "draft",
        ([8], jnp.zeros((2, WIDTH))),
        r"draft: hidden \(2, 384\) of float32 must be \[1, 384\] of floats",
    ),
    "hidden of ids": (
        1,
        "draft",
        ([8], np.zeros((1, WIDTH), np.int32)),
        "draft: hidden .* of int32 must be",
    ),
    "hidden ragged": (1, "draft", ([8], RAGGED), "draft: hidden: the rows differ in length"),
    "commit two": (
        1,
        "commit",
        ([1, 2],),
        r"commit: n \(2,\) does not fit a cache of 1 streams; it must be \[1\]",
    ),
    "commit two on the device": (
        1,
        "commit",
        (jnp.array([1, 2]),),
        r"commit: n \(2,\) does not fit",
    ),
    "commit one of two": (
        2,
        "commit",
        ([1],),
        r"commit: n \(1,\) does not fit a cache of 2 streams; it must be \[2\]",
    ),
    "commit number": (1, "commit", (1,), r"commit: n \(\) does not fit"),
    "commit negative": (1, "commit", ([-1],), r"commit: n \[-1\] must be 0 or more"),
    "commit fraction": (1, "commit", ([1.5],), "commit: n must be integers, got float64"),
    "commit fraction on the device": (
        1,
        "commit",
        (jnp.array([1.5]),),
        "commit: n must be integers, got float32",
    ),
    "commit ragged": (1, "commit", (RAGGED,), "commit: n: the rows differ in length"),
    "valid fraction": (
        1,
        "extend",
        ([[1, 2]], [1.7]),
        "extend: valid must be integers, got float64",
    ),
    "valid truth": (1, "extend", ([[1, 2]], [True]), "extend: valid must be integers, got bool"),
    "valid ragged": (
        2,
        "extend",
        ([[1, 2], [3, 4]], RAGGED),
        "extend: valid: the rows differ in length",
    ),
    "tokens ragged": (
        2,
        "extend",
        (RAGGED, [2, 1]),
        "extend: tokens: the rows differ in length; give one array, and pad its rows",
    ),
    "prefill of two": (
        None,
        "prefill",
        ([[1, 2]],),
        r"prefill: tokens \(1, 2\) must be one list of token ids, of one stream",
    ),
    "prefill number": (None, "prefill", (7,), r"prefill: tokens \(\) must be one list"),
    "prefill ragged": (None, "prefill", (RAGGED,), "prefill: tokens: the rows differ in length"),
    "prefill text": (
        None,
        "prefill",
        ("text",),
        r"prefill: tokens \(\) must be one list of token ids",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_compilation(golden_float, caches, case):
    batch, name, arguments, message = REFUSALS[case]
    first = () if name == "commit" else (golden_float,)
    first += () if batch is None else (caches[batch],)
    with compilations() as compiled, pytest.raises(dspark.PromptError, match=message):
        getattr(dspark, name)(*first, *arguments)
    assert not compiled


def test_commit_takes_what_holds_integers(caches):
    for n in (
        [2, 0],
        (2, 0),
        np.array([2, 0], np.int64),
        np.array([2, 0], np.uint8),
        jnp.array([2, 0]),
    ):
        assert dspark.commit(caches[2], n).position.tolist() == [5, 3]


def test_commit_can_be_traced(caches):
    moved = jax.jit(lambda cache, n: dspark.commit(cache, n).position)(
        caches[2], np.array([2, 0], np.int32)
    )
    assert moved.tolist() == [5, 3]
    assert jax.jit(dspark.commit)(caches[2], [2, 0]).position.tolist() == [
        5,
        3,
    ]  # a list of traced numbers
    with pytest.raises(dspark.PromptError, match="does not fit a cache of 2 streams"):
        jax.eval_shape(dspark.commit, caches[2], np.array([2], np.int32))


def test_small_numpy_integers_do_not_wrap(golden_float):
    """240 + 40 as uint8 is 24: more than the cache holds was asked for without a word."""
    import numpy as np

    with pytest.raises(dspark.PromptError, match="together exceed max_seq_len 128"):
        dspark.generate(golden_float, [5] * 100, np.uint8(200))
    with pytest.raises(dspark.PromptError, match="200 tokens and max_new_tokens 50"):
        dspark.generate(golden_float, [5] * 200, np.int8(50))


@pytest.mark.parametrize("n", [2**33, 2**31, 10**7])
def test_commit_refuses_what_no_cache_holds(golden_float, n):
    with pytest.raises(dspark.PromptError, match="more than any cache holds"):
        dspark.commit(dspark.new_cache(golden_float), [n])


# What stands in place of a model, a cache, a number of streams

NOT_A_MODEL = [None, 5, "model", [], object()]


@pytest.mark.parametrize("wrong", NOT_A_MODEL)
def test_what_is_no_model(caches, wrong):
    calls = {
        "new_cache": (),
        "prefill": ([1],),
        "extend": (caches[1], [[1]], [1]),
        "draft": (caches[1], [1]),
    }
    for name, rest in calls.items():
        said = f"{name}: expected a model that dspark.load returned, got a {type(wrong).__name__}"
        with pytest.raises(dspark.ConfigError, match=said):
            getattr(dspark, name)(wrong, *rest)


@pytest.mark.parametrize("wrong", NOT_A_MODEL)
def test_a_session_of_what_is_no_model(wrong, tmp_path):
    with pytest.raises(dspark.ConfigError, match="Session: expected a model that dspark.load"):
        dspark.Session(wrong)
    with pytest.raises(dspark.ConfigError, match="Session.load: expected a model that dspark.load"):
        dspark.Session.load(wrong, tmp_path / "absent")


@pytest.mark.parametrize("wrong", NOT_A_MODEL)
@pytest.mark.parametrize("name", ["generate", "stream", "warm_up"])
def test_a_request_of_what_is_no_model(name, wrong):
    with pytest.raises(dspark.ConfigError, match=f"{name}: expected a model that dspark.load"):
        getattr(dspark, name)(wrong, "hi")


def test_a_warm_up_is_of_numbers_and_truth_values(golden_float):
    for options, says in (
        ({"sampled": 0.7}, "sampled: 0.7 is neither"),
        ({"logprobs": "no"}, "logprobs: 'no' is neither"),
        ({"streams": np.array([1, 0])}, "streams: 0 is not a positive integer"),
        ({"streams": {-1}}, "streams: -1 is not a positive integer"),
    ):
        with compilations() as compiled, pytest.raises(dspark.ConfigError, match=says):
            dspark.warm_up(golden_float, **options)
        assert not compiled


def test_a_warm_up_is_for_every_number_of_streams(golden_float, monkeypatch):
    """What it compiles is compiled for real in test_streams_full.py (heavy)."""
    compiled = []

    class Run:
        engine = types.SimpleNamespace(compile_seconds=0.5)

        def __init__(self, model, request):
            self.compile = lambda: compiled.append(request)

    monkeypatch.setattr(importlib.import_module("dspark_jax.decode.warm_up"), "Run", Run)
    assert dspark.warm_up(golden_float, [1, 4], sampled=True, mode="plain") == 1.0
    assert [(r.streams, r.mode, r.prompts[0].temperature) for r in compiled] == [
        (1, "plain", 1.0),
        (4, "plain", 1.0),
    ]


def test_what_is_no_cache(golden_float, caches):
    for wrong in (None, golden_float, caches[1].position, caches[1].layers, 5):
        said = f"expected a cache that .* returned, got a {type(wrong).__name__}"
        with pytest.raises(dspark.PromptError, match="extend: " + said):
            dspark.extend(golden_float, wrong, [[1]], [1])
        with pytest.raises(dspark.PromptError, match="draft: " + said):
            dspark.draft(golden_float, wrong, [1])
        with pytest.raises(dspark.PromptError, match="commit: " + said):
            dspark.commit(wrong, [1])


@pytest.mark.parametrize("limits", [{"max_seq_len": 1024}, {"rows": 200}])
def test_a_cache_of_another_model(golden_float, caches, limits):
    """It would be written to at other places, or past its end."""
    limits = dataclasses.replace(golden_float.limits, **limits)
    other = dataclasses.replace(golden_float, limits=limits)
    for model, cache in ((golden_float, dspark.new_cache(other)), (other, caches[1])):
        with compilations() as compiled:
            with pytest.raises(dspark.PromptError, match="extend: this cache was made for another"):
                dspark.extend(model, cache, [[1]], [1])
            with pytest.raises(dspark.PromptError, match="draft: this cache was made for another"):
                dspark.draft(model, cache, [1])
        assert not compiled


def test_a_cache_of_other_precision_or_with_another_position(golden_float, caches):
    for wrong in (
        caches[1].replace(position=jnp.zeros(1, jnp.float32)),
        caches[1].replace(position=jnp.zeros(2, jnp.int32)),
        caches[1].replace(drafter=None),
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), caches[1]),
    ):
        with pytest.raises(dspark.PromptError, match="extend: this cache was made for another"):
            dspark.extend(golden_float, wrong, [[1]], [1])


@pytest.mark.parametrize(
    "batch", [0, -1, True, "a", 1.0, None, [1], np.array([1]), jnp.array([1]), 2**31, 10**30]
)
def test_numbers_of_streams_that_are_none(golden_float, batch):
    with pytest.raises(
        dspark.ConfigError, match="new_cache: batch: .* is not an integer from 1 to"
    ):
        dspark.new_cache(golden_float, batch)


def test_numbers_of_streams(golden_float):
    for two in (2, np.int64(2), np.array(2), jnp.int32(2)):
        assert dspark.new_cache(golden_float, two).position.shape == (2,)


def test_streams_that_no_memory_holds(golden_float):
    with pytest.raises(
        dspark.ConfigError, match="new_cache: 2000000000 streams of max_seq_len 128"
    ):
        dspark.new_cache(golden_float, 2_000_000_000)


@pytest.mark.parametrize("count", [True, False, "1", 1.0, [1]])
def test_a_count_of_drafts_that_is_none(golden_float, caches, count):
    with pytest.raises(dspark.ConfigError, match="count: .* is not an integer; use 1 to 5"):
        dspark.draft(golden_float, caches[1], [8], count=count)
