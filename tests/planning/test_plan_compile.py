"""The full-size model compiled for TPUs that are not here: memory as planned, caches updated in
place.
"""

import importlib.util

import pytest

from dspark_jax.commands.plan import tpu
from dspark_jax.config import v4_flash_0731
from dspark_jax.errors import ConfigError
from dspark_jax.planning import sizes
from dspark_jax.planning.compile import compile_programs, count_copies

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="needs the extra tpu-aot"
)


def test_copies_are_counted():
    text = """
  %copy.1 = bf16[2,8,64]{2,1,0:T(8,128)} copy(%p), metadata={}
  %copy.2 = bf16[2,8,32]{2,1,0} copy(%p)
  %start = (bf16[2,8,64]{2,1,0}, bf16[2,8,64]{2,1,0}, u32[]{:S(2)}) copy-start(%p)
  %read = (bf16[2,8,64]{2,1,0:T(8,128)S(1)}, HBM, u32[]{:S(2)}) copy-start(%p)
  %written = (HBM, bf16[2,8,64]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%p)
  %fusion = bf16[2,8,64]{2,1,0} fusion(%copy.1), kind=kLoop
""".replace("HBM", "bf16[2,8,64]{2,1,0:T(8,128)}")
    assert count_copies(text, {"bf16[2,8,64]"}) == 2 and count_copies(text, {"f32[2,8,64]"}) == 0


@pytest.mark.heavy
@needs_libtpu
def test_a_round_of_the_whole_model():
    """V4-Flash-0731 on v5p:2x2x1, 8 streams of 64K tokens."""
    config, target = v4_flash_0731(), tpu("v5p:2x2x1")
    made = sizes.make_plan(config, target, (1, 4), 65536, 8, 2.5)
    row = compile_programs(config, target.name, (1, 4), 65536, 8, only=("rounds, block",))[
        "rounds, block"
    ]
    assert row["peak_bytes"] < target.memory
    assert 0.9 < made.total / row["peak_bytes"] < 1.1
    assert row["aliased_bytes"] >= 8 * sizes.cache_bytes(config, 65536), (
        "a cache is not updated in place"
    )
    assert row["cache_copies"] == 0


@needs_libtpu
def test_an_unknown_topology_is_refused():
    with pytest.raises(ConfigError, match="v5p:9x9x9"):
        compile_programs(v4_flash_0731(), "v5p:9x9x9", (1, 4), 65536, 1)
