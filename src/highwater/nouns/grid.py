"""Grid: the lengths that a search tries, by index."""

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.refusals import MOST_LENGTHS
from highwater.units import format_tokens

PUBLISHED_STEP_TOKENS = 4096


class Grid(Record, frozen=True, kw_only=True):
    """The lengths that are tried: index 1 is ``start_tokens``, each index one step longer.

    The published grid steps by 4096 up to the native length, then by a quarter of it.
    """

    start_tokens: int
    step_tokens: int
    native_length_tokens: int
    beyond_step_tokens: int
    """Step past the native length."""
    max_tokens: int
    """Ceiling of the search: longer lengths are not tried."""

    def __post_init__(self) -> None:
        """Raise UsageError for a grid without a length."""
        if min(self.start_tokens, self.step_tokens, self.beyond_step_tokens) < 1:
            raise UsageError(
                "the grid of lengths has a step or a start below 1",
                hint="for example `--start-length 4096 --resolution 4096`",
            )
        if self.start_tokens < 2:
            raise UsageError(
                f"a start length of {self.start_tokens} token",
                hint="use `--start-length 2` or more",
            )
        if self.max_tokens < self.start_tokens:
            raise UsageError(
                f"the longest length to try, {self.max_tokens}, is below the start length "
                f"{self.start_tokens}",
                hint=f"use `--start-length {self.max_tokens}`",
            )
        if self.size > MOST_LENGTHS:
            coarser = -(-(self.max_tokens - self.start_tokens) // (MOST_LENGTHS - 1))
            raise UsageError(
                f"there are {format_tokens(self.size)} lengths to try up to "
                f"{format_tokens(self.max_tokens)}, and "
                f"{format_tokens(MOST_LENGTHS)} is the most",
                hint=f"use `--resolution {coarser}` or more",
            )

    @property
    def size(self) -> int:
        """Number of lengths on the grid."""
        return self.index_at_most(self.max_tokens)

    def length(self, index: int) -> int:
        """Tokens at ``index`` (1 is the start length)."""
        within = self._indices_up_to_native
        if index <= within:
            return self.start_tokens + (index - 1) * self.step_tokens
        last = self.start_tokens + (within - 1) * self.step_tokens
        return last + (index - within) * self.beyond_step_tokens

    def index_at_most(self, tokens: int) -> int:
        """Largest index whose length is at most ``tokens``; 0 when even the start is longer."""
        if tokens < self.start_tokens:
            return 0
        within = self._indices_up_to_native
        last = self.length(within)
        if tokens < last:
            return (tokens - self.start_tokens) // self.step_tokens + 1
        return within + (tokens - last) // self.beyond_step_tokens

    @property
    def _indices_up_to_native(self) -> int:
        """Indices reached by ``step_tokens``. The published scan adds a small step for as long as
        it is below the native length.
        """
        below = self.native_length_tokens - self.start_tokens
        return 1 + max(0, -(-below // self.step_tokens))
