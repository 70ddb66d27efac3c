"""The exceptions of the library. Every one says what was wrong, where, and what to do about it."""

from dspark_jax.checkpoints.errors import CheckpointError, ConfigError, DsparkError

__all__ = ["CheckpointError", "ConfigError", "DsparkError", "NumericsError", "PromptError"]


class PromptError(DsparkError, ValueError):
    """A prompt or a generation request that cannot be served."""


class NumericsError(DsparkError, ArithmeticError):
    """NaN or infinity where a number is needed; the message names the position."""
