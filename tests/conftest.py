"""The golden model and its numbers, loaded once a session; the programs it compiles are shared by all tests of a process."""

import pytest

from golden_parts import play
from support import golden_arrays, golden_model


@pytest.fixture(scope="session")
def golden_float():
    """The golden model without activation quantisation, float32, max_seq_len 128, prefill_chunk 16."""
    return golden_model(activation_quant=False)


@pytest.fixture(scope="session")
def golden_reference():
    """The golden model with activation quantisation, float32, max_seq_len 128, prefill_chunk 16."""
    return golden_model(activation_quant=True)


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
