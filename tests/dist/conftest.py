"""Groups of processes."""

from collections.abc import Iterator

import pytest
from rank_groups import RankGroups


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroups]:
    groups = RankGroups(tmp_path_factory.mktemp("ranks"))
    yield groups
    groups.end()
