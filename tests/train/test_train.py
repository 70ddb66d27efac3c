"""Training: what it simulates is what is stored, every parameter learns, and a run is a pure
function of its seed and steps.
"""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.writer import write_official
from dspark_jax.errors import ConfigError, NumericsError
from dspark_jax.loading.load import expected_tensors, load
from dspark_jax.model.parameters import RandomSource
from dspark_jax.train import (
    data,
    drafter_stage,
    fetch_text,
    loop,
    main_stage,
    optimiser,
    quantise,
    states,
    synthetic,
    tokenizer,
    weights,
)

from helpers.train_parts import CONFIG, VOCAB

LENGTH, ROWS = 16, 4


def stream(kind: int, tokens: int = 400) -> data.Stream:
    """Cycles of a few ids, different for each kind."""
    ids = 2 + (np.arange(tokens) % (3 + kind)) + 5 * kind
    return data.Stream(ids.astype(np.uint16), np.arange(0, tokens, 7))


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """Programs that run a few small steps take longer to optimise than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    streams = {kind: stream(i) for i, kind in enumerate(data.MIXTURE)}
    return data.Corpus(streams, streams, np.ones(VOCAB, np.int32), seed=3)


@pytest.fixture(scope="module")
def main(corpus):
    """(parts, task, official prefixes) of a small main model."""
    parts, twin, prefixes = main_stage.build(CONFIG, 0, corpus.frequencies(VOCAB))
    return (
        parts,
        main_stage.task(CONFIG, parts, twin, corpus, 24, ROWS, LENGTH, (2e-2, 1e-2), 16),
        prefixes,
    )


@pytest.fixture(scope="module")
def exported(main, tmp_path_factory):
    """(directory in the official layout, main parts, drafter parts) of untrained values."""
    parts, _, prefixes = main
    drafter, _, drafter_prefixes = drafter_stage.build(CONFIG, RandomSource(1))
    items = weights.official_items(parts.module(parts.values), prefixes)
    items += weights.official_items(drafter.module(drafter.values), drafter_prefixes)
    path = tmp_path_factory.mktemp("export")
    write_official(path, CONFIG.to_dict(), items)
    return path, parts, drafter


@pytest.fixture(scope="module")
def shipped(exported):
    """The model that those files give."""
    return load(exported[0], max_seq_len=64).module


@pytest.fixture(scope="module")
def gradients(main):
    """Compiled (params, batch) -> ((loss, measures), gradients), in the checkpoint's storage."""
    task = main[1]

    def loss(params, batch):
        return task.loss(quantise.parameters(params, task.storages), (), batch, True)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def still(gradients) -> set[str]:
    return {name for name, g in gradients.items() if not np.abs(g).max() > 0}


def router_biases(gradients) -> set[str]:
    """Balanced by load, not by gradient."""
    return {name for name in gradients if name.endswith("ffn.bias")}


def test_every_main_parameter_gets_a_gradient(main, gradients):
    grads = gradients(main[0].values, main[1].batch(0))[1]
    assert still(grads) == router_biases(grads) != set()


def test_loss_falls(main, gradients):
    params, task, losses = main[0].values, main[1], []
    adam = optax.adam(1e-2)
    state, update = adam.init(params), jax.jit(adam.update)
    for step in range(12):
        (_, measures), grads = gradients(params, task.batch(step))
        updates, state = update(grads, state)
        params = task.after(optax.apply_updates(params, updates), measures, step)
        losses.append(float(measures["tokens_loss"]))
    assert losses[-1] < 0.6 * losses[0], losses


def test_router_bias_follows_the_load(main, gradients):
    """An expert that got less than its share is favoured, one that got more is not."""
    params, task = main[0].values, main[1]
    (_, measures), _ = gradients(params, task.batch(0))
    after = task.after(params, measures, 0)
    ((name, load),) = measures["load"].items()
    moved = np.sign(np.asarray(after[name] - params[name]))
    np.testing.assert_array_equal(moved, np.sign(load.mean(-1, keepdims=True) - load))
    assert load.sum() == ROWS * LENGTH * CONFIG.num_experts_per_tok


def toy() -> loop.Task:
    """Least squares with one bfloat16 matrix under Muon and one float32 vector under Adam,
    quantised from step 5 of 8 on.
    """

    def loss(params, frozen, batch, quantised):
        error = batch["x"] @ params["w"].T * frozen + params["b"] - batch["y"]
        return jnp.mean(error**2), {
            "tokens_loss": jnp.mean(error**2),
            "quantised": jnp.float32(quantised),
        }

    def batch(step):
        x = np.random.default_rng(step).standard_normal((ROWS, 6)).astype(np.float32)
        return {"x": x, "y": x @ np.ones((6, 4), np.float32)}

    tensors = {"w": "attn.wq_a", "b": "norm.weight"}
    optimise = optimiser.make(tensors, lambda _: 0.05, lambda _: 0.05)
    return loop.Task(
        "toy",
        loss,
        batch,
        optimise,
        {"w": "bf16", "b": "f32"},
        steps=8,
        quantise_from=5,
        frozen=jnp.float32(1),
    )


