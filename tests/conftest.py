"""The golden model and its numbers, loaded once a session; the programs it compiles are shared by all tests of a process."""

import pytest

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
