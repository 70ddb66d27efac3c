"""The exceptions of the library. Every one says what was wrong, where, and what to do about it."""


class DsparkError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigError(DsparkError, ValueError):
    """A configuration (model, gate, mesh) that is not understood or does not fit together."""


class CheckpointError(DsparkError):
    """A checkpoint that is missing, incomplete, damaged or of another kind."""


class PromptError(DsparkError, ValueError):
    """A prompt or a generation request that cannot be served."""


class NumericsError(DsparkError, ArithmeticError):
    """NaN or infinity where a number is needed; the message names the position."""
