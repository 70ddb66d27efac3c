"""What several test files share: golden arrays, the golden model, deviations."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

import dspark_jax as dspark
from dspark_jax.checkpoints.safetensors_file import SafetensorsFile
from dspark_jax.model.parameters import Maker, RandomSource

GOLDENS = Path(__file__).parents[1] / "goldens"
MAX_SEQ_LEN = 128
DTYPES = {
    "F32": np.float32,
    "I32": np.int32,
    "I8": np.uint8,
    "U8": np.uint8,
    "F8_E8M0": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """All tensors of goldens/<name>.safetensors; int8 codes and e8m0 scales as bytes (uint8)."""
    file = SafetensorsFile(GOLDENS / f"{name}.safetensors")
    assert not file.problems, file.problems
    arrays = {}
    for key, entry in file.entries.items():
        raw = file.read(key, slice(0, entry.shape[0]), slice(0, entry.nbytes // entry.shape[0]))
        arrays[key] = raw.view(DTYPES[entry.dtype]).reshape(entry.shape)
    return arrays


def golden_model(activation_quant: bool, **options) -> dspark.Model:
    return dspark.load(
        GOLDENS,
        max_seq_len=MAX_SEQ_LEN,
        dtype="float32",
        activation_quant=activation_quant,
        **options,
    )


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def rms_error(actual, expected) -> float:
    """rms of the difference, relative to the rms of `expected`."""
    expected = np.asarray(expected, np.float64)
    return rms(np.asarray(actual, np.float64) - expected) / rms(expected)


def max_error(actual, expected) -> float:
    return float(np.max(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))))


def same_sets(actual, expected) -> bool:
    """Whether the last axes hold the same ids, in any order."""
    return np.array_equal(np.sort(actual, axis=-1), np.sort(expected, axis=-1))


def product_weight(value, columns_first: bool) -> nnx.Variable:
    """A parameter [N, K] for `dot`, held as models for training hold it or columns first."""
    source = RandomSource(0)
    source.columns_first = columns_first
    parameter = Maker(source, ("",), stacked=False)("weight", value.shape, "f32", product=True)
    parameter[...] = jnp.asarray(value)
    return parameter
