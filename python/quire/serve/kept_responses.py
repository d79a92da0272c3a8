"""What `/v1/responses` keeps for `previous_response_id`."""

from __future__ import annotations

import collections
import json
import secrets
from typing import Any

from quire.serve.limits import Limits
from quire.serve.problems import Problem

__all__ = ["KeptResponses", "Messages", "new_response_id"]

Messages = list[dict[str, Any]]


def new_response_id() -> str:
    """An id that no client can choose: one that is chosen twice would take the place of another."""
    return f"resp_{secrets.token_hex(16)}"


class _Own:
    """What one tenant has, the oldest first: messages as JSON, since the objects of short ones take
    seven times as much memory. bytes: of all."""

    def __init__(self) -> None:
        self.kept: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.bytes = 0

    def remove(self, id: str) -> None:
        self.bytes -= len(self.kept.pop(id, ""))


class KeptResponses:
    """Conversations by the id of their last response. A tenant finds its own alone. One that is
    longer than a body may be is not kept: to read it would hold the event loop.

    Where there are too many, or too many bytes, the tenant with the most of them gives up its
    oldest ones. So no tenant loses what is within an equal part of the limits, whatever others do.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tenants: dict[str, _Own] = {}

    def put(self, tenant: str, id: str, messages: Messages) -> None:
        text = json.dumps(messages, separators=(",", ":"))  # in ASCII: a byte per character
        if len(text) > self._limits.body_bytes:
            return
        own = self._tenants.setdefault(tenant, _Own())
        own.remove(id)
        own.kept[id] = text
        own.bytes += len(text)
        while self.count > self._limits.responses:
            self._give_up(max(self._tenants, key=lambda name: len(self._tenants[name].kept)))
        while self.bytes > self._limits.responses_bytes:
            self._give_up(max(self._tenants, key=lambda name: self._tenants[name].bytes))

    @property
    def count(self) -> int:
        """Responses that are kept."""
        return sum(len(own.kept) for own in self._tenants.values())

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(own.bytes for own in self._tenants.values())

    def _give_up(self, tenant: str) -> None:
        own = self._tenants[tenant]
        own.remove(next(iter(own.kept)))
        if not own.kept:
            del self._tenants[tenant]

    def get(self, tenant: str, id: str) -> Messages:
        """Problem (404) for what is not there, or another tenant's."""
        own = self._tenants.get(tenant)
        if own is None or id not in own.kept:
            raise Problem(
                404,
                f"there is no response {id[:80]!r}: it was not stored, made room for others, or "
                f"had more than {self._limits.body_bytes} bytes with all that came before",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        own.kept.move_to_end(id)
        messages: Messages = json.loads(own.kept[id])
        return messages
