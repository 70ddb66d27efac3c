"""What several test files share: golden arrays, the golden model, deviations."""

from pathlib import Path

import ml_dtypes
import numpy as np

import dspark_jax as dspark
from checkpoints.safetensors_file import SafetensorsFile

GOLDENS = Path(__file__).parent / "goldens"
MAX_SEQ_LEN = 128
DTYPES = {"F32": np.float32, "I32": np.int32, "I8": np.uint8, "U8": np.uint8, "F8_E8M0": np.uint8,
          "F8_E4M3": ml_dtypes.float8_e4m3fn}


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    """All tensors of tests/goldens/<name>.safetensors; int8 codes and e8m0 scales as bytes (uint8)."""
    file = SafetensorsFile(GOLDENS / f"{name}.safetensors")
    assert not file.problems, file.problems
    arrays = {}
    for key, entry in file.entries.items():
        raw = file.read(key, slice(0, entry.shape[0]), slice(0, entry.nbytes // entry.shape[0]))
        arrays[key] = raw.view(DTYPES[entry.dtype]).reshape(entry.shape)
    return arrays


def golden_model(activation_quant: bool, **options) -> dspark.Model:
    return dspark.load(GOLDENS, max_seq_len=MAX_SEQ_LEN, dtype="float32", activation_quant=activation_quant, **options)


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
