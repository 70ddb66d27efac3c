"""The golden model and its numbers, loaded once a session; the programs it compiles are shared by
all tests of a process.

With several test processes, files that need the same programs go to one of them, which compiles
them once.
"""

from pathlib import Path

import pytest

import dspark_jax as dspark

from helpers.golden_parts import play
from helpers.memory_maps import free_programs_if_many
from helpers.round_parts import compilations, scripted
from helpers.short_model import short_model
from helpers.small_model import write_small_checkpoint
from helpers.support import MAX_SEQ_LEN, golden_arrays, golden_model

# Each line is run by one process. What takes longest begins first; files that are not named follow,
# each on its own.
TOGETHER = (
    ("test_mesh_streams",),
    ("test_sharding",),
    ("test_distributed",),
    ("test_round",),
    (
        "test_state_batch",
        "test_state_in_place",
        "test_state_prefill",
        "test_state_rejection",
        "test_state_rings",
    ),
    (
        "test_streams",
        "test_streams_ends",
        "test_logprobs",
        "test_generate",
        "test_generate_calibrated",
        "test_generate_faults",
        "test_session",
        "test_session_prefix",
        "test_session_file",
    ),
    ("test_goldens_reference", "test_state_bounds", "test_state_streams", "test_storage"),
    (
        "test_drafter",
        "test_drafter_tensors",
        "test_goldens_float",
        "test_layers",
        "test_nan_weights",
        "test_sequence",
    ),
    (
        "test_convert",
        "test_convert_processes",
        "test_damaged_conversions",
        "test_inspect_converted",
        "test_paths",
    ),
    ("test_compile",),
    ("test_train",),
    (
        "test_tiny",
        "test_cli",
        "test_record",
        "test_prompts",
        "test_prompts_resume",
        "test_calibrate",
        "test_drafter_seam",
        "test_settings",
    ),
    ("test_matrix",),
)
LINES = {name: number for number, names in enumerate(TOGETHER) for name in names}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LINES.get(item.path.stem, len(TOGETHER)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return str(LINES.get(Path(file).stem, file))

    config.option.loadscopereorder = False  # by number of tests
    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def programs_freed():
    yield
    free_programs_if_many()


@pytest.fixture(scope="session")
def golden_float():
    """The golden model without activation quantisation, float32, max_seq_len 128."""
    return golden_model(activation_quant=False)


@pytest.fixture(scope="session")
def golden_reference():
    """The golden model with activation quantisation, float32, max_seq_len 128."""
    return golden_model(activation_quant=True)


@pytest.fixture(scope="session")
def short_float():
    return short_model(activation_quant=False)


@pytest.fixture(scope="session")
def short_reference():
    return short_model(activation_quant=True)


# What tests of state and of rounds run on: see helpers/short_model.py.
MODELS = ["short", pytest.param("golden", marks=pytest.mark.heavy)]


@pytest.fixture(scope="session", params=MODELS)
def float_model(request):
    return request.getfixturevalue(f"{request.param}_float")


@pytest.fixture(scope="session", params=MODELS)
def reference_model(request):
    return request.getfixturevalue(f"{request.param}_reference")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Of one layer, for tests of what surrounds a model."""
    path = tmp_path_factory.mktemp("small")
    write_small_checkpoint(path)
    return dspark.load(path, max_seq_len=MAX_SEQ_LEN)


@pytest.fixture(scope="session")
def expected_float():
    return golden_arrays("expected_float")


@pytest.fixture(scope="session")
def expected_reference():
    return golden_arrays("expected_reference")


@pytest.fixture(scope="session")
def primitives():
    return golden_arrays("primitives")


@pytest.fixture(scope="session")
def played_float(golden_float, expected_float):
    """The three golden prompts, prefilled and fed the golden tokens."""
    return [play(golden_float, expected_float, prompt) for prompt in range(3)]


@pytest.fixture(scope="session")
def played_reference(golden_reference, expected_reference):
    return [play(golden_reference, expected_reference, prompt) for prompt in range(3)]


@pytest.fixture(scope="session")
def scripted_model(reference_model):
    """With activation quantisation, and a drafter that says what a test wants."""
    return scripted(reference_model)


@pytest.fixture(scope="session")
def prompts(expected_reference):
    """The three golden prompts."""
    return [expected_reference[f"p{i}.ids"].tolist() for i in range(3)]


@pytest.fixture(scope="session")
def plain_run(scripted_model, prompts):
    """The first run of the scripted model, and what it compiled."""
    with compilations() as compiled:
        return dspark.generate(
            scripted_model, prompts, 75, "plain", stop_token_ids=[], streams=1
        ), compiled


@pytest.fixture(scope="session")
def plain(plain_run):
    """The plain streams of the three prompts: 75 tokens each."""
    return plain_run[0].tokens
