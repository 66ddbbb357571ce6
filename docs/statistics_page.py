"""Writes the reference of a step's statistics from the table that the engine reads."""

from collections.abc import Iterator, Mapping

from highwater.engine.training.statistics import DOCUMENT, QUANTITIES, Group, Quantity

_TEXT = """\
# Statistics of a step

Every trial writes a line of JSON for each optimizer step beside its log, in \
`LOG_DIR/MODEL/gpu-2/sp-2/vanilla/model_len-4096.statistics.jsonl`. The numbers are those of the \
whole step, over all its micro-batches and GPUs, and read the same on 1 GPU and on 64. What one \
GPU had is a list by rank, and says so: `n_tokens_by_rank`.

```sh
highwater try tiny --device cpu --memory 2GiB --gpus 2 --ulysses 2 --length 301 --log-dir ./logs
```

`train --report-to tensorboard`, `wandb`, `mlflow` or `trackio` shows the same numbers \
[there](../guides/training.md#where-losses-are-looked-at). `--logit-range` adds the smallest and \
largest logit, and those of a token on average: one more pass over the logits. Everything else \
takes nothing of the GPU's memory: what a step computes of its trained tokens \
anyway is copied to the host while it goes on, no prediction changes, and `statistics_time_s` says \
how long the host took. Memory-only trials, whose losses mean nothing, write none.

A line leaves out what its step does not have: a reward model no perplexity, the CPU no MFU. \
`null` is a number that there was nothing for, such as a mean over no tokens, or one that JSON \
has no word for: infinity, and what is not a number.

## Over what, and of which ranks

- **Means over tokens** are sums over all micro-batches and ranks, divided by `n_valid_tokens` of \
all of them. A rank without a trained token adds nothing to either.
- **Perplexity** is a document's: its log-probabilities and its tokens are first added up over \
all ranks that share it, then comes the exponential. The mean over documents counts each once, \
those without a trained token not at all.
- **Smallest and largest** are of all ranks.
- **One sum** over all ranks a step carries everything, after the update: some tens of numbers, \
and two for each document. Nothing as long as the sequence or the vocabulary is sent.

## Your own

A loop around [`Trainer`](library.md) declares numbers of its own, and adds to them; they are told \
with the step's, by the same one sum.

```python
import warnings

from highwater.engine import Quantity, Trainer

warnings.simplefilter("ignore")  # random weights
own = {
    "even_labels": Quantity(how="mean", per="n_valid_tokens"),
    "largest_label": Quantity(how="max"),
    "reward": Quantity(how="mean", per="n_documents", group="data"),
}
rewards, documents = [1.0, 0.0], [[5, 6, 7, 8], [9, 4, 2]]
with Trainer("tiny", length=8, device="cpu", quantities=own) as trainer:
    trainer.step([documents])
    for batch in trainer.batches([documents]):  # this rank's share of the tokens
        for label in batch.labels_N.tolist():
            trainer.add("even_labels", label % 2 == 0)
            trainer.add("largest_label", label)
    for reward in rewards:  # of whole documents
        trainer.add("reward", reward)
    numbers = trainer.statistics()  # on every rank
print({name: numbers[name] for name in ("loss", "n_valid_tokens", *own)})
```

| field of `Quantity` | says |
|---|---|
| `how` | `sum`, `mean`, `min` or `max` |
| `per` | of a mean: the sum that it is divided by, `n_tokens`, `n_valid_tokens`, \
`prompt_tokens`, `n_documents` or your own |
| `group` | `all`: each rank adds its own share, as of the tokens that it holds. `data`: ranks \
that share a sequence all add the same, as of whole documents, and it counts once. `context`, \
`rank`: the number stays that of the ranks that share a sequence, or of one |
| `is_count` | of a sum, a smallest or a largest: whole numbers alone are added, and one is told |

So declared, a number is the same on 1 GPU, with Ulysses, with a ring and over data-parallel \
ranks. A rank that adds nothing adds 0, or no number to a smallest or largest, which is `None` \
where no rank added one. NaN on any rank makes the number NaN, and an infinity is told as one. A \
value is a number or a tensor of one element. A name that was not declared is refused with those \
that were and what can be; so is a mean to whose denominator a rank added nothing. `statistics()` \
is of one step: call it after each step that you add to.

## Other ranks, other denominators

From Python, \
`highwater.engine.training.statistics.Statistics(mesh, sequence, groups={"nll": "context"})` \
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
