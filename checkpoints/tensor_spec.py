"""What a model declares of each official tensor: its name, its shape, how it is stored. No file is
read here, so this is what the model's code may import of the package.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

from dspark_jax.checkpoints import formats

PLAIN = {"bf16": ("BF16", ml_dtypes.bfloat16), "f32": ("F32", np.float32), "i64": ("I64", np.int64)}
STORAGES = (*PLAIN, "fp8", "fp4")
SCALE_DTYPES = ("F8_E8M0", "U8")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model expects.

    name: as in spec section 2; fp8 and fp4 tensors are stored as name.weight and name.scale.
    shape: logical shape, [N, K] for fp8 and fp4.
    storage: "bf16", "f32", "i64", "fp8" or "fp4".
    limit: integer tensors must hold values in 0..limit-1; None: any that an int32 holds.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    limit: int | None = None

    def stored(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Stored tensor name -> (dtypes it may have, shape it must have)."""
        if self.storage in PLAIN:
            dtypes = ("I64", "I32") if self.storage == "i64" else (PLAIN[self.storage][0],)
            return {self.name: (dtypes, self.shape)}
        rows, columns = self.shape
        if self.storage == "fp8":
            grid = (-(-rows // formats.FP8_BLOCK), -(-columns // formats.FP8_BLOCK))
            return {
                f"{self.name}.weight": (("F8_E4M3",), self.shape),
                f"{self.name}.scale": (SCALE_DTYPES, grid),
            }
        return {
            f"{self.name}.weight": (("I8", "U8"), (rows, columns // 2)),
            f"{self.name}.scale": (SCALE_DTYPES, (rows, columns // formats.FP4_BLOCK)),
        }


def hyper_connection_base(size: int) -> np.ndarray:
    """What an untrained `hc_*_base` holds, float32 [size].

    Of size (2 + M) M, around a sub-layer: all M copies are read alike and written alike, and each
    stays mostly itself. Of another size, in front of a head: zeros.
    """
    copies = math.isqrt(size + 1) - 1
    if (2 + copies) * copies != size:
        return np.zeros(size, np.float32)
    return np.concatenate([np.zeros(2 * copies), 4 * np.eye(copies).ravel()]).astype(np.float32)
