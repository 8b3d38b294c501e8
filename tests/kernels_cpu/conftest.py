"""Each test has a table of its own: what a table packed decides how it hands rows over."""

import pytest

from tests.kernels_cpu import tables
from xylite.ops import Ops


@pytest.fixture(params=tables.names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return tables.make(request.param)
