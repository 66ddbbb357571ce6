"""The mode of PyTorch's caching allocator, and the environment variables that set it."""

from highwater.spec.settings import Allocator

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name, and the one that PyTorch before 2.9 reads: both are set, alike."""
ALLOCATOR_MODES: dict[Allocator, str] = {
    "native": "expandable_segments:False",
    "expandable": "expandable_segments:True",
}
ENV_IN_WORDS = f"{ALLOCATOR_VARIABLES[0]}={ALLOCATOR_MODES['expandable']}"
"""The guide's "Env", to be typed after ``export``."""
ENV_BEFORE_IN_WORDS = f"before PyTorch 2.9 the variable is {ALLOCATOR_VARIABLES[1]}"


def allocator_environment(allocator: Allocator) -> dict[str, str]:
    """Variables that tell the allocator its mode, to be set before any process starts."""
    return dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR_MODES[allocator])
