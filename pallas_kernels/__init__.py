"""FP4 expert GEMMs and activation quantisation. Knows nothing of the model around it.

moe_fp4, Experts    the routed experts of one layer, on every backend      moe.py
BACKENDS            the backends, and how to add one                       moe.py
fp4                 the weight format: pack, unpack, quantise, dequantise  fp4.py
activation          simulated e4m3 / e2m1 activation quantisation          activation.py
products            products whose rows do not depend on their number      products.py
"""

from dspark_jax.pallas_kernels import activation, fp4
from dspark_jax.pallas_kernels.moe import (
    BACKENDS,
    ColumnExperts,
    Experts,
    default_backend,
    largest_scale,
    moe_fp4,
)
from dspark_jax.pallas_kernels.xla import is_wide

__all__ = [
    "BACKENDS",
    "ColumnExperts",
    "Experts",
    "activation",
    "default_backend",
    "fp4",
    "is_wide",
    "largest_scale",
    "moe_fp4",
]