TOY = {"w": jnp.full((4, 6), 0.3), "b": jnp.zeros(4)}


def test_resumed_run_equals_uninterrupted(tmp_path):
    task, seen = toy(), []
    whole = loop.fit(
        task,
        TOY,
        tmp_path / "whole",
        lambda step, m: seen.append((step, float(m["quantised"]))),
    )
    assert seen == [(1 + i, float(i >= 5)) for i in range(8)]
    for stop in (2, 6, None):
        parts = loop.fit(task, TOY, tmp_path / "parts", lambda *_: None, stop=stop)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, parts[name], err_msg=name)
        assert (value != TOY[name]).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "whole"]


def state_of_toy() -> states.State:
    return states.State(TOY, toy().optimiser.init(TOY))


def test_interrupt_keeps_the_steps_done(tmp_path):
    def interrupt(step, _):
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    path = tmp_path / "toy"
    with pytest.raises(KeyboardInterrupt):
        loop.fit(toy(), TOY, path, interrupt)
    assert states.load(path, state_of_toy()).step == 3


def test_a_loss_that_is_no_number_stops_and_names_the_step(tmp_path):
    with pytest.raises(NumericsError, match="at step 1"):
        loop.fit(toy(), TOY | {"b": jnp.full(4, jnp.nan)}, tmp_path / "toy", lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_state_of_another_model_is_refused_by_parameter(tmp_path):
    states.save(tmp_path / "main", states.State(TOY, ()))
    with pytest.raises(ConfigError, match="these parameters differ: w"):
        states.load_params(tmp_path / "main", TOY | {"w": jnp.zeros((3, 3))})


def test_missing_state_names_the_stage(tmp_path):
    with pytest.raises(ConfigError, match="run the stage `main`"):
        states.load_params(tmp_path / "main", {})


def test_balance_pushes_towards_idle_experts():
    bias = optimiser.balanced(jnp.zeros((1, 3)), jnp.array([[10.0, 20.0, 30.0]]), jnp.asarray(0.5))
    np.testing.assert_array_equal(bias, [[0.5, 0.0, -0.5]])


def test_muon_treats_gate_and_up_rows_apart():
    rng = np.random.default_rng(0)
    tensors = {"w13": "ffn.experts.{e}.w1|ffn.experts.{e}.w3", "w1": "ffn.experts.{e}.w2"}
    make = optimiser.make(tensors, lambda _: 1.0, lambda _: 1.0)
    both = jnp.asarray(rng.standard_normal((2, 3, 8, 4)), jnp.float32)
    params = {"w13": jnp.zeros_like(both), "w1": jnp.zeros((2, 3, 4, 4))}
    updates, _ = jax.jit(make.update)(
        {"w13": both, "w1": both[:, :, :4]}, make.init(params), params
    )
    np.testing.assert_allclose(updates["w13"][:, :, :4], updates["w1"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (3, 5)])
def test_fp8_is_what_the_writer_stores(shape):
    w = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32) * np.float32(0.1)
    w[0, :2] = 0
    for layer, stored in zip(w, np.asarray(quantise.stored(jnp.asarray(w), "fp8"))):
        np.testing.assert_array_equal(stored, formats.dequantise_fp8(*formats.quantise_fp8(layer)))


def test_official_files_hold_what_was_trained(exported, shipped):
    """Read back, every parameter has the bits of its trained value passed through its storage; no
    tensor lacks or is too many.
    """
    path, *trained = exported
    OfficialCheckpoint.open(path).check(list(expected_tensors(CONFIG).values()))
    for parts, loaded in zip(trained, (shipped.main, shipped.drafter)):
        through_storage = jax.jit(lambda values, of=parts.storages: quantise.parameters(values, of))
        expected, loaded = through_storage(parts.values), weights.take_apart(loaded).values
        assert expected.keys() == loaded.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(value, loaded[name], err_msg=name)


def test_hash_tables_ship(main, shipped):
    trained = main[0].module(main[0].values)
    np.testing.assert_array_equal(
        shipped.main.segments[0][0].ffn.table[...], trained.segments[0][0].ffn.table[...]
    )


