"""The numbers of the gate: their defaults, the environment variables they come from, and what makes
one unusable.
"""

import dataclasses
import functools
import math
import os

import jax
import numpy as np

from dspark_jax.errors import ConfigError
from dspark_jax.runtime.scalars import plain

ENV_PREFIX = "DEEPSEEK_DSPARK_GATE"
SWITCHES = ("enabled", "calibration")  # on or off, the others are numbers
FLOAT32_TINY, FLOAT32_MAX = (
    float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "enabled",
        "margin_threshold",
        "margin",
        "min_draft",
        "decay",
        "draft_ms",
        "verify_base_ms",
        "verify_slope_ms",
        "plain_ms",
        "calibration",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class GateConfig:
    """The numbers of the gate. Every field is a pytree leaf: a Python number outside jit, possibly
    a tracer inside.

    Off by default. Python numbers are brought to one type per field, so that 196 and 196.5 share a
    compiled program.
    """

    enabled: bool = False  # off: all K drafts are verified in every round
    margin_threshold: float = (
        0.0  # logits; the draft is skipped where top1 - top2 of the anchor is below it; 0: never
    )
    margin: float = 1.15  # factor by which a truncated block must beat the full one
    min_draft: int = 0  # tokens; a choice of 1..min_draft-1 becomes min_draft, 0 stays 0
    decay: float = 0.9  # factor on the counts of all buckets per observed round, 0..1
    draft_ms: float = 196.0  # cost of drafting one block
    verify_base_ms: float = 300.0  # cost of a verify, part that does not depend on n
    verify_slope_ms: float = 109.0  # cost of a verify per draft
    plain_ms: float = 303.0  # cost of one plain step
    # Where the model has a calibration, go by the scores as it scales them; off: by raw ones.
    calibration: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(
                self, field.name, _as_field_type(field.name, getattr(self, field.name))
            )

    @classmethod
    def from_env(cls, environ=None) -> "GateConfig":
        """Reads DEEPSEEK_DSPARK_GATE (0 or 1) and DEEPSEEK_DSPARK_GATE_<FIELD>; an absent variable,
        or one that is empty, keeps the default.

        Raises ConfigError naming the variable if it is unknown, is not a number or is out of range.
        """
        environ = os.environ if environ is None else environ
        names = {_variable(field.name): field.name for field in dataclasses.fields(cls)}
        values = {}
        for variable in sorted(
            v for v in environ if (v == ENV_PREFIX or v.startswith(ENV_PREFIX + "_")) and environ[v]
        ):
            if variable not in names:
                raise ConfigError(
                    f"environment variable {variable} is not known; known are {', '.join(names)}"
                )
            values[names[variable]] = _parse(variable, names[variable], environ[variable])
        return cls(**values)


def with_plain_numbers(config: GateConfig) -> GateConfig:
    """The same numbers, those in arrays of one as Python's."""
    return dataclasses.replace(
        config, **{f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    )


def validate(config: GateConfig, block_size: int) -> None:
    """Raises ConfigError, naming the field, if a number is not one, is out of range, or does not
    fit `block_size` (K).

    To be called with concrete values, before anything is compiled.
    """
    config = with_plain_numbers(config)
    for field in dataclasses.fields(config):
        problem = _problem(field.name, getattr(config, field.name))
        if problem:
            raise ConfigError(f"gate {field.name}: {problem}")
    refuse_long_min_draft(config, block_size)
    cheapest, dearest = (round_ms(config, n) for n in (1, block_size))
    if not cheapest >= FLOAT32_TINY:
        raise ConfigError(
            "gate draft_ms, verify_base_ms and verify_slope_ms are all 0: a verified draft must "
            "cost something"
        )
    if not dearest <= FLOAT32_MAX:
        raise ConfigError(
            f"gate draft_ms, verify_base_ms and verify_slope_ms: a block of {block_size} drafts "
            f"would cost {dearest:g} ms, "
            "which float32 cannot hold; use smaller numbers"
        )


def round_ms(config: GateConfig, n: int):
    """What a round costs, ms, in which n drafts are verified; n = 0: a plain step, without a draft
    that may have been made before.
    """
    return config.plain_ms if n == 0 else config.draft_ms + verify_ms(config, n)


def verify_ms(config: GateConfig, n: int):
    """What verifying n drafts costs, ms, n >= 1."""
    return config.verify_base_ms + config.verify_slope_ms * n


def _variable(name):
    return ENV_PREFIX if name == "enabled" else f"{ENV_PREFIX}_{name.upper()}"


def is_finite(value) -> bool:
    """Whether a number is finite as a float; an integer may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _as_field_type(name, value):
    """A Python or NumPy number as the Python type of its field where that loses nothing; anything
    else as it is.
    """
    if isinstance(value, (np.generic, np.ndarray)):  # what lies on a device stays there
        value = plain(value)
    if not isinstance(value, (bool, int, float)) or not is_finite(value):
        return value
    if name in SWITCHES:
        return bool(value) if value in (0, 1) else value
    if isinstance(value, bool):
        return value
    if name == "min_draft":
        return int(value) if value == math.floor(value) else value
    return float(value)


def _parse(variable, name, text):
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"environment variable {variable}={text!r} is not a number") from None
    value = int(value) if value.is_integer() else value
    problem = _problem(name, bool(value) if name in SWITCHES and value in (0, 1) else value)
    if problem:
        raise ConfigError(f"environment variable {variable}: {problem}")
    return value


def _problem(name, value):
    """Why `value` cannot be that field's, or None."""
    if name in SWITCHES:
        return None if isinstance(value, bool) else f"{value!r} is neither on nor off; use 1 or 0"
    if not _is_number(value):
        return f"{value!r} is not a number"
    number = float(value) if is_finite(value) else math.inf
    if not abs(number) <= FLOAT32_MAX:
        shown = (
            f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)
        )
        return f"{shown} is not a finite number of float32"
    if name == "min_draft":
        return (
            None
            if number >= 0 and number.is_integer()
            else f"{value!r} must be a whole number, 0 or more"
        )
    if name == "decay":
        return None if 0 <= number <= 1 else f"{value!r} must lie in 0..1"
    if name in ("margin", "plain_ms"):
        return (
            None
            if number >= FLOAT32_TINY
            else f"{value!r} must be more than 0" + (", in float32" if number > 0 else "")
        )
    return None if number >= 0 else f"{value!r} must be 0 or more"


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def refuse_long_min_draft(config, block_size):
    least = plain(config.min_draft)
    if isinstance(least, int) and least > block_size:
        raise ConfigError(
            f"gate min_draft: {least} exceeds the draft block of {block_size} tokens; "
            "use at most that"
        )
