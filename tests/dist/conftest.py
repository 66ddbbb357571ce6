"""Groups of processes."""

import pytest
from rank_groups import RankGroups


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankGroups:
    return RankGroups(tmp_path_factory.mktemp("ranks"))
