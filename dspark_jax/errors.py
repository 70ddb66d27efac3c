"""The exceptions of the library. Every one says what was wrong, where, and what to do about it."""

from dspark_jax.checkpoints.errors import CheckpointError, ConfigError, DsparkError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DsparkError",
    "Interrupted",
    "NumericsError",
    "PromptError",
]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a run. `output` is the GenerateOutput of what had been emitted until then, with
    finish reason "interrupted" where it is not complete.
    """

    def __init__(self, output):
        super().__init__("the run was interrupted; what it had emitted is in .output")
        self.output = output


class PromptError(DsparkError, ValueError):
    """A prompt or a generation request that cannot be served."""


class NumericsError(DsparkError, ArithmeticError):
    """NaN or infinity where a number is needed; the message names the position.

    output: the GenerateOutput of what was emitted until then, by this prompt and all others, with
    the finish reason "error" for what ended so; None outside a run.
    """

    def __init__(self, message: str, output=None):
        super().__init__(message)
        self.output = output
