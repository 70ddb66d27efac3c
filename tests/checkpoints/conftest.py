"""A synthetic official checkpoint and its conversion, once for each file of tests."""

import pytest

from helpers import convert_parts as parts


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return parts.write_source(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "new"
    parts.convert(source, target)
    return target


@pytest.fixture(scope="module")
def held(converted):
    return parts.contents(converted)
