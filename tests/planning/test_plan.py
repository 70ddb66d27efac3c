"""`dspark plan`: sizes against sums worked out by hand, what fits, and refusals."""

import dataclasses
import json

import pytest

from dspark_jax.commands.main import main
from dspark_jax.commands.plan import tpu
from dspark_jax.config import v4_flash_0731
from dspark_jax.errors import ConfigError
from dspark_jax.planning import sizes

CONFIG = v4_flash_0731()
ONE_EXPERT = 3 * 2048 * 4096 // 2 + 3 * 2048 * 4096 // 32  # packed codes and scales, bytes


@pytest.mark.parametrize("shards", (1, 4, 8))
def test_experts_and_embedding_are_cut(shards):
    parts = sizes.parameter_bytes(CONFIG, (1, shards))
    assert parts["experts"] == 43 * 256 * ONE_EXPERT // shards
    assert parts["embedding and head"] == 2 * 129280 * 4096 * 2 // shards
    copy_of_the_head = 129280 * 4096 * 2 if shards > 1 else 0
    assert parts["draft"] > 3 * 256 * ONE_EXPERT // shards + 2 * 129280 * 256 * 2 + copy_of_the_head


def test_a_cache_grows_by_its_entries():
    entries = 21 * (65536 // 4) * (512 + 128) * 2 + 20 * (65536 // 128) * 512 * 2
    assert sizes.cache_bytes(CONFIG, 131072) - sizes.cache_bytes(CONFIG, 65536) == entries


def test_what_is_said_to_fit_fits_and_no_more():
    target, mesh = tpu("v5p:2x2x1"), (1, 4)
    made = sizes.make_plan(CONFIG, target, mesh, 65536, 1, 2.5)
    assert made.fits and made.total <= target.memory

    def total(streams):
        return sizes.make_plan(CONFIG, target, mesh, 65536, streams, 2.5).total

    assert total(made.most_streams) <= target.memory < total(made.most_streams + 1)


def layer_bytes(shards):
    """Bytes per device of what every layer has but its routed experts: counted by hand, as the next
    two.
    """
    attention = 2 * ((32768 * 1024 + 2 * 8192 * 4096) // shards + (1024 + 512) * 4096) + 4 * (
        64 // shards + 512 + 1024
    )
    router_and_shared_expert, norms, mixing = (
        2 * (256 + 3 * 2048) * 4096,
        4 * 2 * 4096,
        4 * 2 * (24 * 16384 + 24 + 3),
    )
    return attention + router_and_shared_expert + norms + mixing


def layers_bytes(shards):
    """43 layers, of which 21 have a ratio-4 and 20 a ratio-128 compressor, and the last norm."""
    ratio_4 = 2 * 2 * 1024 * 4096 + 4 * (4 * 1024 + 512)
    indexer = 2 * 2 * 256 * 4096 + 4 * (4 * 256 + 128) + 2 * (8192 * 1024 + 64 * 4096) // shards
    ratio_128 = 2 * 2 * 512 * 4096 + 4 * (128 * 512 + 512)
    routing = 40 * 256 * 4 + 3 * 129280 * 6 * 4  # biases, and tables of the layers routed by token
    return (
        43 * layer_bytes(shards)
        + 21 * (ratio_4 + indexer)
        + 20 * ratio_128
        + routing
        + HEAD_MIXING
        + 4 * 4096
    )


def stages_bytes(shards):
    """Three draft stages with their projection, Markov tables, confidence and norms, and the copy
    of a head that is cut.
    """
    own = 2 * 4096 * 3 * 4096 + 2 * 2 * 129280 * 256 + 2 * (4096 + 256) + HEAD_MIXING + 4 * 2 * 4096
    return 3 * (layer_bytes(shards) + 256 * 4) + own + (2 * 129280 * 4096 if shards > 1 else 0)


# Of a row, of its logits, and of a prefill of one stream, on a model axis of 4.
A_ROW = 4 * 4 * 4096 * 4 + 512 * 512 * 2 + 16 * (128 + 128 + 512) * 4 * 2 + 3 * 16 * 512 * 4
ITS_LOGITS = 4 * 129280 * 4
PREFILL = 128 * A_ROW + ITS_LOGITS
HEAD_MIXING = 4 * (4 * 16384 + 4 + 1)
WINDOWS = 43 * 128 * 512 * 2
CACHE_READ_AT_64K = WINDOWS + 21 * (16384 * 128 + 512 * 512) * 2 + 20 * 512 * 512 * 2


@pytest.mark.parametrize(
    "mesh, streams, each",
    (((1, 1), 1, 1), ((1, 4), 1, 1), ((1, 4), 3, 3), ((2, 4), 6, 3), ((2, 4), 1, 1)),
)
def test_bytes_of_a_step_counted_by_hand(mesh, streams, each):
    """The formula that is printed, with `each` streams per device; a token of one chooses 6 of 256
    experts in a layer.
    """

    def experts(rows):
        return 256 * (1 - (250 / 256) ** rows) * ONE_EXPERT / mesh[1]

    shared = layers_bytes(mesh[1]) + 129280 * 4096 * 2 / mesh[1] + each * CACHE_READ_AT_64K
    step = shared + 43 * experts(each)
    round_ = shared + 43 * experts(each * 6) + stages_bytes(mesh[1]) + 3 * experts(each * 5)
    target = sizes.Target("devices", mesh[0] * mesh[1], 1e12, 2e12)
    speed = sizes.make_plan(CONFIG, target, mesh, 65536, streams, 2.5).speed
    assert (speed["bytes_per_plain_step"], speed["bytes_per_round"]) == pytest.approx(
        (step, round_), abs=1
    )
    assert speed["plain_tokens_per_second_per_stream"] == pytest.approx(2e12 / step)
    assert speed["speculative_tokens_per_second_per_stream"] == pytest.approx(3.5 * 2e12 / round_)


@pytest.mark.parametrize("shards, heads", ((1, 64), (4, 16)))
def test_activations_counted_by_hand(shards, heads):
    """A prefill of 128 rows needs more than a round of 6; a round of 61 rows, each with its logits,
    needs more than that.
    """
    a_row = (
        4 * 4 * 4096 * 4 + 512 * 512 * 2 + heads * (128 + 128 + 512) * 4 * 2 + 3 * heads * 512 * 4
    )
    logits = 4 * 129280 * 4
    assert sizes.activation_bytes(CONFIG, (1, shards), 1) == 128 * a_row + logits
    drafts = dataclasses.replace(CONFIG, dspark_block_size=60)
    assert sizes.activation_bytes(drafts, (1, shards), 1) == 61 * (a_row + logits)


def test_the_data_axis_deals_out_streams():
    """8 streams on 2x4 are 4 on each half; each half has all the parameters and holds as many
    streams as 1x4 does.
    """
    one = sizes.make_plan(CONFIG, sizes.Target("4 devices", 4, 95e9), (1, 4), 65536, 4, 2.5)
    two = sizes.make_plan(CONFIG, sizes.Target("8 devices", 8, 95e9), (2, 4), 65536, 8, 2.5)
    parameters = (
        (43 + 3) * 256 * ONE_EXPERT // 4
        + 2 * 129280 * 4096 * 2 // 4
        + layers_bytes(4)
        + stages_bytes(4)
    )
    for made in (one, two):
        assert (sum(made.parameters.values()), made.activations) == (parameters, PREFILL)
        caches = (4 + 1) * sizes.cache_bytes(CONFIG, 65536)  # a prompt is prefilled in one more
        assert made.total == parameters + PREFILL + caches
    assert one.longest_context == two.longest_context
    a_stream = 6 * (A_ROW + ITS_LOGITS) + one.cache_per_stream  # of so many, rounds need the most
    assert one.most_streams == (95e9 - parameters - one.cache_per_stream) // a_stream == 88
    assert two.most_streams == 2 * 88


def test_one_stream_is_prefilled_in_its_own_cache():
    target = sizes.Target("4 devices", 4, 95e9)
    alone, two = (
        sizes.make_plan(CONFIG, target, (1, 4), 65536, streams, 2.5).total for streams in (1, 2)
    )
    assert two - alone == 2 * sizes.cache_bytes(CONFIG, 65536)


def test_many_streams_need_the_most_in_a_round():
    """30 rows of five streams are less than a chunk, 270 of 45 are more."""
    made = [sizes.activation_bytes(CONFIG, (1, 4), streams) for streams in (1, 5, 45)]
    assert made == [PREFILL, PREFILL, 45 * 6 * (A_ROW + ITS_LOGITS)]


def test_most_streams_has_no_ceiling():
    """A thousand times the memory of v5p:2x2x1, far more than 65536 streams of 8192 tokens."""
    made = sizes.make_plan(CONFIG, sizes.Target("4 devices", 4, 95e12), (1, 4), 8192, 1, 2.5)
    free = 95e12 - sum(made.parameters.values())
    a_stream = 6 * (A_ROW + ITS_LOGITS) + made.cache_per_stream
    assert made.most_streams == (free - made.cache_per_stream) // a_stream > 1 << 18


def test_no_stream_fits_beside_parameters_that_do_not():
    assert (
        sizes.make_plan(
            CONFIG, sizes.Target("8 devices", 8, 1e9), (2, 4), 8192, 1, 2.5
        ).most_streams
        == 0
    )


@pytest.mark.parametrize(
    "mesh, context, streams, message",
    (
        ((1, 3), 65536, 1, "mesh 1x3 is of 3 devices, not of 4 .v5p:2x2x1."),
        ((1, 4), 0, 1, "context 0 is not between"),
        ((1, 4), -5, 1, "context -5 is not between"),
        ((1, 4), 65536, 0, "streams 0: at least 1 is needed"),
        ((1, 4), 65536, -4, "streams -4: at least 1 is needed"),
        ((4, 1), 65536, 0, "streams 0: at least 1 is needed"),
        ((4, 1), 65536, 6, "6 streams do not divide over the 4 devices"),
    ),
)
def test_refusals(mesh, context, streams, message):
    with pytest.raises(ConfigError, match=message):
        sizes.make_plan(CONFIG, tpu("v5p:2x2x1"), mesh, context, streams, 2.5)


@pytest.mark.parametrize(
    "devices, memory, bandwidth, message",
    (
        (0, 1e12, None, "at least 1 device"),
        (-4, 1e12, None, "at least 1 device"),
        (4, 0, None, "memory of a device must be"),
        (4, float("nan"), None, "memory of a device must be"),
        (4, 1e12, 0, "bandwidth of a device must be"),
        (4, 1e12, float("inf"), "bandwidth of a device must be"),
    ),
)
def test_a_target_that_cannot_be_is_refused(devices, memory, bandwidth, message):
    with pytest.raises(ConfigError, match=message):
        sizes.make_plan(
            CONFIG, sizes.Target("here", devices, memory, bandwidth), (1, devices), 65536, 1, 2.5
        )


@pytest.mark.parametrize("accepted", (float("nan"), float("inf"), -3, -0.1, 5.1, 500))
def test_accepted_lies_within_the_draft_block(accepted):
    with pytest.raises(
        ConfigError, match="drafts accepted per round must lie between 0 and 5, the draft block"
    ):
        sizes.make_plan(CONFIG, tpu("v5p:2x2x1"), (1, 4), 65536, 1, accepted)


@pytest.mark.parametrize("accepted", (0, 5))
def test_none_or_all_of_the_drafts_may_be_accepted(accepted):
    speed = sizes.make_plan(CONFIG, tpu("v5p:2x2x1"), (1, 4), 65536, 1, accepted).speed
    rounds = 2765e9 / speed["bytes_per_round"]
    assert speed["speculative_tokens_per_second_per_stream"] == pytest.approx(
        (accepted + 1) * rounds
    )


@pytest.mark.parametrize(
    "topology, form",
    (
        ("v5p:2x2", "v5p has 3 dimensions of at least 1, such as v5p:2x2x1"),
        ("v5p:4", "v5p has 3 dimensions"),
        ("v5p:2x2x1x1", "v5p has 3 dimensions"),
        ("v5p:0x2x1", "v5p has 3 dimensions of at least 1"),
        ("v6e:2x2x2", "v6e has 2 dimensions of at least 1, such as v6e:2x4"),
        ("v5e:2x2x1", "v5e has 2 dimensions of at least 1, such as v5e:2x4"),
        ("v5p", "one of v5e, v5p, v6e with its shape"),
        ("", "one of v5e, v5p, v6e with its shape"),
    ),
)
def test_topologies_that_do_not_exist(topology, form, capsys):
    assert main(["plan", "--topology", topology]) == 2
    assert form in capsys.readouterr().err


@pytest.mark.parametrize(
    "topology, devices", (("v5p:2x2x1", 4), ("v5p:4x4x8", 128), ("v6e:2x4", 8), ("v5e:4x4", 16))
)
def test_topologies_that_exist(topology, devices):
    assert tpu(topology).devices == devices


@pytest.mark.parametrize(
    "arguments, message",
    (
        ("--devices 0 --memory 141GB", "at least 1 device"),
        ("--devices -4 --memory 141GB", "at least 1 device"),
        ("--devices 4 --memory 0GB", "--memory '0GB': must be more than 0"),
        ("--devices 4 --memory=-1GB", "--memory '-1GB': expected a number"),
        ("--devices 4 --memory " + "9" * 400 + "GB", "must be more than 0 and finite"),
        ("--devices 4 --memory 141GB --bandwidth 0TB", "--bandwidth '0TB': must be more than 0"),
        ("--devices 4 --memory 141GB --bandwidth=", "--bandwidth '': expected a number"),
        ("--devices 4 --memory=", "--memory '': expected a number"),
        (
            "--memory 141GB",
            "--memory goes with --devices; the memory and bandwidth of v5p:2x2x1 are known",
        ),
        (
            "--topology v6e:2x4 --bandwidth 4TB",
            "--bandwidth goes with --devices; the memory and bandwidth of v6e:2x4 are known",
        ),
        ("--mesh=", "mesh: '' is not DATAxMODEL"),
        (
            "--mesh 0x4",
            "mesh 0x4 is of 0 devices, not of 4 (v5p:2x2x1); its sizes must multiply to "
            "4, such as 1x4",
        ),
        (
            "--devices 1 --memory 141GB --mesh 1x2",
            "mesh 1x2 is of 2 devices, not of 1 (1 device)",
        ),
        (
            "--devices 4 --memory 141GB --mesh 1x2",
            "mesh 1x2 is of 2 devices, not of 4 (4 devices)",
        ),
        ("--accepted nan", "between 0 and 5"),
        ("--accepted -3", "between 0 and 5"),
        ("--context 0", "context 0"),
        ("--streams 0", "streams 0: at least 1"),
        ("--streams -8", "streams -8: at least 1"),
    ),
)
def test_wrong_arguments_are_one_clear_error(arguments, message, capsys):
    assert main(["plan", *arguments.split(" ")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_devices_and_a_topology_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--devices", "4", "--memory", "141GB", "--topology", "v5p:2x2x1"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_an_axis_that_does_not_divide_is_named():
    with pytest.raises(ConfigError, match="o_groups is 8"):
        sizes.make_plan(CONFIG, sizes.Target("12 devices", 12, 1e12), (1, 12), 65536, 1, 2.5)


def test_command(capsys):
    assert main(["plan", "--topology", "v5p:2x2x1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert (
        main(["plan", "--topology", "v5e:2x2"]) == 1
        and "It does not fit" in capsys.readouterr().out
    )
    assert main(["plan", "--devices", "4"]) == 2 and "--memory" in capsys.readouterr().err
    assert (
        main(["plan", "--topology", "v9:2x2"]) == 2 and "v5e, v5p, v6e" in capsys.readouterr().err
    )
