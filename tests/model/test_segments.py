"""Which layers are scanned together: whole expected plans, written out."""

import dataclasses

import pytest

from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.model.segments import LayerKind, SegmentPlan, layer_kinds, segments

from helpers.support import GOLDENS

HASH, SCORE = (lambda ratio: LayerKind(ratio, True)), (lambda ratio: LayerKind(ratio, False))


def config_of(ratios, hash_layers):
    base = ModelConfig.from_file(GOLDENS)
    return dataclasses.replace(
        base,
        num_hidden_layers=len(ratios),
        num_hash_layers=hash_layers,
        dspark_target_layer_ids=(0,),
        compress_ratios=(*ratios, *[0] * base.n_draft_stages),
    )


def test_0731_is_three_segments():
    assert segments(v4_flash_0731()) == (
        SegmentPlan((HASH(0),), repeats=2, first=0),
        SegmentPlan((HASH(4),), repeats=1, first=2),
        SegmentPlan((SCORE(128), SCORE(4)), repeats=20, first=3),
    )


def test_goldens_are_three_segments():
    assert segments(ModelConfig.from_file(GOLDENS)) == (
        SegmentPlan((HASH(0),), repeats=2, first=0),
        SegmentPlan((HASH(4),), repeats=1, first=2),
        SegmentPlan((SCORE(8), SCORE(4)), repeats=2, first=3),
    )


def test_layer_ids_of_a_member_are_a_unit_apart():
    last = segments(v4_flash_0731())[2]
    assert last.layer_ids(0) == tuple(range(3, 43, 2))
    assert last.layer_ids(1) == tuple(range(4, 43, 2))


@pytest.mark.parametrize(
    "ratios, hash_layers, expected",
    [
        ((0,), 0, [((SCORE(0),), 1, 0)]),
        ((4,), 1, [((HASH(4),), 1, 0)]),
        ((0, 0, 0), 0, [((SCORE(0),), 3, 0)]),
        ((0, 0, 0), 2, [((HASH(0),), 2, 0), ((SCORE(0),), 1, 2)]),
        ((4, 8, 4), 0, [((SCORE(4),), 1, 0), ((SCORE(8),), 1, 1), ((SCORE(4),), 1, 2)]),
        ((4, 8, 4, 8, 16), 0, [((SCORE(4), SCORE(8)), 2, 0), ((SCORE(16),), 1, 4)]),
        ((4, 4, 8, 4, 4, 8), 0, [((SCORE(4), SCORE(4), SCORE(8)), 2, 0)]),
    ],
)
def test_plans(ratios, hash_layers, expected):
    assert segments(config_of(ratios, hash_layers)) == tuple(
        SegmentPlan(*plan) for plan in expected
    )


@pytest.mark.parametrize(
    "ratios, hash_layers", [((0, 4, 0, 4, 8, 8, 128), 3), ((8,) * 7, 7), ((4, 128) * 5 + (4,), 1)]
)
def test_every_layer_lies_in_one_segment_with_its_own_kind(ratios, hash_layers):
    config = config_of(ratios, hash_layers)
    found = {
        layer: kind
        for plan in segments(config)
        for i, kind in enumerate(plan.unit)
        for layer in plan.layer_ids(i)
    }
    assert found == dict(enumerate(layer_kinds(config)))
    assert sum(len(plan.unit) * plan.repeats for plan in segments(config)) == len(ratios)