@pytest.mark.heavy
def test_loss_of_a_quantised_step_is_the_shipped_models(main, gradients, exported, shipped):
    batch = main[1].batch(0)
    trained = gradients(main[0].values, batch)[0][1]["tokens_loss"]
    losses = nnx.jit(lambda model, tokens: main_stage.token_losses(model, tokens)[0].mean())
    unquantised = load(exported[0], max_seq_len=64, activation_quant=False).module
    right, wrong = (losses(module.main, batch["tokens"]) for module in (shipped, unquantised))
    assert float(trained) == pytest.approx(float(right), rel=1e-5)
    assert float(trained) != pytest.approx(float(wrong), rel=1e-4)


def test_batch_is_a_function_of_the_step(corpus):
    first, kinds = corpus.batch(7, 8, LENGTH)
    again, other = corpus.batch(7, 8, LENGTH)[0], corpus.batch(8, 8, LENGTH)[0]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and first.shape == (8, LENGTH + 1) and len(kinds) == 8


def test_batches_follow_the_mixture(corpus):
    kinds = np.concatenate([corpus.batch(step, 8, LENGTH)[1] for step in range(200)])
    shares = np.bincount(kinds, minlength=len(data.MIXTURE)) / kinds.size
    np.testing.assert_allclose(shares, list(data.MIXTURE.values()), atol=0.01)


def test_windows_begin_where_they_may_and_stay_inside():
    s = data.Stream(np.arange(60, dtype=np.uint16), np.array([0, 7, 30, 41]))
    assert {int(s.window(u, 20)[0]) for u in np.linspace(0, 0.999, 50)} == {
        0,
        7,
        30,
    }  # from 41 on only 19 are left
    assert all(
        (s.window(u, 20) == s.window(u, 20)[0] + np.arange(20)).all() for u in (0, 0.5, 0.999)
    )


def test_hash_tables_balance_the_text():
    frequencies = 1.0 / np.arange(1, VOCAB + 1)
    table = main_stage.balanced_table(frequencies, 8, 2, np.random.default_rng(0))
    load = sum(np.bincount(table[:, a], frequencies, 8) for a in range(2))
    assert (table[:, 0] != table[:, 1]).all() and load.max() < 1.35 * load.mean()


@pytest.mark.parametrize("kind", list(synthetic.GENERATORS))
def test_generated_text_depends_on_the_seed_alone(kind):
    first = synthetic.documents(kind, 1, 5000)
    assert first == synthetic.documents(kind, 1, 5000) != synthetic.documents(kind, 2, 5000)


def test_generated_sums_are_right():
    for document in synthetic.documents("math", 0, 40_000):
        for left, right in [
            line.split(" = ")
            for line in document.split("\n")
            if line.count(" = ") == 1 and ":" not in line
        ]:
            if (
                left.replace("x", "*")
                .replace(" ", "")
                .replace("*", "")
                .replace("+", "")
                .replace("-", "")
                .isdigit()
            ):
                assert eval(left.replace("x", "*")) == int(right), document


def test_generated_functions_are_python():
    for document in synthetic.documents("functions", 0, 30_000):
        compile(document, "generated", "exec")


def test_tokenizer_round_trips_and_keeps_digits_single():
    texts = [d for kind in synthetic.GENERATORS for d in synthetic.documents(kind, 0, 20_000)]
    t = tokenizer.build(texts, 400)
    for text in (*texts[:20], "é \t ü\n\n   x = 12345  \n", " two  spaces "):
        assert t.decode(t.encode(text).ids) == text
    assert t.encode("12 345").tokens == ["1", "2", "Ġ", "3", "4", "5"]
    assert t.token_to_id(tokenizer.EOS) == 0 and t.token_to_id(tokenizer.NOISE) == 1
    ids = t.encode("naïve 12").ids
    assert sum(tokenizer.token_bytes(t)[i] for i in ids) == len("naïve 12".encode())


def test_unreachable_source_names_itself(monkeypatch):
    monkeypatch.setattr(fetch_text.shutil, "which", lambda name: None)
    message = "apt-get is not installed.*npm is not installed"
    with pytest.raises(fetch_text.SourceError, match=message):
        fetch_text.prose()
    with pytest.raises(fetch_text.SourceError, match="no Python standard library found under"):
        fetch_text.code("/nonexistent")


def test_log_is_one_json_object_a_step(tmp_path):
    log = loop.Log(tmp_path / "a" / "log.jsonl")
    log.write(step=1, loss=np.float32(0.123456))
    assert json.loads((tmp_path / "a" / "log.jsonl").read_text()) == {"step": 1, "loss": 0.1235}
