"""The mesh: four CPU devices give what one gives, hold what they should, and talk only where the
design says.
"""

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import dspark_jax as dspark
from dspark_jax.model.parameters import Declaration
from dspark_jax.runtime import sharding

from helpers.mesh_parts import collectives, rows_of_the_mesh
from helpers.processes import finish, start

CHECKS = {
    "2x2, float": ("streams", "float", "2x2"),
    "1x4, float": ("streams", "float", "1x4"),
    "2x2, reference": ("streams", "reference", "2x2"),
    "4x1, float": ("streams", "float", "4x1"),
    "refusals": ("refuses",),
    "cut blocks": ("quantises",),
}


@pytest.mark.heavy
def test_embedded_checkpoint_on_four_devices():
    finish(start("mesh_parts.py", 4, "embedded", "1x4"))


# A mesh of 2x2 cuts both the streams and the model.
IN_MAKE_TEST = ("2x2, float", "refusals")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check in IN_MAKE_TEST else pytest.mark.heavy)
        for check in CHECKS
    ],
)
def test_on_four_devices(check):
    finish(start("mesh_parts.py", 4, *CHECKS[check]))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(dspark.ConfigError, match="1x4096 needs 4096 devices"):
        dspark.make_mesh(1, 4096)


@pytest.mark.parametrize("text", ["4", "1x", "x4", "1x4x1", "-1x4", "axb", ""])
def test_mesh_text_is_refused(text):
    with pytest.raises(dspark.ConfigError, match="DATAxMODEL"):
        sharding.parse_mesh(text)


def test_mesh_text():
    assert sharding.parse_mesh("2x8") == (2, 8)


def test_one_spelling_of_each_sharding():
    declared = Declaration("attn.wq_b", (8, 4), "fp8", ("heads", None))
    assert sharding.parameter_spec(declared) == PartitionSpec(None, "model")
    assert (
        sharding.parameter_spec(Declaration("norm.weight", (4,), "bf16", (None,), stacked=False))
        == PartitionSpec()
    )


def test_a_single_stream_is_on_every_row_of_the_mesh():
    mesh = sharding.single_device()
    assert sharding.stream_axis(mesh, 1) is None and sharding.stream_axis(mesh, 2) == "data"


def test_collectives_are_found_in_compiled_text():
    text = """
      %a = f32[4,6]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
      %b = (f32[2]{0}, s32[]) all-reduce(%y, %z), replica_groups=[2,2]<=[4], to_apply=%sum
      %c = bf16[8,2]{1,0} all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
      %d = f32[3]{0} collective-permute(%v), source_target_pairs={{0,1}}
      %e = f32[3]{0} add(%d, %d)
      %f = f32[5]{0} all-reduce(%x), replica_groups=mesh['data'=2,'model'=2] {'model'}, to_apply=%s
    """
    found, groups = collectives(text)
    assert found == {
        ("all-reduce", "[4,6]"): 1,
        ("all-reduce", "[2]"): 1,
        ("all-reduce", "[]"): 1,
        ("all-gather", "[8,2]"): 1,
        ("collective-permute", "[3]"): 1,
        ("all-reduce", "[5]"): 1,
    }
    assert groups == {
        "{{0,1},{2,3}}",
        "[2,2]<=[4]",
        "{{0,1,2,3}}",
        "",
        "mesh['data'=2,'model'=2] {'model'}",
    }
    assert rows_of_the_mesh(2, 2) == groups - {"{{0,1,2,3}}", ""}


def test_layers_outside_a_mesh_see_whole_arrays():
    x = np.arange(4.0)
    assert sharding.model_shards() == 1 and sharding.model_index() == 0
    assert sharding.sum_over_model(x) is x and sharding.gather_over_model(x) is x
