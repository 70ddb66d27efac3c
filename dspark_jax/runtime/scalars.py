"""What counts as a whole number or a truth value where a caller gives one: Python's own, and arrays
of NumPy and jax without axes.
"""

from __future__ import annotations

import reprlib

import jax
import numpy as np

from dspark_jax.errors import ConfigError


def plain(value):
    """A scalar of NumPy or jax as Python's, anything else as it is; so is what is being traced,
    whose value nobody knows yet.
    """
    if isinstance(value, jax.core.Tracer):
        return value
    is_scalar = isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0
    return value.item() if is_scalar else value


def whole_number(name: str, value, least: int, most: int) -> int:
    """value as an int. Raises ConfigError, naming it, for anything but a whole number from least to
    most; a truth value is none.
    """
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise ConfigError(f"{name}: {reprlib.repr(value)} is not an integer from {least} to {most}")
    return number


def truth(name: str, value) -> bool:
    """value as a bool. Raises ConfigError, naming it, for anything but True, False, 1 and 0: by
    Python's rules "no" would be true.
    """
    flag = plain(value)
    if not isinstance(flag, int) or flag not in (0, 1):
        raise ConfigError(f"{name}: {reprlib.repr(value)} is neither True nor False")
    return bool(flag)
