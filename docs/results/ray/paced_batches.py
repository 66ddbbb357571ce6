"""Batches for ``--data paced_batches:paced``, each of which comes as late as if a GPU had computed:
nodes that share one machine's cores show how trials are placed, not how fast they compute.
"""

import time
from collections.abc import Iterator

PACE_S = 2.0
"""Seconds before each micro-batch."""


def paced(*, length_tokens: int, **_: object) -> Iterator[list[list[int]]]:
    """One sequence a micro-batch, after a while."""
    while True:
        time.sleep(PACE_S)
        yield [list(range(length_tokens))]
