"""Batches of the copy task: random symbols, filler, and the same symbols again, which alone are
trained on: each is as far back as the sequence is long, less the symbols.
"""

from collections.abc import Iterator

import torch

SYMBOLS = 8
"""Symbols to copy."""
VOCABULARY = 18
FILLER, COPY = 0, 1


def batches(
    *, data_rank: int, data_parallel_degree: int, length_tokens: int, sequences: int
) -> Iterator[list[dict[str, list[int]]]]:
    """Micro-batches without end."""
    del data_parallel_degree
    random = torch.Generator().manual_seed(data_rank)
    filler = [FILLER] * (length_tokens - 2 * SYMBOLS - 1)
    while True:
        drawn = torch.randint(2, VOCABULARY, (sequences, SYMBOLS), generator=random).tolist()
        yield [
            {
                "input_ids": [*symbols, *filler, COPY, *symbols],
                "labels": [-100] * (length_tokens - SYMBOLS) + symbols,
            }
            for symbols in drawn
        ]
