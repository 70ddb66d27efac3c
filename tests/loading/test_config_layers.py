"""Configs of fewer layers, against tables written down by hand."""

import dataclasses

import pytest

from dspark_jax.config import tiny, v4_flash_0731
from dspark_jax.config_layers import with_layers
from dspark_jax.errors import ConfigError

FLASH = {  # layers: (ratios, hash-routed, taps)
    1: ((128,), 0, (0,)),
    2: ((128, 4), 0, (0, 1)),
    3: ((0, 128, 4), 1, (0, 1, 2)),
    4: ((0, 4, 128, 4), 2, (1, 2, 3)),
    6: ((0, 4, 128, 4, 128, 4), 2, (3, 4, 5)),
    42: ((0, 0, 4) + (128, 4) * 19 + (128,), 3, (39, 40, 41)),
    43: ((0, 0, 4) + (128, 4) * 20, 3, (40, 41, 42)),
}


@pytest.mark.parametrize("layers", FLASH)
def test_flash(layers):
    config = with_layers(v4_flash_0731(), layers)
    ratios, hashed, taps = FLASH[layers]
    assert config.compress_ratios == (*ratios, 0, 0, 0)
    assert (config.num_hidden_layers, config.num_hash_layers) == (layers, hashed)
    assert config.dspark_target_layer_ids == taps


def test_every_size_and_every_other_number_stays():
    whole, part = (dataclasses.asdict(with_layers(tiny(), layers)) for layers in (6, 4))
    assert whole == dataclasses.asdict(tiny())
    changed = {name for name in whole if whole[name] != part[name]}
    assert changed == {"num_hidden_layers", "compress_ratios", "dspark_target_layer_ids"}


def test_taps_that_would_lie_before_the_first_layer_move_up():
    early = dataclasses.replace(tiny(), dspark_target_layer_ids=(0, 2, 5))
    assert with_layers(early, 4).dspark_target_layer_ids == (0, 1, 3)


@pytest.mark.parametrize("layers", [0, 7])
def test_as_many_as_there_are_at_most(layers):
    with pytest.raises(ConfigError, match=f"layers: {layers} is not between 1 and the 6"):
        with_layers(tiny(), layers)
