"""DeepSeek-V4-Flash with its DSpark draft module in JAX: speculative decoding that never changes the output."""
from dspark_jax import gate
from dspark_jax.api import commit, draft, extend, new_cache, prefill
from dspark_jax.errors import CheckpointError, ConfigError, DsparkError, NumericsError, PromptError
from dspark_jax.engine import RoundRecord
from dspark_jax.gate import GateConfig
from dspark_jax.generate import GenerateOutput, StreamEvent, generate, stream
from dspark_jax.loading import Model, load
from dspark_jax.sharding import make_mesh

__all__ = [
    "load", "make_mesh", "Model", "generate", "stream", "GenerateOutput", "StreamEvent", "RoundRecord", "GateConfig", "gate",
    "new_cache", "extend", "commit", "prefill", "draft",
    "DsparkError", "ConfigError", "CheckpointError", "PromptError", "NumericsError",
]
