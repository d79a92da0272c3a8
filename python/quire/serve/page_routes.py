"""The page at `/`: three static files, and how things stand as a stream of events."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import quire
from quire.serve.calls import Call, left
from quire.serve.metrics import TIERS
from quire.serve.responses import STREAM_HEADERS, encoded_headers, event
from quire.serve.service import Service
from quire.serve.tenants import Tenant

__all__ = ["PAGE_FILES", "index", "script", "state", "style"]

PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
"""Paths of the files, which say nothing of the server and need no key."""

_FOLDER = Path(__file__).with_name("page")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing inline, nothing from elsewhere, no frame around it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STATE_SECONDS = 0.5


@functools.cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _file(path: str) -> Response:
    name = PAGE_FILES[path]
    kind = _KINDS[Path(name).suffix] + "; charset=utf-8"
    return Response(_content(name), headers={**_HEADERS, "content-type": kind})


async def index(request: Request, service: Service) -> Any:
    return _file("/")


async def style(request: Request, service: Service) -> Any:
    return _file("/page.css")


async def script(request: Request, service: Service) -> Any:
    return _file("/page.js")


async def state(request: Request, service: Service) -> Any:
    """How things stand, twice a second, until the client leaves or the server ends."""
    return _States(service, Call.of(request).tenant)


class _States:
    """As an application of ASGI."""

    def __init__(self, service: Service, tenant: Tenant) -> None:
        self.status = 200
        self._service = service
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = encoded_headers(STREAM_HEADERS)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":  # it would keep the connection from further requests
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        gone = asyncio.create_task(left(receive))
        try:
            while not gone.done():
                body = _event_of(self._service, self._tenant)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                if self._service.draining:
                    break
                await asyncio.wait((gone,), timeout=_STATE_SECONDS)
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event_of(service: Service, tenant: Tenant) -> bytes:
    """Made once for all pages of a key: a thousand blocks take milliseconds of the event loop."""
    now = asyncio.get_running_loop().time()
    view = service.held_kv.view(tenant, now)
    events, key = service.held_kv.events, (tenant, service.draining)
    found = events.get(key)
    if found is None:
        found = events[key] = event(_state_of(service, view, now))
    return found


def _state_of(service: Service, view: dict[str, Any], now: float) -> dict[str, Any]:
    """Sums over all clients, and of single blocks and requests what is in the view."""
    metrics = service.metrics
    times = service.engine.step_times()
    latencies = {
        "first_token": metrics.time_to_first_token,
        "between_tokens": metrics.inter_token_latency,
    }
    return {
        "time": now,
        "model": service.facts.names[0],
        "version": quire.__version__,
        "draining": service.draining,
        "stats": service.stats(),
        "latency": {
            name: {"count": histogram.count, "sum": histogram.sum}
            for name, histogram in latencies.items()
        },
        "tiers": _tiers(service),
        "misses": dict(sorted(metrics.misses.items())),
        "step_times": {"bounds": times.bounds, "counts": times.counts, "seconds": times.seconds},
        "kv": view,
    }


def _tiers(service: Service) -> list[dict[str, Any]]:
    """The prefix cache, and the tiers that the store has."""
    store = service.engine.store
    found = {} if store is None else store.statistics()["tiers"]
    tiers: list[dict[str, Any]] = []
    for name in TIERS:
        tier = found.get(name)
        if name == "memory" or (tier is not None and tier["present"]):
            counts = {
                field: None if tier is None else int(tier[field])
                for field in ("bytes", "hits", "misses")
            }
            tiers.append({"name": name, "tokens": service.metrics.tier_tokens[name], **counts})
    return tiers
