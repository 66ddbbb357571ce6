"""The answer of a prediction in a sentence or two, in plain words: what fits, with which settings,
what is left, how long a step takes. It stands before the table.
"""

from highwater.memory.capacity import CellPrediction, Prediction
from highwater.pages.other_training import other_training
from highwater.pages.text import plain
from highwater.spec.layout import Layout
from highwater.spec.settings import Settings
from highwater.units import format_bytes, format_seconds, format_tokens

_NOTHING = "nothing set"
_LACKS = {"device": "of each GPU", "host": "of host memory"}


def prediction_answer(prediction: Prediction) -> str:
    """How far a model trains, and with which settings; at one length whether it does. Where nothing
    fits: what is nearest to it lacks.
    """
    model, where = plain(prediction.model_name), f"{prediction.gpus} x {prediction.device_name}"
    fitting = [cell for cell in prediction.cells if cell.capacity_tokens]
    asked, native = prediction.length_tokens, prediction.native_length_tokens
    if not fitting:
        return _nothing(prediction, model, where)
    if asked is not None:
        first = fitting[0]  # the simplest
        return (
            f"Yes: {model} trains {format_tokens(asked)} tokens on {where}, predicted, with "
            f"{_how(first, is_scaled=asked > native)}.{_rest(first)}"
        )
    best = max(fitting, key=lambda cell: cell.capacity_tokens)
    said = (
        f"{model} trains up to {format_tokens(best.capacity_tokens)} tokens on {where}, predicted, "
        f"with {_how(best, is_scaled=best.capacity_tokens > native)}.{_rest(best)}"
    )
    stays = [cell for cell in fitting if cell.cell.settings.offload is False]
    if best.cell.settings.offload is not False and stays:
        on_gpus = max(stays, key=lambda cell: cell.capacity_tokens)
        said += f" With everything on the GPUs {format_tokens(on_gpus.capacity_tokens)}."
    return said


def _nothing(prediction: Prediction, model: str, where: str) -> str:
    """What the cell that is nearest to fitting lacks."""
    asked = prediction.length_tokens
    what = "at any length" if asked is None else f"at {format_tokens(asked)} tokens"
    nearest = min(prediction.cells, key=lambda cell: (cell.binding == "host", -cell.headroom_bytes))
    lacks = prediction.margin_bytes - nearest.headroom_bytes
    if nearest.binding == "host":
        lacks = nearest.footprint.host_bytes - (prediction.memory_limit.host_bytes or 0)
    return (
        f"No: {model} does not train {what} on {where}, predicted. Nearest is {_how(nearest)}, "
        f"which lacks {format_bytes(lacks)} {_LACKS.get(nearest.binding, '')}."
    )


def _how(predicted: CellPrediction, *, is_scaled: bool = False) -> str:
    """Settings and degrees in words, and YaRN where positions are scaled."""
    settings, layout = predicted.cell.settings, predicted.cell.layout
    words = [*_of_settings(settings, predicted.footprint.host_bytes), *_of_layout(layout)]
    words += ["YaRN"] if is_scaled else []
    if not words:
        return _NOTHING
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _of_settings(settings: Settings, host_bytes: int) -> list[str]:
    """Settings that are not the plainest, in words."""
    said = other_training(settings)
    if settings.allocator == "expandable":
        said.append("expandable segments")
    if settings.loss == "chunked":
        said.append("a loss in chunks")
    if settings.entropy == "chunked":
        said.append("an entropy in chunks")
    if settings.recompute == "all-but-attention":
        said.append("attention's outputs kept")
    if settings.recompute == "none":
        said.append("no recomputation")
    if settings.offloads_model:
        said.append(f"all states in host memory ({format_bytes(host_bytes)} of it)")
    if settings.offloads_states:
        said.append(f"the optimizer's moments in host memory ({format_bytes(host_bytes)} of it)")
    return said


def _of_layout(layout: Layout) -> list[str]:
    said: list[str] = []
    if layout.ulysses_degree > 1:
        said.append(f"each sequence shared by {layout.ulysses_degree} GPUs (Ulysses)")
    if layout.ring_degree > 1:
        said.append(f"a ring of {layout.ring_degree}")
    if layout.replicate_degree > 1:
        said.append(f"{layout.replicate_degree} copies of the states")
    return said


def _rest(predicted: CellPrediction) -> str:
    """What is left of a GPU, and the time of a step."""
    left = f" {format_bytes(max(0, predicted.headroom_bytes))} of each GPU is left at the least"
    if predicted.step is None:
        return f"{left}."
    step = predicted.step
    return (
        f"{left}; a step takes about {format_seconds(step.time_s)}, {step.tokens_per_s:,.0f} "
        "tokens/s."
    )
