"""What a drafter is trained on, and that all of it learns, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import RandomSource
from dspark_jax.train import drafter_stage, quantise
from dspark_jax.train.drafter_text import Sequences

from helpers.quick import quick_jit
from helpers.small_model import CONFIG

ROWS, LENGTH, ANCHORS = 2, 16, 2
BLOCK = CONFIG.dspark_block_size


def sequences(count=7, length=LENGTH) -> Sequences:
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, CONFIG.vocab_size, (count, length)).astype(np.int32)
    return Sequences(tokens, np.full(count, 3), np.full(count, length), np.arange(count) % 2 == 0)


@pytest.fixture(scope="module")
def parts_and_task():
    parts, twin, _ = drafter_stage.build(CONFIG, RandomSource(1))
    main = MainModel(CONFIG, Numerics("float32"), RandomSource(0))
    task = drafter_stage.task(
        CONFIG,
        parts,
        twin,
        main,
        sequences(),
        steps=10,
        rows=ROWS,
        anchors=ANCHORS,
        rates=(1e-2, 1e-2),
        quantise_from=0,
    )
    return parts, task


def test_every_drafter_parameter_gets_a_gradient_and_the_target_none(parts_and_task):
    """Through the storage of the weights and quantised activations. Of the main model, the head and
    the embedding are part of the draft; what its layers hold reaches the loss only as the target
    and as hidden states, both of which are constants.
    """
    parts, task = parts_and_task

    def loss(params, frozen, batch):
        return task.loss(quantise.parameters(params, task.storages), frozen, batch, True)[0]

    gradients = quick_jit(jax.grad(loss, argnums=(0, 1)))
    drafter, main = gradients(parts.values, task.frozen, task.batch(0))
    still = {name for name, g in drafter.items() if not np.abs(g).max() > 0}
    assert still == {name for name in drafter if name.endswith("ffn.bias")} != set()
    moved = {
        str(path[0].key)
        for path, g in jax.tree_util.tree_leaves_with_path(main)
        if np.abs(g).max() > 0
    }
    assert moved == {"embed", "head"}


def test_router_biases_stay():
    """Weight decay must not pull at what gets no gradient."""
    params = {"stages.0.ffn.bias": jnp.ones(3), "norm.weight": jnp.ones(3)}
    gradients = jax.tree.map(jnp.zeros_like, params)
    for keeps, moved in ((drafter_stage.without_router_bias, {"norm.weight"}), (None, set(params))):
        decay = optax.adamw(0.1, weight_decay=0.1)
        optimiser = keeps(decay) if keeps else decay
        updates, _ = optimiser.update(gradients, optimiser.init(params), params)
        assert {name for name, update in updates.items() if update.any()} == moved


def test_anchors_lie_in_what_the_main_model_wrote_with_room_for_a_block():
    starts, ends = np.array([1, 10, 30, 40]), np.array([64, 17, 36, 41])
    seen = [set() for _ in starts]
    for seed in range(300):
        rng = np.random.default_rng(seed)
        places, share = drafter_stage.draw_anchors(starts, ends, 5, 4, rng)
        assert share.mean() == pytest.approx(1 / 4) and places.dtype == np.int32
        for row, (each, of) in enumerate(zip(places, share)):
            seen[row] |= set(each.tolist()) if of.all() else set()
            assert of.all() or not of.any()
    assert seen == [set(range(1, 59)), {10, 11}, {30}, set()]


def test_a_batch_is_a_function_of_its_step_and_every_sequence_comes_once_a_turn():
    held = sequences(count=6)
    by_step = [drafter_stage.batch_of(held, step, 3, ANCHORS, BLOCK, seed=5) for step in range(4)]
    again = drafter_stage.batch_of(held, 2, 3, ANCHORS, BLOCK, seed=5)
    for name, value in again.items():
        np.testing.assert_array_equal(value, by_step[2][name], err_msg=name)
    turns = [np.concatenate([by_step[i]["tokens"], by_step[i + 1]["tokens"]]) for i in (0, 2)]
    for turn in turns:
        assert {tuple(row) for row in turn} == {tuple(row) for row in held.tokens}
    assert (turns[0] != turns[1]).any()
    assert (by_step[0]["anchors"] != by_step[1]["anchors"]).any()
    greedy = dict(zip(map(tuple, held.tokens), held.greedy))
    for row, of in zip(again["tokens"], again["greedy"]):
        assert of == greedy[tuple(row)]
