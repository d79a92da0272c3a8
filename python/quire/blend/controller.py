"""How much of a blended prompt is computed again, and whether to load KV at all: decided by how
long loading and computing take.

While a layer is loaded the one before it is computed, so a part of the tokens can be computed again
for nothing: as many as loading leaves time for. Fewer than the floor are never taken, as quality
needs them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire import errors

__all__ = ["RATIO_FLOOR", "LoadingController", "is_worth_loading", "recompute_ratio"]

RATIO_FLOOR = 0.15
_NEW_WEIGHT = 0.25  # of the last measurement in a mean


def recompute_ratio(
    prefill_seconds: float, load_seconds: float, floor: float = RATIO_FLOOR
) -> float:
    """The part of the tokens to compute again: what can be computed while the KV is loaded, at
    least `floor`, at most 1.

    Args:
        prefill_seconds: that computing all tokens takes: of a layer, or of all layers.
        load_seconds: that loading their KV takes, of as many layers.
        floor: in [0, 1].

    Raises:
        BadArgumentError: a time below 0 or not finite, or a floor outside [0, 1].
    """
    _check_seconds("prefill_seconds", prefill_seconds)
    _check_seconds("load_seconds", load_seconds)
    if not 0 <= floor <= 1:
        raise errors.BadArgumentError(f"floor is {floor}; it must be from 0 to 1")
    if load_seconds >= prefill_seconds:
        return 1.0 if load_seconds > 0 else floor
    return max(floor, load_seconds / prefill_seconds)


def is_worth_loading(load_seconds: float, prefill_seconds: float) -> bool:
    """Whether to load KV that takes `load_seconds`, or to compute its tokens in `prefill_seconds`.

    Raises:
        BadArgumentError: a time below 0 or not finite.
    """
    _check_seconds("prefill_seconds", prefill_seconds)
    _check_seconds("load_seconds", load_seconds)
    return load_seconds < prefill_seconds


@dataclasses.dataclass
class _Speed:
    """Seconds for each unit, the last ones counting most."""

    seconds: float = 0.0
    count: int = 0

    def note(self, units: int, seconds: float) -> None:
        each = seconds / units
        weight = _NEW_WEIGHT if self.count else 1.0
        self.seconds += weight * (each - self.seconds)
        self.count += 1


class LoadingController:
    """The same decisions by what loads and prefills have taken so far. What was not measured yet
    is loaded, and computed again at the floor.

    Args:
        floor: the least part of the tokens that is computed again, in [0, 1].
        clock: seconds that only grow.
    """

    def __init__(
        self, floor: float = RATIO_FLOOR, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        recompute_ratio(1, 0, floor)  # raises what is wrong with it
        self._floor = floor
        self._clock = clock
        self._loads: dict[str, _Speed] = {}
        self._prefill = _Speed()

    @contextmanager
    def loading(self, tier: str, byte_count: int) -> Iterator[None]:
        """Measures a load of `byte_count` bytes (at least 1) from a tier; one that raises does not
        count. BadArgumentError before the block is run for no bytes."""
        _check_count("byte_count", byte_count)
        begin = self._clock()
        yield
        self.note_load(tier, byte_count, self._clock() - begin)

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Measures a prefill of `tokens` tokens (at least 1) in all layers. BadArgumentError before
        the block is run for no tokens."""
        _check_count("tokens", tokens)
        begin = self._clock()
        yield
        self.note_prefill(tokens, self._clock() - begin)

    def note_load(self, tier: str, byte_count: int, seconds: float) -> None:
        """A load that was measured elsewhere. BadArgumentError: no bytes, or no time."""
        _check_count("byte_count", byte_count)
        _check_seconds("seconds", seconds)
        self._loads.setdefault(tier, _Speed()).note(byte_count, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill that was measured elsewhere. BadArgumentError: no tokens, or no time."""
        _check_count("tokens", tokens)
        _check_seconds("seconds", seconds)
        self._prefill.note(tokens, seconds)

    def load_seconds(self, tier: str, byte_count: int) -> float:
        """What a load is expected to take; 0 where nothing of the tier was measured."""
        speed = self._loads.get(tier)
        return 0.0 if speed is None else speed.seconds * byte_count

    def prefill_seconds(self, tokens: int) -> float:
        """What a prefill is expected to take; 0 where none was measured."""
        return self._prefill.seconds * tokens

    def ratio(self, tier: str, byte_count: int, tokens: int) -> float:
        """:func:`recompute_ratio` of `tokens` tokens whose KV has `byte_count` bytes in a tier."""
        if not self._prefill.count:
            return self._floor
        return recompute_ratio(
            self.prefill_seconds(tokens), self.load_seconds(tier, byte_count), self._floor
        )

    def is_worth_loading(self, tier: str, byte_count: int, tokens: int) -> bool:
        """:func:`is_worth_loading` of the same. True where one of the two was not measured."""
        if tier not in self._loads or not self._prefill.count:
            return True
        return is_worth_loading(self.load_seconds(tier, byte_count), self.prefill_seconds(tokens))


def _check_seconds(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise errors.BadArgumentError(f"{name} is {seconds}; it must be finite and at least 0")


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise errors.BadArgumentError(f"{name} is {count}; it must be at least 1")
