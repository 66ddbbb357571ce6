"""The page of a folder that is taken away, in Markdown: what was predicted, what the trainer does
otherwise, what is the user's to fill in, and what to look at before a long run.
"""

from collections.abc import Sequence

from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import settings_in_words
from highwater.nouns.study import RISK_IN_WORDS
from highwater.nouns.trainer import step_in_words
from highwater.pages.page import drawn_page
from highwater.trainers.emitted import Emitted

_STEPS = 10
"""Steps of a first run: the allocator's memory has long stopped to grow by then."""


def check_page(
    found: Recommendation, chosen: Candidate, emitted: Emitted, **told: str | Sequence[str]
) -> str:
    """The page's text. ``answer``: what was found, in a sentence; ``name``, ``package``: of the
    trainer; ``yours``: what the files leave to the user; ``command``: what was typed, but for the
    folder; ``roomier``: what asks for more headroom.
    """
    cell = chosen.cell
    return drawn_page(
        "check.j2",
        form="text",
        found=found,
        chosen=chosen,
        emitted=emitted,
        settings=settings_in_words(cell.settings, cell.layout, is_scaled=found.yarn is not None),
        used_bytes=found.device_bytes - found.reserved_bytes - (chosen.headroom_bytes or 0),
        risk_in_words=RISK_IN_WORDS,
        step=step_in_words(found.trainer),
        steps=_STEPS,
        **told,
    )
