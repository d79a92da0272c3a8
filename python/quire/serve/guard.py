"""The one layer before all routes: keys, hosts, the end of the server, request ids, the log.

A route that is added is guarded without doing anything; only `OPEN_PATHS` need no key.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire import errors
from quire.serve.addresses import address_key
from quire.serve.calls import Call, ClientGone, Log
from quire.serve.page_routes import PAGE_FILES
from quire.serve.problems import Problem, defect, from_engine
from quire.serve.refusal_log import RefusalLog
from quire.serve.request_ids import id_headers
from quire.serve.responses import JsonAnswer, encoded_headers
from quire.serve.service import Service
from quire.serve.tenants import Tenant

__all__ = ["OPEN_PATHS", "Guard"]

_PROBES = frozenset(("/health", "/health/live"))

OPEN_PATHS = _PROBES | frozenset(PAGE_FILES)
"""What routers probe without a key, and the files of the page, which asks for one itself."""

STRANGER = Tenant("?")
"""Of a request to an open path that has no valid key."""

# Asked every few seconds, or by anybody as often as he likes; only their failures are logged.
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}
_PLACES = 12  # of an error, in the log
_WRONG_KEYS = "wrong_keys"  # the limit, and the code of those that met it


class Guard:
    """Args:
    app: the routes.
    routes: their paths, of which metrics may speak.
    hosts: names that the header `host` may have; None: any. Where no key is asked for, it keeps out
        web pages that have the name of their own server point to this machine.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        log: Log,
        routes: frozenset[str],
        hosts: frozenset[str] | None,
    ) -> None:
        self._app = app
        self._service = service
        self._log = log
        self._refusals = RefusalLog(log)
        self._routes = routes
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id = scope["state"]["request_id"]
        call = Call(id, self._service.tenants.find(headers) or STRANGER)
        sender = _Sender(send, id_headers(scope["path"], id))
        begin = asyncio.get_running_loop().time()
        try:
            self._check(scope, headers, call.tenant)
            scope["state"]["call"] = call
            scope["app"] = self._app  # with it the router raises what it does not find
            await self._app(scope, receive, sender)
        except ClientGone:
            call.facts["gone"] = True
        except Problem as problem:  # it has no other name here: its traceback has this frame
            call.facts["error"] = problem.code or problem.type
            await self._tell(scope, receive, sender, problem)
        except HTTPException as error:
            found = _not_found(scope, error)
            call.facts["error"] = found.code or found.type
            await self._tell(scope, receive, sender, found, error.headers)
        except errors.QuireError as error:  # the engine has failed, or the server ends
            found = from_engine(error)
            call.facts["error"] = found.code or found.type
            await self._tell(scope, receive, sender, found)
        except Exception as error:
            self._log.write("error", "defect", id=id, error=type(error).__name__, at=_places(error))
            await self._tell(scope, receive, sender, defect(id))
        finally:
            self._note(scope, call, sender.status, asyncio.get_running_loop().time() - begin)

    def _check(self, scope: Scope, headers: Headers, tenant: Tenant) -> None:
        path = scope["path"]
        if self._hosts is not None and _host(headers) not in self._hosts:
            raise Problem(403, "the header host names another server", code="host")
        if path in OPEN_PATHS:
            return
        if tenant is STRANGER:
            raise self._without_key(scope)
        if self._service.draining:
            raise Problem(503, "the server is ending", code="shutting_down", retry_after=1)

    def _without_key(self, scope: Scope) -> Problem:
        """What a request without a valid key is told."""
        now = asyncio.get_running_loop().time()
        seconds = self._service.wrong_keys.note(address_key(scope["client"]), now)
        if seconds is None:
            return Problem(401, "the API key is missing or not valid", code="invalid_api_key")
        most = self._service.limits.wrong_keys
        message = f"more than {most} requests a minute without a valid key come from this address"
        problem = self._service.book.refuse(_WRONG_KEYS, 429, message)
        problem.retry_after = seconds
        return problem

    async def _tell(
        self,
        scope: Scope,
        receive: Receive,
        sender: _Sender,
        what: Problem,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """The problem as the answer; nothing where one has begun: its own end told it."""
        if sender.status is not None:
            return
        headers = {**what.headers, **(more or {})}
        if what.status == 401:
            headers["www-authenticate"] = "Bearer"
        if what.code in ("shutting_down", _WRONG_KEYS):
            headers["connection"] = "close"
        content = what.told_at(scope["path"])
        await JsonAnswer(content, what.status, headers)(scope, receive, sender)

    def _note(self, scope: Scope, call: Call, status: int | None, seconds: float) -> None:
        path = scope["path"]
        route = path if path in self._routes else call.route
        self._service.metrics.note_request(route, status or 499)
        if path in _QUIET_PATHS and status is not None and status < 400:
            return
        error = call.facts.get("error", "open_path")
        if call.tenant is STRANGER and (path in OPEN_PATHS or error == _WRONG_KEYS):
            now = asyncio.get_running_loop().time()
            address = address_key(scope["client"])
            self._refusals.note(error, status or 499, call.id, address, now)
            return
        facts: dict[str, Any] = {"id": call.id, "key": call.tenant.name, "method": scope["method"]}
        facts |= {"path": path[:128], "status": status or 499, "seconds": round(seconds, 4)}
        self._log.write("info", "request", **facts, **call.facts)


class _Sender:
    """Sends; adds headers, and remembers the status. status: None before the answer."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self.status: int | None = None
        self._send = send
        self._headers = encoded_headers(headers)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)


def _places(error: Exception) -> list[str]:
    """Where an error came from, the last call first. What it says may be a text of the client's,
    and is not for the log."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in itertools.islice(frames, _PLACES)
    ]


def _not_found(scope: Scope, error: HTTPException) -> Problem:
    """404 and 405 of the router."""
    path = scope["path"][:128]
    if error.status_code == 405:
        return Problem(405, f"{scope['method']} is not a method of {path}")
    return Problem(error.status_code, f"{path} is not a path of this server", code="not_found")


def _host(headers: Headers) -> str:
    """The header without its port."""
    return re.sub(r":[0-9]*$", "", headers.get("host", "")).lower()
