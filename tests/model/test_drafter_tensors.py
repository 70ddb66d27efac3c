"""Every tensor of the drafter is read once and used (float mode); stages share nothing with main
layers.
"""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.loading.load import DSpark
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import RandomSource, ShapeSource
from dspark_jax.model.segments import LayerKind

from helpers.golden_parts import (
    draft_case,
    draft_from_hidden,
    draft_of,
    run,
)
from helpers.support import GOLDENS, max_error

CONFIG = ModelConfig.from_file(GOLDENS)


# Every tensor is read once and used


class CountingSource(ShapeSource):
    def __init__(self):
        super().__init__()
        self.names = []

    def __call__(self, declared, prefixes):
        self.names += [spec.name for prefix in prefixes for spec, _ in declared.pieces(prefix)]
        return super().__call__(declared, prefixes)


@pytest.mark.parametrize("config", [CONFIG, v4_flash_0731()], ids=["golden", "0731"])
def test_every_tensor_is_consumed_once(config):
    source = CountingSource()
    DSpark(config, Numerics(), source)
    assert len(source.names) == len(set(source.names))
    if config == CONFIG:
        stored = {
            name.removesuffix(".scale").removesuffix(".weight")
            for name in OfficialCheckpoint.open(GOLDENS).names()
        }
        assert {name.removesuffix(".weight") for name in source.names} == stored
    else:
        stored = [
            stage
            for stage in range(3)
            for spec in source.specs.values()
            if spec.name.startswith(f"mtp.{stage}.")
            for _ in spec.stored()
        ]
        assert [stored.count(stage) for stage in range(3)] == [1568, 1565, 1572]


def pieces_of(drafter):
    """(official name, path of the parameter below the drafter, index of the piece) of every tensor
    `mtp.*`.
    """
    for path, variable in nnx.to_flat_state(nnx.split(drafter)[1]):
        declared = variable.get_metadata()["declared"]
        stages = CONFIG.n_draft_stages if declared.stacked else 1
        for stage in range(stages):
            for spec, place in declared.pieces(f"mtp.{stage}." if declared.stacked else "mtp.*."):
                yield (
                    spec.name,
                    ".".join(map(str, path)),
                    ((stage,) if declared.stacked else ()) + (place or (...,)),
                )


def test_every_draft_tensor_changes_the_draft(golden_float, expected_float):
    """Each tensor perturbed alone; of the experts exactly those that the draft is routed to."""
    base, chosen = draft_of(golden_float, expected_float)
    rng, unused, untouched_experts = np.random.default_rng(0), [], 0
    for name, path, place in pieces_of(golden_float.module.drafter):

        def perturb(a, place=place):
            a[place] += rng.standard_normal(a[place].shape) * (np.abs(a).max() + 0.5)
            return a

        draft, _ = draft_of(golden_float, expected_float, change={f"drafter.{path}": perturb})
        values = "confidence" if name.endswith("confidence_head.proj.weight") else "logits"
        differs = max_error(getattr(draft, values), getattr(base, values)) > 1e-4
        if ".experts." in name and int(name.split(".")[4]) not in chosen[int(name.split(".")[1])]:
            untouched_experts += 1
            assert not differs, name
        elif not differs:
            unused.append(name)
    assert not unused
    assert 0 < untouched_experts < 3 * 8 * 3


# Stages share nothing with main layers


def test_stages_are_window_layers_with_score_routing_whatever_the_main_layers_are():
    config = dataclasses.replace(
        CONFIG, compress_ratios=(4, 8, 4, 8, 4, 8, 4, 0, 0, 0), num_hash_layers=7
    )
    module = DSpark(config, Numerics(), ShapeSource())
    assert [block.kind for block in module.drafter.stages] == [LayerKind(ratio=0, hashed=False)]
    names = [spec.name for spec in _specs(config).values() if spec.name.startswith("mtp.")]
    assert not any("compressor" in name or "indexer" in name or "tid2eid" in name for name in names)
    assert sum("gate.bias" in name for name in names) == 3


def _specs(config):
    source = ShapeSource()
    DSpark(config, Numerics(), source)
    return source.specs


def test_drafts_do_not_depend_on_the_kinds_of_main_layers(expected_float):
    """No main layer with ratio 0, all hash-routed: the same draft tensors give the same bits."""
    case, drafts = draft_case(expected_float, 1), []
    for ratios, hashed in (((0,), 0), ((4,), 1)):
        config = dataclasses.replace(
            CONFIG,
            num_hidden_layers=1,
            num_hash_layers=hashed,
            dspark_target_layer_ids=(0,),
            compress_ratios=(*ratios, 0),
        )
        module = DSpark(config, Numerics(activation_quant=False), NamedSource())
        hidden = case.hidden[None, :, : CONFIG.hidden_size]
        drafts.append(
            run(
                draft_from_hidden,
                config,
                module,
                hidden,
                case.positions[None].astype(np.int32),
                case.token,
            )[0]
        )
    assert np.array_equal(drafts[0].logits, drafts[1].logits)
    assert np.ptp(drafts[0].logits) > 1


class NamedSource:
    """Random values that depend on the tensor's name only, not on what was made before it."""

    packed_experts = columns_first = False

    def __call__(self, declared, prefixes):
        seed = sum(f"{prefixes[0]}{declared.tensor}".encode())
        return RandomSource(seed)(declared, prefixes)
