"""`load`: from an official checkpoint to a model that can be run."""
from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.official import OfficialCheckpoint
from dspark_jax.config import ModelConfig
from dspark_jax.drafter import Drafter
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.layers.numerics import Numerics
from dspark_jax.layers.rope import MAX_POSITIONS
from dspark_jax.model import MainModel
from dspark_jax.parameters import Declaration, ShapeSource, Source
from dspark_jax.platform import fewest_rows, on_cpu

LARGEST_PREFILL_CHUNK = 128


class DSpark(nnx.Module):
    """The main model and its drafter."""

    def __init__(self, config: ModelConfig, numerics: Numerics, source: Source):
        self.main = MainModel(config, numerics, source)
        self.drafter = Drafter(config, numerics, source)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes fixed at load, in tokens.

    max_seq_len: most tokens of one stream. prefill_chunk: rows of one prefill call. rows: most rows any call may carry.
    fewest: rows of a one-token decode (see platform.py); calls with fewer are padded.
    """

    max_seq_len: int
    prefill_chunk: int
    rows: int
    fewest: int


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model. `module` is the Flax NNX module (`.main`, `.drafter`); the rest says how it is run.

    config: ModelConfig. tokenizer: tokenizers.Tokenizer or None. limits: Limits. numerics: Numerics.
    """

    config: ModelConfig
    tokenizer: object | None
    module: DSpark
    limits: Limits
    numerics: Numerics

    @functools.cached_property
    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The module's structure (static, hashable) and its arrays, for `jax.jit`."""
        return nnx.split(self.module)


class CheckpointSource:
    """Values of an official checkpoint, put together for stacked layers."""

    def __init__(self, checkpoint: OfficialCheckpoint, dtype: str, packed_experts: bool):
        self.checkpoint, self.dtype, self.packed_experts = checkpoint, dtype, packed_experts

    def __call__(self, declared: Declaration, prefixes: tuple[str, ...]) -> jax.Array:
        out = np.empty(declared.array_shape(len(prefixes)), declared.array_dtype(self.dtype))
        for i, prefix in enumerate(prefixes):
            layer = out[i] if declared.stacked else out
            for spec, place in declared.pieces(prefix):
                layer[place] = self._read(spec, declared.part)
        return jnp.asarray(out)

    def _read(self, spec, part: str) -> np.ndarray:
        if part == "value":
            return self.checkpoint.read(spec)
        return self.checkpoint.read_packed(spec)[0 if part == "packed" else 1]


def embedded_checkpoint() -> Path:
    """The small trained checkpoint that comes with the library."""
    import checkpoints
    return Path(checkpoints.__file__).parent / "tiny"


def load(path=None, mesh=None, max_seq_len: int = 4096, prefill_chunk: int | None = None, dtype=None,
         activation_quant: bool = True) -> Model:
    """Loads an official checkpoint.

    Args:
      path: a directory with config.json, model.safetensors (or an index and shards) and, if there is one, tokenizer.json.
        None: the embedded tiny checkpoint.
      mesh: None; one device.
      max_seq_len: most tokens of one stream, prompt and generated together.
      prefill_chunk: rows of one prefill call, in tokens. None: the window, at most 128.
      dtype: compute dtype, "float32" or "bfloat16". None: float32 on CPU, bfloat16 elsewhere.
      activation_quant: simulate the official activation quantisation, with which the model was trained.

    Raises:
      CheckpointError: missing, damaged or mismatched files; lists every faulty tensor by name, before anything is allocated.
      ConfigError: a config.json or an argument that is not understood.
    """
    if mesh is not None:
        raise ConfigError("mesh: this version runs on one device; leave mesh at None")
    path = embedded_checkpoint() if path is None else Path(path)
    checkpoint = OfficialCheckpoint.open(path)
    config = ModelConfig.from_dict(checkpoint.config_dict)
    numerics = Numerics(dtype_name(dtype), bool(activation_quant))
    limits = make_limits(config, max_seq_len, prefill_chunk)
    checkpoint.check(list(expected_tensors(config).values()))
    module = DSpark(config, numerics, CheckpointSource(checkpoint, numerics.dtype, packed_experts=not on_cpu()))
    return Model(config, read_tokenizer(path, config), module, limits, numerics)


def expected_tensors(config: ModelConfig) -> dict:
    """Name -> TensorSpec of every tensor that a checkpoint of this config holds."""
    shapes = ShapeSource()
    DSpark(config, Numerics(), shapes)
    return shapes.specs


def dtype_name(dtype) -> str:
    if dtype is None:
        return "float32" if on_cpu() else "bfloat16"
    try:
        name = jnp.dtype(dtype).name
    except TypeError as error:
        raise ConfigError(f"dtype: {dtype!r} is no dtype; use 'float32' or 'bfloat16'") from error
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype: {name} is not supported; use 'float32' or 'bfloat16'")
    return name


def make_limits(config: ModelConfig, max_seq_len: int, prefill_chunk: int | None) -> Limits:
    chunk = min(config.sliding_window, LARGEST_PREFILL_CHUNK) if prefill_chunk is None else prefill_chunk
    for name, value, most in (("max_seq_len", max_seq_len, MAX_POSITIONS), ("prefill_chunk", chunk, MAX_POSITIONS)):
        if not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
            raise ConfigError(f"{name}: {value!r} is not an integer from 1 to {most}")
    rows = max(int(chunk), config.dspark_block_size + 1)
    group_width = config.num_attention_heads * config.head_dim // config.o_groups
    fewest = fewest_rows(config.dspark_block_size, max(config.head_dim, config.sliding_window + rows, group_width))
    return Limits(int(max_seq_len), max(int(chunk), fewest), rows, fewest)


def read_tokenizer(path: Path, config: ModelConfig):
    """The checkpoint's tokenizer.json, or None without one."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        raise CheckpointError(f"{file}: not a readable tokenizer.json ({error})") from error
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise CheckpointError(f"{file}: {tokenizer.get_vocab_size()} entries, but the config's vocab_size is {config.vocab_size}")
    return tokenizer
