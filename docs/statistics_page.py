"""Writes the reference of a step's statistics from the table that the engine reads."""

from collections.abc import Iterator, Mapping

from highwater.spec.quantities import DOCUMENT, QUANTITIES, Group, Quantity

_TEXT = """\
# Statistics of a step

Every trial writes a line of JSON for each optimizer step beside its log, in \
`LOG_DIR/MODEL/gpu-2/sp-2/vanilla/model_len-4096.statistics.jsonl`. The numbers are those of the \
whole step, over all its micro-batches and GPUs, and read the same on 1 GPU and on 64. What one \
GPU had is a list by rank, and says so: `n_tokens_by_rank`.

```sh
highwater try tiny --device cpu --memory 2GiB --gpus 2 --ulysses 2 --length 301 --log-dir ./logs
```

`--tensorboard` writes the same numbers for TensorBoard, in `model_len-4096.tensorboard` beside \
the log; it needs `pip install tensorboard`. `--logit-range` adds the smallest and largest logit: \
one more pass over the logits. Everything else takes nothing of the GPU's memory: what a step \
computes of its trained tokens anyway is copied to the host while it goes on, no prediction \
changes, and `statistics_time_s` says how long the host took. Memory-only trials, whose losses \
mean nothing, write none.

A line leaves out what its step does not have: a reward model no perplexity, the CPU no MFU. \
`null` is a number that there was nothing for, such as a mean over no tokens.

## Over what, and of which ranks

- **Means over tokens** are sums over all micro-batches and ranks, divided by `n_valid_tokens` of \
all of them. A rank without a trained token adds nothing to either.
- **Perplexity** is a document's: its log-probabilities and its tokens are first added up over \
all ranks that share it, then comes the exponential. The mean over documents counts each once, \
those without a trained token not at all.
- **Smallest and largest** are of all ranks.
- **One sum** over all ranks a step carries everything, after the update: some tens of numbers, \
and two for each document. Nothing as long as the sequence or the vocabulary is sent.

From Python, `highwater.engine.statistics.Statistics(mesh, sequence, groups={"nll": "context"})` \
puts a number together from other ranks: `rank`, this one; `context`, those that share its \
sequences; `data`, those in its place in other sequences; `all`. `denominators={"nll": \
"n_tokens"}` divides a mean by another sum. What cannot be put together so is refused by name.

The synthetic sequences of a step do not depend on the layout either: they are numbered, and a \
number is the same sequence however many GPUs there are. A function of `--data` is told \
`data_rank` and `data_parallel_degree`, and decides that itself.

## The numbers
"""
_RANKS: Mapping[Group, str] = {"rank": "each rank", "context": "a sequence's", "all": "all"}


def statistics_page() -> str:
    """The page, with a row for each quantity."""
    return "\n".join((_TEXT, *_table(), ""))


def _table() -> Iterator[str]:
    yield "| name | what | over | of ranks |"
    yield "|---|---|---|---|"
    for name, quantity in QUANTITIES.items():
        yield f"| `{name}` | {quantity.says} | {_over(quantity)} | {_RANKS[quantity.group]} |"


def _over(quantity: Quantity) -> str:
    per = "documents" if quantity.per == DOCUMENT else f"`{quantity.per}`"
    return {
        "sum": f"count of {per}" if quantity.per else "sum",
        "mean": f"mean over {per}",
        "min": f"smallest of {per}" if quantity.per else "smallest",
        "max": f"largest of {per}" if quantity.per else "largest",
        "each": "list by rank",
        "same": "",
        "rate": f"divided by {per}" if quantity.per else "",
    }[quantity.how]
