"""Products of small numbers that are divided by their sum stay finite where float64 is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import tiny
from dspark_jax.model.layers.moe import MoE, router_scores
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import Maker, RandomSource
from dspark_jax.pallas_kernels.activation import act_quant, fp4_act_quant


def test_router_scores_are_those_of_float64():
    logits = np.linspace(-170, 60, 4601).astype(np.float32)
    exact = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
    np.testing.assert_allclose(jax.jit(router_scores)(logits), exact, rtol=3e-6)


def test_router_scores_of_usual_logits_keep_their_bits():
    logits = np.random.default_rng(0).normal(0, 10, 4096).astype(np.float32)
    assert np.array_equal(
        jax.jit(router_scores)(logits), jax.jit(lambda x: jnp.sqrt(jax.nn.softplus(x)))(logits)
    )


def test_gradients_stay_finite():
    gradient = jax.jit(jax.grad(lambda x: router_scores(x).sum()))
    logits = jnp.array([-1e4, -200.0, -100.0, -88.0, -80.0, 0.0, 50.0])
    assert np.isfinite(gradient(logits)).all()


@pytest.mark.parametrize("hashed", [False, True])
def test_weights_are_finite_and_add_up_where_all_logits_are_low(hashed):
    """All logits near -100 and -150: softplus would be flushed to zero for every expert."""
    config = dataclasses.replace(tiny(), vocab_size=8)
    moe = MoE(config, Numerics("float32", False), hashed, Maker(RandomSource(0), ("",), False))
    x = np.random.default_rng(1).normal(0, 1, (1, 2, config.hidden_size)).astype(np.float32)
    direction = x / np.sum(x * x, axis=-1, keepdims=True)
    for low in (-100.0, -150.0):
        experts = low - np.arange(config.n_routed_experts) / 4
        moe.gate[...] = jnp.asarray(experts[:, None] * direction[0, :1])
        chosen, weights, _ = moe.route(jnp.asarray(x[:, :1]), jnp.zeros((1, 1), jnp.int32))
        logits = experts[np.asarray(chosen)].astype(np.float64)
        exact = np.exp(logits / 2 - logits.max() / 2)
        exact *= config.routed_scaling_factor / exact.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights, exact, rtol=1e-4)


@pytest.mark.parametrize("quantise", [lambda x: act_quant(x, 128), fp4_act_quant])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e-10])
def test_quantised_activations_of_any_size_are_finite(quantise, size):
    x = np.full((2, 128), size, np.float32)
    y = np.asarray(jax.jit(quantise)(x))
    assert np.isfinite(y).all() and (np.abs(y) <= 2 * size + 1e-30).all()
