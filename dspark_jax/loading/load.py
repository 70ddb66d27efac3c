"""`load`: from a checkpoint to a model that can be run."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint, is_converted
from dspark_jax.checkpoints.paths import checkpoint_directory, no_file, what_else_at
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading import calibration as calibrations
from dspark_jax.loading import expert_storage
from dspark_jax.loading.calibration import Calibration
from dspark_jax.loading.description import describe
from dspark_jax.loading.expert_storage import ExpertStorage
from dspark_jax.loading.sources import ConvertedSource, LeafRecorder, OfficialSource
from dspark_jax.loading.stated_sizes import check_sizes
from dspark_jax.model.dspark import (
    MAX_SEQ_LEN,
    STREAMS_AT_ONCE,
    DSpark,
    Limits,
    make_limits,
    most_rows,
    new_cache,
)
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import ShapeSource, Source
from dspark_jax.runtime import compilation_cache
from dspark_jax.runtime.backend import on_cpu, require_device
from dspark_jax.runtime.scalars import plain, truth
from dspark_jax.runtime.settings import own_settings
from dspark_jax.runtime.sharding import check_mesh


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded model. `module` is the Flax NNX module (`.main`, `.drafter`); the rest says how it
    is run.

    config: ModelConfig. tokenizer: tokenizers.Tokenizer or None. limits: Limits. numerics:
      Numerics, the mesh included.
    expert_storage: how the routed experts are held, "dequantised" or "packed"; expert_storage.py
      says how it is chosen.
    calibration: what makes probabilities of the drafter's scores; None: they are taken as they are.
    """

    config: ModelConfig
    tokenizer: object | None
    module: DSpark
    limits: Limits
    numerics: Numerics
    expert_storage: str
    calibration: Calibration | None = None

    def __deepcopy__(self, memo) -> Model:
        """Itself: nothing of a model changes, and its programs know it by its structure."""
        return self

    def __repr__(self) -> str:
        return describe(self)

    @property
    def mesh(self) -> Mesh:
        """The devices that the model is cut over; one device is the mesh (1, 1)."""
        return self.numerics.mesh

    @functools.cached_property
    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The module's structure (static, hashable) and its arrays, for `jax.jit`."""
        return nnx.split(self.module)

    @functools.cached_property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Those of `split` by themselves, which a program takes much sooner: it is asked for
        nothing about each.
        """
        return tuple(jax.tree.leaves(self.split[1]))

    @functools.cached_property
    def structure(self) -> tuple[nnx.GraphDef, jax.tree_util.PyTreeDef]:
        """How `arrays` make the module; static, hashable."""
        return self.split[0], jax.tree.structure(self.split[1])


def require_model(model, what: str) -> None:
    """Raises ConfigError, beginning with `what`, for anything but a Model."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"{what}: expected a model that dspark.load returned, got a {type(model).__name__}"
        )


def embedded_checkpoint() -> Path:
    """The small trained checkpoint that comes with the library."""
    from dspark_jax import checkpoints

    return Path(checkpoints.__file__).parent / "tiny"


