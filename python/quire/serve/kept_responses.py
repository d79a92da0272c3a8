"""What `/v1/responses` keeps for `previous_response_id`."""

from __future__ import annotations

import collections
import json
from typing import Any

from quire.serve.limits import Limits
from quire.serve.problems import Problem

__all__ = ["KeptResponses", "Messages"]

Messages = list[dict[str, Any]]


class KeptResponses:
    """Conversations by the id of their last response; the oldest ones go when there are too many.
    A tenant finds its own alone."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: collections.OrderedDict[tuple[str, str], tuple[int, Messages]]
        self._kept = collections.OrderedDict()
        self._bytes = 0

    def put(self, tenant: str, id: str, messages: Messages) -> None:
        size = len(json.dumps(messages))
        self._kept[tenant, id] = size, messages
        self._bytes += size
        limits = self._limits
        while len(self._kept) > limits.responses or self._bytes > limits.responses_bytes:
            _, (size, _) = self._kept.popitem(last=False)
            self._bytes -= size

    def get(self, tenant: str, id: str) -> Messages:
        """Problem (404) for what is not there, or another tenant's."""
        if (tenant, id) not in self._kept:
            raise Problem(
                404,
                f"there is no response {id[:80]!r}: it was not stored, or made room for others",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end((tenant, id))
        return self._kept[tenant, id][1]
