"""Requests without a valid API key, counted by address.

A right key is answered whatever others send from its address: behind one proxy all clients have the
same. So this bounds what strangers cost, and shows them in /metrics; what keeps a key from being
guessed is its length.
"""

from __future__ import annotations

import collections
import math

__all__ = ["WrongKeys"]

_ADDRESSES_MAX = 10_000  # some 3 MB
_MINUTE = 60.0


class WrongKeys:
    """For the event loop's thread.

    Args:
        most: that an address may send at once; the same number is forgotten in a minute.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # By address, the last one last: how many count, and when that was so.
        self._counts: collections.OrderedDict[str, tuple[float, float]]
        self._counts = collections.OrderedDict()

    def note(self, address: str, now: float) -> int | None:
        """Counts a request. None: it is not one too many; else the seconds until there is room for
        one more. One that is too many does not count: there is room after that time."""
        count, since = self._counts.pop(address, (0.0, now))
        count = max(0.0, count - (now - since) * self._most / _MINUTE)
        is_too_many = count > self._most - 1
        self._counts[address] = (count if is_too_many else count + 1, now)
        if len(self._counts) > _ADDRESSES_MAX:
            self._counts.popitem(last=False)
        if not is_too_many:
            return None
        return math.ceil((count - (self._most - 1)) * _MINUTE / self._most)

    def __len__(self) -> int:
        """Addresses that are counted."""
        return len(self._counts)
