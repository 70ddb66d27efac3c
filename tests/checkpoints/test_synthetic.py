"""Synthetic checkpoints: sound, well scaled, the same whatever the shards, written in bounded
memory.
"""

import dataclasses
import math
import tracemalloc

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints import synthetic
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.synthetic import write_synthetic
from dspark_jax.checkpoints.tensor_spec import TensorSpec

from helpers import official_table
from helpers.official_files import CONFIG, SPECS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic")
    seen = []
    write_synthetic(
        path,
        CONFIG.to_dict(),
        SPECS,
        seed=3,
        max_shard_bytes=500_000,
        progress=lambda *done: seen.append(done),
    )
    assert len(seen) == len(SPECS) and seen[-1][0] == seen[-1][1]
    return path


def test_sound_and_well_scaled(directory):
    with OfficialCheckpoint.open(directory) as checkpoint:
        checkpoint.check(SPECS)
        assert len(checkpoint.files) > 8
        for spec in SPECS:
            values = checkpoint.read(spec).astype(np.float64)
            assert np.isfinite(values).all()
            if (
                len(spec.shape) == 2
                and spec.storage in ("bf16", "fp8", "fp4")
                and spec.name != "embed.weight"
            ):
                # Powers of two leave a factor sqrt(2) either way, and a small tensor may have only
                # the larger or smaller scale.
                assert 0.44 < values.std() * math.sqrt(spec.shape[1]) < 1.8, spec.name
            if spec.storage == "i64":
                assert all(len(set(row)) == CONFIG.num_experts_per_tok for row in values.tolist())
                assert set(values.ravel()) == set(range(CONFIG.n_routed_experts))


def test_values_depend_on_seed_and_name_only(directory, tmp_path):
    write_synthetic(tmp_path / "same", CONFIG.to_dict(), SPECS[::-1], seed=3, max_shard_bytes=None)
    write_synthetic(tmp_path / "other", CONFIG.to_dict(), SPECS, seed=4)
    with (
        OfficialCheckpoint.open(directory) as a,
        OfficialCheckpoint.open(tmp_path / "same") as b,
        OfficialCheckpoint.open(tmp_path / "other") as c,
    ):
        for spec in SPECS:
            assert a.read(spec).tobytes() == b.read(spec).tobytes()
            if spec.storage in ("fp8", "fp4"):
                assert a.read(spec).tobytes() != c.read(spec).tobytes()


def test_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "BLOCK_BYTES", 1 << 20)
    shape = (40_000, 512)
    specs = [
        TensorSpec("a.weight", shape, "bf16"),
        TensorSpec("b", shape, "fp8"),
        TensorSpec("c", shape, "fp4"),
    ]
    tracemalloc.start()
    write_synthetic(tmp_path, {}, specs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, f"{peak:,} bytes for tensors of 41, 20 and 10 MB"


@pytest.mark.heavy
def test_a_model_made_of_one_runs(tmp_path):
    config = dataclasses.replace(
        CONFIG,
        num_hidden_layers=2,
        num_hash_layers=1,
        compress_ratios=(0, 4, 0),
        dspark_target_layer_ids=(1,),
    )
    write_synthetic(tmp_path, config.to_dict(), official_table.expected(config))
    model = dspark.load(tmp_path, max_seq_len=64)
    logits, hidden, _ = dspark.prefill(model, list(range(3, 30)))
    logits, hidden = np.asarray(logits), np.asarray(hidden)
    assert np.isfinite(logits).all() and np.isfinite(hidden).all()
    assert 0.3 < logits.std() < 3 and 0.05 < hidden.std() < 50