@own_settings()
def load(
    path=None,
    mesh=None,
    max_seq_len: int = MAX_SEQ_LEN,
    prefill_chunk: int | None = None,
    dtype=None,
    activation_quant: bool = True,
    calibration=None,
) -> Model:
    """Loads an official checkpoint or a converted one; both give the same bits.

    Routed experts stay packed FP4 on accelerators. On CPU they are held dequantised if the model
    then fits in the memory that is available, else packed; the environment variable
    DSPARK_EXPERT_STORAGE ("dequantised" or "packed") decides instead. `Model.expert_storage` and
    `dspark inspect` say which.

    Args:
      path: a directory with config.json, model.safetensors (or an index and shards) and, if there
        is one, tokenizer.json; or what `dspark convert` wrote. None: the embedded tiny checkpoint.
      mesh: the devices to run on, see `make_mesh`. None: this process's first device.
      max_seq_len: most tokens of one stream, prompt and generated together.
      prefill_chunk: rows of one prefill call, in tokens. None: the window, at most 128. It sets the
        size of the rings as well, and with that the order of sums: two loads with other chunks may
        differ in the last bits.
      dtype: compute dtype, "float32" or "bfloat16". None: float32 on CPU, bfloat16 elsewhere.
      activation_quant: simulate the official activation quantisation, with which the model was
        trained.
      calibration: what `dspark calibrate` wrote, which the gate goes by. None: calibration.json
        beside the checkpoint, if there is one; one of another drafter is warned of and not used.
        False: none. A path: that file.

    Raises:
      CheckpointError: missing, damaged or mismatched files; lists every faulty tensor by name,
        before anything is allocated.
      ConfigError: a config.json or an argument that is not understood.
    """
    compilation_cache.enable()
    require_device()
    path = embedded_checkpoint() if path is None else checkpoint_directory(path)
    checkpoint = (
        ConvertedCheckpoint.open(path) if is_converted(path) else OfficialCheckpoint.open(path)
    )
    config = ModelConfig.from_dict(checkpoint.config_dict, f"{path}/config.json")
    numerics = Numerics(dtype_name(dtype), truth("activation_quant", activation_quant), mesh)
    check_mesh(numerics.mesh if mesh is None else mesh, config)
    limits = make_limits(config, plain(max_seq_len), plain(prefill_chunk))
    experts = choose_expert_storage(config, numerics, limits.max_seq_len, limits.rows)
    tokenizer = read_tokenizer(path, config)  # before the weights, which take minutes
    module = DSpark(config, numerics, _source(checkpoint, config, numerics, experts.packed))
    calibrated = calibrations.find(calibration, path, module, config.dspark_block_size)
    return Model(config, tokenizer, module, limits, numerics, experts.kind, calibrated)


def choose_expert_storage(
    config: ModelConfig, numerics: Numerics, max_seq_len: int = MAX_SEQ_LEN, rows: int | None = None
) -> ExpertStorage:
    """How `load` would hold the routed experts of this config on this machine now, so that there is
    room for the caches of STREAMS_AT_ONCE streams and the one that prompts are prefilled in. rows:
    see Limits; None: those of load's defaults.
    """
    rows, caches = rows or most_rows(config), STREAMS_AT_ONCE + 1
    cache = jax.eval_shape(
        lambda: new_cache(config, caches, max_seq_len, rows, jnp.dtype(numerics.dtype))
    )
    return expert_storage.choose(functools.partial(DSpark, config, numerics), numerics, cache)


def _source(checkpoint, config: ModelConfig, numerics: Numerics, packed_experts: bool) -> Source:
    """Where the values of a checkpoint, checked here, come from."""
    if isinstance(checkpoint, ConvertedCheckpoint):
        checkpoint.check(record_leaves(config).leaves.values())
        return ConvertedSource(checkpoint, numerics, packed_experts)
    check_sizes(checkpoint, config)
    checkpoint.check(list(expected_tensors(config).values()))
    return OfficialSource(checkpoint, numerics, packed_experts)


def record_leaves(config: ModelConfig) -> LeafRecorder:
    """What a converted checkpoint of this config holds."""
    recorder = LeafRecorder()
    DSpark(config, Numerics(), recorder)
    return recorder


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
        raise ConfigError(
            f"dtype: {dtype!r} is not a dtype; use 'float32' or 'bfloat16'"
        ) from error
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype: {name} is not supported; use 'float32' or 'bfloat16'")
    return name


def read_tokenizer(path: Path, config: ModelConfig):
    """The checkpoint's tokenizer.json, or None without one."""
    file = path / "tokenizer.json"
    if not os.path.lexists(file):
        return None
    if (other := no_file(file)) is not None:
        raise CheckpointError(f"{file}: this is {other}")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        if (other := what_else_at(file)) is not None:
            raise CheckpointError(f"{file}: this is {other}") from None
        raise CheckpointError(f"{file}: not a readable tokenizer.json ({error})") from error
    # Left there by training, they would cut or fill up a prompt without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise CheckpointError(
            f"{file}: {tokenizer.get_vocab_size()} entries, but the config's vocab_size is "
            f"{config.vocab_size}"
        )
    return tokenizer
