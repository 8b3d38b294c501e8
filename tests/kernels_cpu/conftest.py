"""The tables are made once: they only hold compiled code and sleeping threads."""

import pytest

from tests.kernels_cpu import tables
from xylite.ops import Ops


@pytest.fixture(scope="session", params=tables.names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return tables.make(request.param)
