"""The settings of jax that the library runs under, whatever the process around it has set.

A notebook may have switched on 64-bit types, strict promotion, a transfer guard, another default
device or matrix precision, or a mesh of its own. Our programs are traced and run under the settings
that they were written and tested for; after each call the caller's hold again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from dspark_jax.errors import ConfigError

# Context manager of jax -> the value that the library assumes. All of them are jax's defaults, so
# that nothing is compiled twice where nothing was changed.
_ASSUMED = {
    "check_tracer_leaks": False,
    "debug_infs": False,
    "debug_key_reuse": False,
    "debug_nans": False,  # NaN is data here: it marks what is damaged, and is reported by position
    "default_device": None,
    "default_matmul_precision": None,  # products name theirs
    "default_prng_impl": "threefry2x32",
    "disable_jit": False,
    "enable_x64": False,
    "legacy_prng_key": "allow",
    "no_execution": False,
    "no_tracing": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "threefry_partitionable": True,
    "transfer_guard": "allow",
    "transfer_guard_device_to_device": "allow",
    "transfer_guard_device_to_host": "allow",
    "transfer_guard_host_to_device": "allow",
}


# Settings that have no context manager; programs are written for the value here.
_REQUIRED = {
    "error_checking_behavior_nan": "ignore",
    "error_checking_behavior_divide": "ignore",
    "error_checking_behavior_oob": "ignore",
}


@contextlib.contextmanager
def own_settings(mesh: Mesh | None = None) -> Iterator[None]:
    """Within it jax's settings are those that the library assumes.

    Raises ConfigError for a setting under which nothing can be traced.

    mesh: takes the place of a mesh that the caller has set (`jax.set_mesh`), if there is one.
    """
    for name, value in _REQUIRED.items():
        current = getattr(jax.config, f"jax_{name}", value)
        if current != value:
            raise ConfigError(
                f"jax_{name} is {current!r}, under which this library cannot be traced; set it to "
                f"{value!r}: jax.config.update('jax_{name}', {value!r})"
            )
    with contextlib.ExitStack() as stack:
        for name, value in _ASSUMED.items():
            # Some came with later releases, some may go; entering all of them would take 50 us.
            # None: not set.
            current = getattr(jax.config, f"jax_{name}", None)
            if current not in (None, value) and hasattr(jax, name):
                stack.enter_context(getattr(jax, name)(value))
        if mesh is not None and not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(mesh))
        yield


def under_own_settings(function: Callable) -> Callable:
    """function(model, ...) under `own_settings` of the model's mesh."""

    @functools.wraps(function)
    def wrapped(model, *arguments, **options):
        with own_settings(getattr(model, "mesh", None)):
            return function(model, *arguments, **options)

    return wrapped
