"""What the table of backends decides: which one a platform uses, and what it takes."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.pallas_kernels import (
    BACKENDS,
    ColumnExperts,
    Experts,
    default_backend,
    largest_scale,
)


def shapes(width: int, inner: int, packed: bool) -> Experts:
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.uint8 if packed else jnp.float32)
    held = 2 if packed else 1  # numbers an element
    w13, w2 = array(3, 2 * inner, width // held), array(3, width, inner // held)
    scales = (array(3, 2 * inner, width // 32), array(3, width, inner // 32))
    return Experts(w13, scales[0], w2, scales[1]) if packed else Experts(w13, None, w2, None)


@pytest.mark.parametrize(
    "platform, width, inner, expected",
    [
        ("tpu", 512, 256, "pallas_tpu"),
        ("tpu", 512, 128, "xla"),
        ("tpu", 128, 256, "xla"),
        ("gpu", 96, 32, "pallas_gpu"),
        ("gpu", 96, 48, "xla"),
        ("cpu", 512, 256, "xla"),
    ],
)
def test_a_platform_uses_its_kernel_where_the_size_allows(platform, width, inner, expected):
    assert default_backend(shapes(width, inner, packed=True), platform) == expected
    assert default_backend(shapes(width, inner, packed=False), platform) == "xla"


def test_columns_first_is_for_xla():
    array = jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)
    assert default_backend(ColumnExperts(array, array), "tpu") == "xla"


def test_scales_that_a_platform_computes_with():
    assert [largest_scale(platform) for platform in ("tpu", "gpu", "cpu")] == [253, 160, 254]


def test_an_interpreted_kernel_differs_in_nothing_else():
    for name in ("pallas_tpu", "pallas_gpu"):
        kernel, interpreted = BACKENDS[name], BACKENDS[f"{name}_interpret"]
        assert interpreted._replace(run=kernel.run) == kernel
        assert interpreted.run.func is kernel.run and interpreted.run.keywords == {
            "interpret": True
        }
