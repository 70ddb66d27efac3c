"""A config of fewer layers: every size as it was, the kinds of layers in their proportion."""

import dataclasses
from collections import Counter

from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The config with so many main layers; draft stages and all sizes stay.

    A layer's kind is its compress ratio and whether it is routed by token id. Each kind keeps its
    share of the layers, and at least one as long as there are layers enough; kinds keep their
    order, and so does their alternation. The drafter taps layers at the same distance from the last
    one. With fewer layers than taps it taps all of them, so that its projection is narrower.

    Raises ConfigError for fewer than 1 layer, or more than the config has.
    """
    whole = config.num_hidden_layers
    if not 1 <= layers <= whole:
        raise ConfigError(f"layers: {layers} is not between 1 and the {whole} of this config")
    kept = _kept(config, layers)
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        num_hash_layers=sum(i < config.num_hash_layers for i in kept),
        compress_ratios=tuple(config.compress_ratios[i] for i in kept)
        + config.compress_ratios[whole:],
        dspark_target_layer_ids=_taps(config.dspark_target_layer_ids, whole, layers),
    )


def _kept(config: ModelConfig, layers: int) -> list[int]:
    """Which layers stay: the first ones of each kind."""
    kinds = [
        (config.compress_ratios[i], i < config.num_hash_layers)
        for i in range(config.num_hidden_layers)
    ]
    quota, seen, kept = _quota(Counter(kinds), layers), Counter(), []
    for i, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= quota[kind]:
            kept.append(i)
    return kept


def _quota(counts: Counter, layers: int) -> Counter:
    """How many layers of each kind stay: one of each, the commonest first, and each further one for
    the kind that lacks most of its share; the earlier among equals.
    """
    share = {kind: layers * count / counts.total() for kind, count in counts.items()}
    quota = Counter({kind: 1 for kind, _ in counts.most_common(layers)})
    while quota.total() < layers:
        quota[max(share, key=lambda kind: share[kind] - quota[kind])] += 1
    return quota


def _taps(taps: tuple[int, ...], whole: int, layers: int) -> tuple[int, ...]:
    """Those that would lie before the first layer take the lowest ones that are free."""
    moved = {tap - whole + layers for tap in taps if tap - whole + layers >= 0}
    free = [i for i in range(layers) if i not in moved]
    return tuple(sorted([*moved, *free[: len(taps) - len(moved)]]))
