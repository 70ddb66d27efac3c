"""DeepSeek-V4-Flash with its DSpark draft module in JAX: speculative decoding that never changes
the output.

The names below are the public ones. Each is imported when it is first used, so that `import
dspark_jax` costs nothing by itself.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from dspark_jax._version import __version__ as __version__

# In a checkout that is not installed, checkpoints/ and pallas_kernels/ lie beside this folder.
# Where it is installed they lie in it, or the installation maps them (pyproject.toml).
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_ROOT, "pyproject.toml")):
    __path__.append(_ROOT)

_PUBLIC = {
    # A model on devices
    "load": "loading.load",  # from a checkpoint directory
    "Model": "loading.load",  # what `load` returns
    "make_mesh": "runtime.sharding",  # devices to cut a model over
    # Text and tokens
    "generate": "decode.generate",  # all at once
    "stream": "decode.generate",  # round by round
    "Session": "decode.session",  # one stream, continued turn by turn
    "warm_up": "decode.warm_up",  # compiles ahead
    "GenerateOutput": "decode.generate",
    "StreamEvent": "decode.generate",
    "RoundRecord": "decode.emission",  # what one round did
    "TokenLogprob": "decode.emission",
    # The gate: how many drafts are worth verifying
    "GateConfig": "decode.gate_config",
    "gate": "decode.gate",  # a module: init, choose, observe, note_skipped, learn, stats
    # The parts of a step
    "new_cache": "decode.steps",
    "extend": "decode.steps",
    "commit": "decode.steps",
    "prefill": "decode.steps",
    "draft": "decode.steps",
    # Errors
    "DsparkError": "errors",
    "ConfigError": "errors",
    "CheckpointError": "errors",
    "PromptError": "errors",
    "NumericsError": "errors",
    "Interrupted": "errors",  # a KeyboardInterrupt that carries what was emitted
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
    value = module if name == "gate" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
