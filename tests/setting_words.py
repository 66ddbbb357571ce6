"""One word for each setting: the words that pages, help and tables may not say for it."""

import html
import re

WORDS = {
    "nothing set": r"\bvanilla\b",
    "expandable": r"\bEnv\b",
    "chunked loss": r"[+] chunked\b|logits in chunks|[Ff]used loss",
    "chunked entropy": r"entropy-saving|[Ee]ntropy in chunks",
    "states on host": (
        r"\bOffload\b(?!-)|CPU[ -]offload|"
        r"\b[Oo]ffloaded states(?! and)|\bwith .*\boffload(?:,| and)"
    ),
    "moments": r"\bOffload-states|states-offload",
    "settings": r"only rungs|whole ladder",
    "activations on host": r"activations-on-host|activation[ -]offload",
    "attention's outputs kept": r"attention-kept|attention kept",
    "no recomputation": r"no-recompute|without recomputation",
    "recompute": r"(?:gradient|activation)[ -]checkpointing",
    "Ulysses": r"\bSP\b|[Ss]equence[ -]parallel",
    "ring": r"\bring=",
    # DataParallel's replicas, in threads, are none of these copies
    "copies": r"\bHSDP\b|(?<!DataParallel runs its )\breplicas\b",
    "LoRA": r"\bLoRA-\d",
}
"""By the word that is said of a setting: other words for the same."""
_PATH = re.compile(r"\w/\w")


def other_words(text: str) -> dict[str, list[str]]:
    """The other words of each setting in a text, whose paths, as the log tree has, are not read."""
    read = re.sub(
        r"\S+", lambda word: "" if _PATH.search(word[0]) else word[0], html.unescape(text)
    )
    found = {word: re.findall(others, read) for word, others in WORDS.items()}
    return {word: others for word, others in found.items() if others}
