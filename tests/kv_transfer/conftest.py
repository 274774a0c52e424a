"""Fixtures of the tests of managers."""

from collections.abc import Iterator

import pytest

from tests.kv_transfer.manager_ranks import Site


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    with made.stack:
        yield made
