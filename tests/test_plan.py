"""`dspark plan`: sizes against sums worked out by hand, what fits, and refusals."""
import json

import pytest

from dspark_jax import plan
from dspark_jax.cli import main
from dspark_jax.config import v4_flash_0731
from dspark_jax.errors import ConfigError
from dspark_jax.plan_command import tpu

CONFIG = v4_flash_0731()
ONE_EXPERT = 3 * 2048 * 4096 // 2 + 3 * 2048 * 4096 // 32  # packed codes and scales, bytes


@pytest.mark.parametrize("shards", (1, 4, 8))
def test_experts_and_embedding_are_cut(shards):
    parts = plan.parameter_bytes(CONFIG, (1, shards))
    assert parts["experts"] == 43 * 256 * ONE_EXPERT // shards
    assert parts["embedding and head"] == 2 * 129280 * 4096 * 2 // shards
    copy_of_the_head = 129280 * 4096 * 2 if shards > 1 else 0
    assert parts["draft"] > 3 * 256 * ONE_EXPERT // shards + 2 * 129280 * 256 * 2 + copy_of_the_head


def test_a_cache_grows_by_its_entries():
    entries = 21 * (65536 // 4) * (512 + 128) * 2 + 20 * (65536 // 128) * 512 * 2
    assert plan.cache_bytes(CONFIG, 131072) - plan.cache_bytes(CONFIG, 65536) == entries


def test_what_is_said_to_fit_fits_and_no_more():
    target, mesh = tpu("v5p:2x2x1"), (1, 4)
    made = plan.make_plan(CONFIG, target, mesh, 65536, 1, 2.5)
    assert made.fits and made.total <= target.memory

    def total(streams):
        return plan.make_plan(CONFIG, target, mesh, 65536, streams, 2.5).total

    assert total(made.most_streams) <= target.memory < total(made.most_streams + 1)


@pytest.mark.parametrize("mesh, context, streams, message", (
    ((1, 3), 65536, 1, "mesh 1x3 has 3 devices, v5p:2x2x1 has 4"),
    ((1, 4), 0, 1, "context 0 is not between"),
    ((4, 1), 65536, 6, "6 streams do not divide over the 4 devices"),
))
def test_refusals(mesh, context, streams, message):
    with pytest.raises(ConfigError, match=message):
        plan.make_plan(CONFIG, tpu("v5p:2x2x1"), mesh, context, streams, 2.5)


def test_an_axis_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match="o_groups is 8"):
        plan.make_plan(CONFIG, plan.Target("12 devices", 12, 1e12), (1, 12), 65536, 1, 2.5)


def test_command(capsys):
    assert main(["plan", "--topology", "v5p:2x2x1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert main(["plan", "--topology", "v5e:2x2"]) == 1 and "It does not fit" in capsys.readouterr().out
    assert main(["plan", "--devices", "4"]) == 2 and "--memory" in capsys.readouterr().err
    assert main(["plan", "--topology", "v9:2x2"]) == 2 and "v5e, v5p, v6e" in capsys.readouterr().err
