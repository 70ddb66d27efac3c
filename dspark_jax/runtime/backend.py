"""What differs between backends: compiler options, and how many rows a one-token decode carries.

A row's bits must not depend on how many rows a call carries. XLA's CPU backend picks the order of a
sum by shape in its YNNPACK fusions, and its matrix product (Eigen's) cuts a sum into one piece a
thread where that keeps more threads busy, which depends on the number of rows and of cores: 256
terms for 1,024 columns differ between 2, 6 and 7 rows on 4 cores, 128 terms for 4,096 columns
between 7 and 8 rows on 2. It never leaves a thread 32 terms or fewer, so sums of up to 64 terms
stay whole: with the fusions off and longer sums split by us, any row count from 2 up gives the same
bits. The option's name is not stable, so it is tried, and the promise is checked on a small
program; where either fails, every call carries the rows of a whole verify block.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import ConfigError
from dspark_jax.pallas_kernels.products import LONGEST_SUM
from dspark_jax.runtime.interrupts import deferred_interrupts

_FUSIONS_OFF = {"xla_cpu_experimental_ynn_fusion_type": ""}
# AVX has no multiply-add. The option of a single program has no effect, only the process's.
_MAX_ISA = "xla_cpu_max_isa"

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


def target() -> str:
    """The platform that programs are traced for: "cpu", "gpu" or "tpu"; this process's own unless
    `compiling_for` says otherwise.
    """
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def compiling_for(platform: str):
    """Within it, programs are traced for another platform than this process runs on, to compile for
    another machine.
    """
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def require_device() -> None:
    """Raises ConfigError where jax has no device of the platforms that it was told to use."""
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # the former says nothing
        platforms = jax.config.jax_platforms or "the default"
        reason = str(error) or "no such device was found"
        raise ConfigError(
            f"jax has no device of the platform asked for (JAX_PLATFORMS: {platforms}): {reason}; "
            "install jax for that platform, or set JAX_PLATFORMS=cpu"
        ) from error


def on_cpu() -> bool:
    return target() == "cpu"


def longest_sum() -> int | None:
    """Most terms that a product may sum in one go without its order depending on the number of
    rows; None: no limit.
    """
    return LONGEST_SUM if on_cpu() else None


def longest_attention_sum() -> int:
    """Most terms that an attention product may sum where one-token decodes carry fewer rows than a
    verify block; it is not split.
    """
    return 128


def compiler_options() -> dict[str, str] | None:
    """Options for `jax.jit` on this backend."""
    return _cpu_options() if on_cpu() else None


@functools.cache
def _cpu_options() -> dict[str, str] | None:
    try:
        add = jax.jit(lambda x: x + 1, compiler_options=_FUSIONS_OFF)
        add(np.zeros(2, np.float32)).block_until_ready()
    except Exception:  # the exception's type for an unknown option differs between releases
        return None
    return _FUSIONS_OFF


@functools.cache
def rows_agree() -> bool:
    """Whether two probes give the same bits for 2, 6, 8 and 64 rows on a CPU.

    One is of products, softmax and sums at a small model's sizes. In the other rows stand last and
    divisions (which become products) alternate with sums, as in the hyper-connections: jax 0.12
    makes multiply-adds there for some numbers of rows and not for others.
    """
    if _cpu_options() is None:
        return False
    rng = np.random.default_rng(0)
    # On the host: cutting an array of jax's compiles a program of its own for every cut.
    x, w, v = (
        rng.standard_normal(s).astype(np.float32) for s in ((64, 64), (64, 128), (128, 1024))
    )
    draws = rng.standard_normal((8, 4, 4, 1, 64)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=_cpu_options())
    def products(x, w, v):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return jax.nn.softmax(x @ w, axis=-1) @ v

    @functools.partial(jax.jit, compiler_options=_cpu_options())
    def normalised(scores):
        def columns_then_rows(_, c):
            c = c / (c[:1] + c[1:2] + c[2:3] + c[3:])
            return c / (c[:, :1] + c[:, 1:2] + c[:, 2:3] + c[:, 3:])

        return jax.lax.fori_loop(0, 3, columns_then_rows, jax.nn.softmax(scores, axis=1))

    def agree(function, whole, cut):
        expected = np.asarray(function(whole))
        return all(
            np.array_equal(cut(expected, rows), function(cut(whole, rows))) for rows in (2, 6, 8)
        )

    with deferred_interrupts():
        return agree(lambda x: products(x, w, v), x, lambda a, rows: a[:rows]) and all(
            agree(normalised, scores, lambda a, rows: a[..., :rows]) for scores in draws
        )


def require_equal_bits() -> None:
    """Adds to XLA_FLAGS what `rows_agree` needs, unless they set it already. Has no effect once jax
    has used a device.

    Only for a process that is ours alone, as the command's is: it changes how everything in the
    process is compiled.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ >= (0, 12) and _MAX_ISA not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_MAX_ISA}=AVX".strip()


def decode_rows(block_size: int, longest: int) -> int:
    """The row count of a one-token decode: what every smaller call is padded to.

    longest: the most terms summed in an attention product, which is not split (head width, ring
      slots, width of an output group).
    """
    if on_cpu() and not rows_agree():
        warnings.warn(
            f"jax {jax.__version__} on this CPU computes a row differently among 2 and among 6 "
            "rows: speculative and plain output may differ in the last bits. "
            f"XLA_FLAGS=--{_MAX_ISA}=AVX, set before jax uses a device, prevents it",
            stacklevel=2,
        )
    # Between processes an all-reduce picks the order of its sums by size.
    return (
        2
        if on_cpu()
        and jax.process_count() == 1
        and rows_agree()
        and longest <= longest_attention_sum()
        else block_size + 1
    )


def jit(function, **options):
    """`jax.jit` with this backend's compiler options; Ctrl-C waits for the end of a call."""
    compiled = jax.jit(function, compiler_options=compiler_options(), **options)

    @functools.wraps(function)
    def call(*arguments):
        with deferred_interrupts():
            return compiled(*arguments)

    call.lower = compiled.lower
    return call
