"""Whatever the process has set for jax, the library computes the same bits, and leaves the setting
as it was.
"""

import concurrent.futures
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import dspark_jax as dspark
from dspark_jax.runtime.settings import _ASSUMED, own_settings

from helpers.quick import compiled_quickly
from helpers.support import golden_model

OTHER = {
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "matmul precision": lambda: jax.default_matmul_precision("bfloat16"),
    "NaN is an error": lambda: jax.debug_nans(True),
    "infinity is an error": lambda: jax.debug_infs(True),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "guard to the host": lambda: jax.transfer_guard_device_to_host("disallow_explicit"),
    "leaks": lambda: jax.check_tracer_leaks(True),
    "another kind of key": lambda: jax.default_prng_impl("rbg"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "old keys": lambda: jax.legacy_prng_key("error"),
    "no jit": lambda: jax.disable_jit(True),
    "no execution": lambda: jax.no_execution(True),
    "no tracing": lambda: jax.no_tracing(True),
    "default device": lambda: jax.default_device(jax.devices()[0]),
    "a mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",))),
    "an Auto mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))),
    "an old mesh": lambda: jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)),
}


PROMPT = [7, 200, 31, 4, 99, 100]


@pytest.fixture(scope="module", autouse=True)
def quick():
    """The bits of one program are compared with those of the same program."""
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def as_usual(small_model):
    return everything(small_model)


def everything(model, prompt=PROMPT) -> list[np.ndarray]:
    """What the public functions return, without those that compile programs of their own."""
    out = dspark.generate(model, prompt, 12, "block", stop_token_ids=[])
    events = list(dspark.stream(model, prompt, 12, "block", stop_token_ids=[]))
    logits, hidden, cache = dspark.prefill(model, prompt)
    draft = dspark.draft(model, cache, [out.tokens[0][0]])
    more, _, cache = dspark.extend(model, cache, [out.tokens[0][:2]], [2])
    cache = dspark.commit(cache, [1])
    tokens = [token for event in events for token in event.tokens]
    arrays = (logits, hidden, draft.logits, draft.confidence, more, cache.position)
    return [np.asarray(out.tokens), np.asarray(tokens), *map(np.asarray, arrays)]


IN_MAKE_TEST = "x64", "strict promotion", "matmul precision", "NaN is an error", "a mesh"


@pytest.mark.parametrize(
    "setting",
    [pytest.param(n, marks=() if n in IN_MAKE_TEST else pytest.mark.heavy) for n in OTHER],
)
def test_the_same_bits_under_any_setting(small_model, as_usual, setting):
    with OTHER[setting]():
        here = everything(small_model)
    for usual, value in zip(as_usual, here, strict=True):
        assert value.dtype == usual.dtype and np.array_equal(value, usual)


def test_a_model_loaded_under_other_settings_is_the_same(golden_float):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        model = golden_model(activation_quant=False)
    here, usual = (jax.tree.leaves(m.split[1]) for m in (model, golden_float))
    for a, b in zip(here, usual, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_threads_at_once_each_under_its_own_settings(small_model, as_usual):
    """What a thread has set reaches neither our programs nor another thread."""
    settings = ["x64", "a mesh", "strict promotion", "no jit"]

    def run(setting):
        with OTHER[setting]():
            out = dspark.generate(small_model, PROMPT, 12, "block", stop_token_ids=[])
            return out.tokens, jnp.arange(2).dtype

    with concurrent.futures.ThreadPoolExecutor(len(settings)) as threads:
        done = list(threads.map(run, settings * 3))
    for setting, (tokens, dtype) in zip(settings * 3, done, strict=True):
        assert np.array_equal(tokens, as_usual[0])
        assert dtype == (np.int64 if setting == "x64" else np.int32)


def test_between_the_events_of_a_stream_the_setting_is_the_callers(small_model):
    with jax.enable_x64(True):
        for _ in dspark.stream(small_model, PROMPT, 12, "block", stop_token_ids=[]):
            assert jnp.arange(2).dtype == np.int64
    assert jnp.arange(2).dtype == np.int32


def test_what_is_assumed_are_jaxs_defaults():
    """Else every program would be compiled under a setting of its own."""
    for name, value in _ASSUMED.items():
        current = getattr(jax.config, f"jax_{name}", None)
        assert current in (None, value), name


def test_settings_come_back_after_an_error():
    with jax.enable_x64(True), contextlib.suppress(ZeroDivisionError):
        with own_settings():
            assert jnp.arange(2).dtype == np.int32
            raise ZeroDivisionError
    assert jnp.arange(2).dtype == np.int32


@pytest.mark.parametrize("kind", ["nan", "divide", "oob"])
def test_a_setting_that_cannot_be_replaced_is_one_error(small_model, kind):
    name = f"jax_error_checking_behavior_{kind}"
    jax.config.update(name, "raise")
    try:
        with pytest.raises(dspark.ConfigError, match=f"{name} is 'raise'.*set it to 'ignore'"):
            dspark.prefill(small_model, [1, 2])
    finally:
        jax.config.update(name, "ignore")
