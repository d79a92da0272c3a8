"""What holds which KV, as the page shows it: to each key what is its own.

What a key is not shown is not there: blocks have other numbers, and nothing tells how many there
are of others. `cut` alone is about all of them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from quire._description import Description
from quire.engine import Engine
from quire.serve.tenants import Tenant, Tenants

__all__ = ["HeldKV"]

_SALTS_MAX = 65_536  # of all keys; some 10 MB
_SALTS_PER_KEY_MAX = 1_024
_FRESH_SECONDS = 0.45  # of the page's half second: all its streams share a view


class HeldKV:
    """For the event loop's thread.

    events: what the page is sent of a view, kept by the page for all its streams as long as the
        view is fresh.
    """

    def __init__(self, engine: Engine, tenants: Tenants) -> None:
        self._engine = engine
        self._tenants = tenants
        self._description = engine.describe()
        self._read_at = -float("inf")
        self._views: dict[Tenant, dict[str, Any]] = {}
        self.events: dict[tuple[Tenant, bool], bytes] = {}
        keys = max(1, sum(1 for _ in tenants))
        self._salts_max = max(1, min(_SALTS_PER_KEY_MAX, _SALTS_MAX // keys))
        self._digests: dict[Tenant, collections.OrderedDict[str, None]] = {}

    def note_salt(self, tenant: Tenant, salt: bytes | None) -> None:
        """Remembers that KV of this salt is the key's, for the salts that it used last."""
        if not self._tenants.need_keys or salt is None:
            return
        digests = self._digests.setdefault(tenant, collections.OrderedDict())
        digest = self._description.salt_digest(salt)
        digests[digest] = None
        digests.move_to_end(digest)
        if len(digests) > self._salts_max:
            digests.popitem(last=False)

    def view(self, tenant: Tenant, now: float) -> dict[str, Any]:
        """What the key may see; all where there are no keys."""
        if now - self._read_at >= _FRESH_SECONDS:
            self._read_at = now
            self._description = self._engine.describe()
            self._views.clear()
            self.events.clear()
        found = self._views.get(tenant)
        if found is None:
            found = self._views[tenant] = _view(self._description, self._digests_of(tenant))
        return found

    def _digests_of(self, tenant: Tenant) -> frozenset[str] | None:
        if not self._tenants.need_keys:
            return None
        own = tenant.salt(None)
        assert own is not None
        return frozenset((self._description.salt_digest(own), *self._digests.get(tenant, ())))


def _view(description: Description, digests: frozenset[str] | None) -> dict[str, Any]:
    """digests: of the salts whose KV is shown; None: all."""

    def shown(items: Iterable[Any]) -> list[tuple[int, Any]]:
        return [
            (index, item)
            for index, item in enumerate(items)
            if digests is None or item.salt_digest in digests
        ]

    blocks = shown(description.blocks)
    numbers: dict[int | None, int] = {old: new for new, (old, _) in enumerate(blocks)}
    return {
        "blocks": [
            {**vars(block), "parent": numbers.get(block.parent)} for _, block in blocks
        ],
        "sequences": [
            {**vars(sequence), "block": numbers.get(sequence.block)}
            for _, sequence in shown(description.sequences)
        ],
        "waiting": [dict(vars(request)) for _, request in shown(description.waiting)],
        "cut": description.cut,
    }
