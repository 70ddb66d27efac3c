"""The kernels at real sizes for hardware that is not here: lowered for CUDA, compiled by Mosaic for
three TPU generations.
"""

import functools
import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from dspark_jax.pallas_kernels import Experts, moe_fp4, pallas_mosaic
from dspark_jax.runtime.backend import compiler_options

WIDTH, INNER, HELD, ROUTES = 4096, 2048, 64, 6
# A newer jax asks which GPU it lowers for.
H200 = AbstractMesh((1,), ("model",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def real_call(rows, sharding=None):
    """Shapes of one device's share of a real layer: 64 experts of 256."""
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    experts = Experts(
        shape(jnp.uint8, HELD, 2 * INNER, WIDTH // 2),
        shape(jnp.uint8, HELD, 2 * INNER, WIDTH // 32),
        shape(jnp.uint8, HELD, WIDTH, INNER // 2),
        shape(jnp.uint8, HELD, WIDTH, INNER // 32),
    )
    return (
        shape(jnp.bfloat16, rows, WIDTH),
        shape(jnp.int32, rows, ROUTES),
        shape(jnp.float32, rows, ROUTES),
        shape(jnp.bool_, rows),
    ), experts


def op(backend, rows):
    regime = "prefill" if rows > 64 else "decode"
    return functools.partial(
        moe_fp4,
        swiglu_limit=10.0,
        first_expert=64,
        activation_quant=True,
        regime=regime,
        backend=backend,
    )


@pytest.mark.parametrize("rows", [1, 6, 64, 512])
def test_lowers_for_cuda(rows):
    arguments, experts = real_call(rows)
    with use_abstract_mesh(H200):
        text = (
            jax.jit(op("pallas_gpu", rows))
            .trace(*arguments, experts)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert len(re.findall(r"custom_call @\S*triton", text)) == 2


@pytest.mark.parametrize("rows", [1, 64])
def test_packed_experts_are_read_in_place_on_cpu(rows):
    """The program needs little beside its arguments, against the packed table of 64 experts."""
    arguments, experts = real_call(rows)
    program = (
        jax.jit(op("xla", rows), compiler_options=compiler_options())
        .lower(*arguments, experts)
        .compile()
    )
    table = sum(math.prod(a.shape) for a in experts)
    assert table > 850e6 and program.memory_analysis().temp_size_in_bytes < 0.05 * table


@functools.cache
def topology(name):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'dspark-jax[tpu-aot]'")
    from jax.experimental import topologies

    # Without these libtpu looks for a TPU machine's metadata server, or refuses a second process.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])


def compiled(name, rows):
    mesh = Mesh(np.array(topology(name).devices).reshape(-1), ("model",))
    everywhere = PartitionSpec()
    arguments, experts = real_call(rows, NamedSharding(mesh, everywhere))
    function = jax.shard_map(
        op("pallas_tpu", rows),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    return jax.jit(function).lower(*arguments, experts).compile()


@pytest.mark.parametrize("rows", [1, 6, 64, 512])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_mosaic_compiles(name, rows, capsys):
    """Both kernels, within the limit on VMEM that is part of them (`pallas_mosaic.VMEM_LIMIT`).
    Prints what Mosaic says they use of it.
    """
    kernels = [
        line
        for line in compiled(name, rows).as_text().splitlines()
        if 'custom_call_target="tpu_custom_call"' in line
    ]
    memory = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
    used = [int(re.search(memory, line)[1]) for line in kernels]
    sizes = " and ".join(f"{size / 2**20:.2f}" for size in used)
    with capsys.disabled():
        print(f"\n{name}, {rows} rows: {sizes} of {pallas_mosaic.VMEM_LIMIT >> 20} MiB of VMEM")
    assert len(used) == 2 and 0 < min(used) and max(used) < pallas_mosaic.VMEM_LIMIT / 2
