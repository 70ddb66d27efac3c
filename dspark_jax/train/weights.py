"""Between Flax modules and the flat dictionaries {path: array} that the trainer, its files and the
exporter work on.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.model.parameters import Declaration


@dataclasses.dataclass(frozen=True)
class Parts:
    """A module taken apart. values: the trained parameters, float32 by path; declared: what they
    are; rest: not trained.
    """

    graphdef: nnx.GraphDef
    template: nnx.State
    rest: nnx.State
    values: dict[str, jax.Array]
    declared: dict[str, Declaration]

    @property
    def storages(self) -> dict[str, str]:
        return {name: declared.storage for name, declared in self.declared.items()}

    @property
    def tensors(self) -> dict[str, str]:
        """Official tensor names without the layers' prefix."""
        return {name: declared.tensor for name, declared in self.declared.items()}

    def module(
        self, values: dict[str, jax.Array], graphdef: nnx.GraphDef | None = None
    ) -> nnx.Module:
        """The module with other values; graphdef: the structure of a twin that differs in its
        numerics only.
        """
        flat = [
            (path, variable.replace(values[_name(path)]))
            for path, variable in nnx.to_flat_state(self.template)
        ]
        return nnx.merge(graphdef or self.graphdef, nnx.from_flat_state(flat), self.rest)


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def take_apart(module: nnx.Module) -> Parts:
    graphdef, template, rest = nnx.split(module, nnx.Param, ...)
    flat = nnx.to_flat_state(template)
    values = {_name(path): jnp.asarray(variable[...], jnp.float32) for path, variable in flat}
    return Parts(
        graphdef,
        template,
        rest,
        values,
        {_name(path): variable.get_metadata("declared") for path, variable in flat},
    )


def official_items(
    module: nnx.Module, prefixes: dict[str, tuple[str, ...]]
) -> list[tuple[TensorSpec, np.ndarray]]:
    """Every official tensor of a module with its values. prefixes: by parameter path, the name
    prefix of each stacked layer.
    """
    items = []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        declared, array = variable.get_metadata("declared"), np.asarray(variable[...])
        layers = array if declared.stacked else [array]
        for prefix, layer in zip(prefixes[_name(path)], layers, strict=True):
            items += [(spec, layer[place]) for spec, place in declared.pieces(prefix)]
    return items


class PrefixSource:
    """Wraps a parameter source and remembers, by declaration identity, which layers each parameter
    stands for.
    """

    packed_experts = columns_first = False

    def __init__(self, source):
        self._source, self.calls = source, []

    def __call__(self, declared, prefixes):
        self.calls.append((declared, prefixes))
        return self._source(declared, prefixes)

    def prefixes(self, module: nnx.Module) -> dict[str, tuple[str, ...]]:
        by_identity = {id(declared): prefixes for declared, prefixes in self.calls}
        flat = nnx.to_flat_state(nnx.state(module))
        return {
            _name(path): by_identity[id(variable.get_metadata("declared"))]
            for path, variable in flat
        }
