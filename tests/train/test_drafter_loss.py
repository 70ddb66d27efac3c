"""The loss of a drafter against a float64 line of NumPy, position by position, and what is told of
it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.train.drafter_loss import Weights, figures, loss

B, Q, K, V = 4, 3, 5, 11


@pytest.fixture(scope="module")
def case() -> dict:
    """Blocks of four sequences, of which the second has no room for a draft."""
    rng = np.random.default_rng(0)
    valid = np.array([1, 0, 1, 1])[:, None] * np.ones((B, Q))
    return {
        "logits": rng.normal(0, 2, (B, Q, K, V)).astype(np.float32),
        "confidence": rng.normal(0, 2, (B, Q, K)).astype(np.float32),
        "target": rng.normal(0, 2, (B, Q, K, V)).astype(np.float32),
        "text": rng.integers(0, V, (B, Q, K)),
        "share": (valid / valid.sum() * B).astype(np.float32),
        "greedy": np.array([1, 1, 0, 1], np.float32),
    }


def by_hand(case: dict, ce=0.1, l1=0.9, bce=1.0, decay=float(K)) -> float:
    """One draft after the other, in float64."""
    total = weight = 0.0
    for b, q, k in np.ndindex(B, Q, K):
        if case["share"][b, q] == 0:
            continue
        draft = np.exp(case["logits"][b, q, k].astype(np.float64))
        main = np.exp(case["target"][b, q, k].astype(np.float64))
        draft, main = draft / draft.sum(), main / main.sum()
        distance = sum(abs(draft - main))
        sure = 1 / (1 + np.exp(-np.float64(case["confidence"][b, q, k])))
        agreed = 1 - distance / 2
        surprise = -agreed * np.log(sure) - (1 - agreed) * np.log(1 - sure)
        value = -ce * np.log(draft[case["text"][b, q, k]]) + l1 * distance + bce * surprise
        total += np.exp(-k / decay) * value
        weight += np.exp(-k / decay)
    return total / weight


@pytest.mark.parametrize(
    "weights, hand",
    [
        (Weights(), {}),
        (Weights(decay=4.0), {"decay": 4.0}),
        (Weights(1.0, 0.0, 0.0), {"ce": 1.0, "l1": 0.0, "bce": 0.0}),
        (Weights(0.0, 1.0, 0.5, 2.0), {"ce": 0.0, "l1": 1.0, "bce": 0.5, "decay": 2.0}),
    ],
)
def test_the_loss_is_that_of_float64_by_hand(case, weights, hand):
    assert float(loss(weights, **case)[0]) == pytest.approx(by_hand(case, **hand), rel=2e-6)


def test_the_parts_of_a_batch_average_to_the_whole(case):
    """What data parallelism relies on, also where one part has fewer drafts than another."""
    halves = [
        {name: value[half] for name, value in case.items()} for half in (slice(2), slice(2, 4))
    ]
    parts = [loss(Weights(), **half) for half in halves]
    whole, measures = loss(Weights(), **case)
    assert np.mean([float(part[0]) for part in parts]) == pytest.approx(float(whole), rel=1e-6)
    for name, value in measures.items():
        mean = np.mean([np.asarray(part[1][name]) for part in parts], axis=0)
        np.testing.assert_allclose(mean, value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_target_gets_no_gradient_and_the_confidence_moves_nothing_else(case):
    def of(logits, confidence, target, weights=Weights()):
        return loss(
            weights, **{**case, "logits": logits, "confidence": confidence, "target": target}
        )[0]

    arrays = case["logits"], case["confidence"], case["target"]
    draft, sure, main = jax.grad(of, argnums=(0, 1, 2))(*arrays)
    assert np.abs(draft).max() > 0 and np.abs(sure).max() > 0 and np.abs(main).max() == 0
    alone = jax.grad(of)(*arrays, weights=Weights(0.0, 0.0, 1.0))
    assert np.abs(alone).max() == 0  # 1 - TV is what it learns, not a way to be surer


def test_what_is_told_by_position():
    """One greedy block whose third draft is wrong, and one at temperature 1, which is not asked."""
    text = np.array([[[1, 2, 3, 4]], [[1, 1, 1, 1]]])
    logits = np.full((2, 1, 4, 6), -30.0, np.float32)
    for row, token in enumerate((1, 2, 5, 4)):
        logits[:, 0, row, token] = 30.0
    target = logits.copy()
    target[:, :, 1] = np.log([{2: 0.4, 3: 0.6}.get(v, 1e-12) for v in range(6)])
    measures = loss(
        Weights(),
        jnp.asarray(logits),
        jnp.zeros((2, 1, 4)),
        jnp.asarray(target),
        text,
        np.ones((2, 1), np.float32),
        np.array([1.0, 0.0], np.float32),
    )[1]
    told = figures(jax.device_get(measures))
    np.testing.assert_allclose(told["accepted"], [1, 1, 0, 0])
    np.testing.assert_allclose(told["overlap"], [1, 0.4, 1, 1], atol=1e-6)
    np.testing.assert_allclose(told["bias"], [-0.5, 0.1, -0.5, -0.5], atol=1e-6)
    assert told["tokens_per_round"] == pytest.approx(3.0)
