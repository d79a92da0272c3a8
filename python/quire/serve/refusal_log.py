"""Lines of the log for what strangers send, and how often they choose: they are bounded."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.serve.calls import Log

__all__ = ["RefusalLog"]


@dataclasses.dataclass
class _Span:
    """The lines of one cause since `begin`; left_out: refusals without one since the last line."""

    begin: float
    lines: int = 0
    left_out: int = 0


class RefusalLog:
    """At most `LINES` lines for each cause in `SECONDS`. A line has the number of refusals of its
    cause that had none before it. For the event loop's thread."""

    LINES = 10
    SECONDS = 10.0

    def __init__(self, log: Log) -> None:
        self._log = log
        self._spans: dict[str, _Span] = {}  # by cause, of which there are a few

    def note(self, cause: str, status: int, id: str, address: str, now: float) -> None:
        """A refusal. cause: a limit, or another code of the server's own. id: of the request.
        address: as address_key has it. now: in seconds."""
        span = self._spans.setdefault(cause, _Span(now))
        if now - span.begin >= self.SECONDS:
            span.begin, span.lines = now, 0
        if span.lines >= self.LINES:
            span.left_out += 1
            return
        span.lines += 1
        facts: dict[str, Any] = {"id": id, "address": address, "status": status, "error": cause}
        if span.left_out:
            facts["left_out"], span.left_out = span.left_out, 0
        self._log.write("info", "refused", **facts)
