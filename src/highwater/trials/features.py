"""What can be done with the packages that are installed, and what to install for the rest."""

from collections.abc import Sequence

from highwater.nouns.codec import Record
from highwater.nouns.hardware import Machine
from highwater.trials.probe import OLDEST, package_obstacles, release_of, versions_of


class Feature(Record, frozen=True, kw_only=True):
    """Commands or flags that need the same packages."""

    what: str
    """The commands or flags, as they are typed."""
    extras: tuple[str, ...] = ()
    """The extras of pyproject.toml that bring what they need; none: they need nothing more."""
    obstacles: tuple[str, ...] = ()
    """Why they do not work, a line for each package; none: they work."""

    @property
    def works(self) -> bool:
        """Whether nothing is in the way."""
        return not self.obstacles

    @property
    def install(self) -> str:
        """What to type in the checkout of highwater; it mends all that is in the way."""
        return f"pip install '.[{','.join(self.extras)}]'"


_FREE = "predict, recommend, guide, emit, show, report, profile"
_TRIALS = "find, try, train, bench attention, predict --exact"
_HUB = "models by any id of the Hub"
_OF_TRIALS = (
    ("find, try and train --lora", "lora", ("peft",)),
    ("find, try and train --lora-base nf4", "qlora", ("peft", "bitsandbytes")),
    ("find, try and train --optimizer adamw-8bit, adamw-bf16", "low-bit", ("torchao",)),
    ("find, try and train --tensorboard", "tensorboard", ("tensorboard",)),
    ("train on Parquet and saved datasets", "data", ("datasets",)),
    ("find and try --runner ray", "ray", ("ray",)),
)
"""What trials do with one package more, or two: the flags, the extra, the packages."""


def features(machine: Machine) -> tuple[Feature, ...]:
    """What can be done here, what needs nothing more first."""
    lacking = package_obstacles(machine)
    beside = ("train",) if lacking else ()
    return (
        Feature(what=_FREE),
        Feature(what=_HUB, extras=("hub",), obstacles=_obstacles(("huggingface_hub",))),
        Feature(what=_TRIALS, extras=("train",), obstacles=lacking),
        *(
            Feature(
                what=what,
                extras=(*beside, extra),
                obstacles=(*(("trials do not work",) if lacking else ()), *_obstacles(packages)),
            )
            for what, extra, packages in _OF_TRIALS
        ),
    )


def _obstacles(packages: Sequence[str]) -> tuple[str, ...]:
    """Why packages are of no use, a line each: not there, or too old."""
    installed = versions_of(packages)
    found: list[str] = []
    for package in packages:
        version = installed.get(package)
        oldest = OLDEST.get(package)
        if version is None:
            found.append(f"{package} is not installed")
        elif oldest is not None and release_of(version) < oldest:
            found.append(f"{package} {version} is too old")
    return tuple(found)
