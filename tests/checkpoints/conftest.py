"""A synthetic official checkpoint and its conversion. Tests damage copies of them."""

import pytest

from helpers import convert_parts as parts


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return parts.write_source(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "new"
    parts.convert(source, target)
    return target


@pytest.fixture(scope="session")
def held(converted):
    return parts.contents(converted)
