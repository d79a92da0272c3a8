"""The routes, as an application of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from quire.serve import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
    page_routes,
    text_routes,
)
from quire.serve.calls import Log
from quire.serve.guard import Guard
from quire.serve.responses import PREFIX_HEADER
from quire.serve.service import Service

__all__ = ["ROUTES", "make_app"]

Handler = Callable[[Request, Service], Awaitable[Any]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", openai_chat.handle),
    ("POST", "/v1/completions", openai_completions.handle),
    ("POST", "/v1/responses", openai_responses.handle),
    ("POST", "/v1/messages", anthropic_messages.handle),
    ("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens),
    ("GET", "/v1/models", text_routes.models),
    ("GET", "/v1/models/{name:path}", text_routes.model),
    ("POST", "/tokenize", text_routes.tokenize),
    ("POST", "/detokenize", text_routes.detokenize),
    ("GET", "/version", text_routes.version),
    ("GET", "/query", text_routes.query),
    ("GET", "/metrics", text_routes.metrics),
    ("GET", "/", page_routes.index),
    ("GET", "/page.css", page_routes.style),
    ("GET", "/page.js", page_routes.script),
    ("GET", "/page/state", page_routes.state),
    ("GET", "/health", text_routes.health),
    ("GET", "/health/live", text_routes.live),
)
"""Method, path and handler of everything that the server answers."""

_EXPOSED_HEADERS = ("x-request-id", "request-id", "x-quire-ignored", PREFIX_HEADER, "retry-after")


def make_app(
    service: Service, log: Log, *, hosts: frozenset[str] | None, origins: Sequence[str]
) -> ASGIApp:
    """hosts: as of Guard. origins: web pages of these may ask; "*" stands for all."""
    routes = [
        Route(path, _endpoint(handler, service), methods=[method])
        for method, path, handler in ROUTES
    ]
    # A router alone: Starlette's application would answer failures itself, in words of its own.
    app: ASGIApp = Router(routes, redirect_slashes=False)
    app = Guard(app, service, log, frozenset(path for _, path, _ in ROUTES), hosts)
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    return app


def _endpoint(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        found: Response = await handler(request, service)
        return found

    return endpoint
