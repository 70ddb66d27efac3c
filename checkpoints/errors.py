"""The exceptions of this package, which `dspark_jax.errors` re-exports: the package imports nothing
of the library around it.
"""


class DsparkError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigError(DsparkError, ValueError):
    """A configuration (model, gate, mesh) that is not understood or does not fit together."""


class CheckpointError(DsparkError):
    """A checkpoint that is missing, incomplete, damaged or of another kind."""
