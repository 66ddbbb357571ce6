"""Settings in plain words: what has to be set, as one would say it to a colleague."""

from highwater.pages.other_training import other_training
from highwater.spec.layout import Layout
from highwater.spec.settings import Settings
from highwater.spec.study import Cell
from highwater.units import counted, format_bytes

NOTHING_SET = "nothing set"


def settings_in_words(
    cell: Cell, *, host_bytes: int | None = None, is_lowered: bool = False, is_scaled: bool = False
) -> str:
    """``expandable segments and a loss in chunks``; ``nothing set`` of the plainest settings.

    ``host_bytes`` is the host memory that offload takes, where it is known. ``is_lowered`` says
    that a micro-batch holds fewer sequences than by default, ``is_scaled`` that the length is past
    the model's native one.
    """
    said = [*_of_settings(cell.settings, host_bytes), *_of_layout(cell.layout)]
    if is_lowered:
        said.append(f"{counted(cell.settings.sequences_per_micro_batch, 'sequence')} a micro-batch")
    if is_scaled:
        said.append("YaRN")
    if not said:
        return NOTHING_SET
    *first, last = said
    return f"{', '.join(first)} and {last}" if first else last


def _of_settings(settings: Settings, host_bytes: int | None) -> list[str]:
    said = other_training(settings)
    of_host = f" ({format_bytes(host_bytes)} of it)" if host_bytes else ""
    if settings.allocator == "expandable":
        said.append("expandable segments")
    if settings.loss == "chunked":
        said.append("the loss in chunks")
    if settings.entropy == "chunked":
        said.append("the entropy in chunks")
    if settings.recompute == "all-but-attention":
        said.append("attention's outputs kept")
    if settings.recompute == "none":
        said.append("no recomputation")
    if settings.mlp_tiles is not None:
        said.append(f"the MLP in {counted(settings.mlp_tiles, 'tile')}")
    if not settings.accumulates:
        said.append("one micro-batch a step")
    if settings.offloads_model:
        said.append(f"all states in host memory{of_host}")
    if settings.offloads_states:
        said.append(f"the optimizer's moments in host memory{of_host}")
    return said


def _of_layout(layout: Layout) -> list[str]:
    said: list[str] = []
    if layout.ulysses_degree > 1:
        said.append(f"each sequence shared by {layout.ulysses_degree} GPUs")
    if layout.ring_degree > 1:
        said.append(f"a ring of {layout.ring_degree}")
    if layout.replicate_degree > 1:
        said.append(f"{layout.replicate_degree} copies of the states")
    return said
