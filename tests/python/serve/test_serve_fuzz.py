"""Seeded mutations of bodies, schemas and HTTP framing: each is answered, none with 500, and the
server goes on. Also pings, and what /health tells to those with a key."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from quire.serve.calls import Call
from quire.serve.guard import STRANGER
from quire.serve.tenants import ANYONE
from quire.serve.text_routes import health
from server_process import DEADLINE, PATIENT, Server, head, running
from test_serve_life import ENDLESS
from tiny_model import TinyModel

MESSAGES = [{"role": "user", "content": "What is a quire?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"$ref": "#/$defs/d"}},
    "required": ["a"],
    "$defs": {"d": {"type": "array", "items": {"type": "string", "maxLength": 3}}},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": 2,
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
    "/v1/completions": {"prompt": ["x", [5, 6]], "max_tokens": 2, "n": 2, "seed": 3, "top_p": 0.5},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 2, "text": {"format": {"type": "text"}}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "system": "Be brief.", "top_k": 4},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5, 6, 7]},
}
# What stands where another value was.
ODD: list[Any] = [None, True, -1, 2**63, 1e308, 0.5, "", "\0", "\ud800", [], {}, [[]], {"": 0}, "x" * 999]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inner:
        found.append((*path, key))
        if isinstance(each, (dict, list)):
            found += _places(each, (*path, key))
    return found


def _mutant(body: Any, chance: random.Random) -> Any:
    """The body with one to three values that are others."""
    body = json.loads(json.dumps(body))
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice(_places(body))
        inner = body
        try:
            for key in way:
                inner = inner[key]
            inner[last] = copy.deepcopy(chance.choice(ODD))
        except (KeyError, IndexError, TypeError):
            continue  # another value stands there by now
    return body


@pytest.mark.parametrize("path", BODIES)
def test_mutants_of_bodies_are_answered(server: Server, path: str) -> None:
    chance = random.Random(path)
    refused = 0
    for number in range(40):
        body = _mutant(BODIES[path], chance)
        data = json.dumps(body).encode()
        status, _, found = server.request("POST", path, data)
        assert status in (200, 400, 404, 413, 501), (path, number, body, found)
        if status != 200:
            refused += 1
            assert "defect" not in str(found) and len(str(found)) < 1000
    assert refused > 5
    assert server.request("GET", "/health")[0] == 200


def test_mutants_of_bytes_are_answered(server: Server) -> None:
    """Bytes that are changed, left out or put in: of JSON little is left."""
    chance = random.Random(7)
    for number in range(80):
        path = chance.choice(list(BODIES))
        data = bytearray(json.dumps(BODIES[path]).encode())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(0, 2)] = bytes(chance.choices(range(256), k=chance.randint(0, 2)))
        status, _, found = server.request("POST", path, bytes(data))
        assert status in (200, 400, 404, 413, 501), (path, number, bytes(data), found)
    assert server.request("GET", "/health")[0] == 200


def test_mutants_of_framing_are_answered_or_closed(server: Server) -> None:
    chance = random.Random(8)
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    whole = head("/v1/completions", len(body), "connection: close") + body
    for number in range(80):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(whole) - len(body))
            data[at : at + chance.randint(0, 3)] = bytes(chance.choices(b"\r\n:; \0\xffAa0", k=chance.randint(0, 3)))
        with server.connect() as peer:
            peer.sendall(bytes(data))
            peer.shutdown(1)  # so that a request that lacks its end is over
            answer = b""
            try:
                while part := peer.recv(65536):
                    answer += part
            except ConnectionResetError:
                pass
        if answer:
            status = int(answer.split(b" ", 2)[1])
            assert answer.startswith(b"HTTP/1.1 ") and status < 500, (number, bytes(data), answer)
    assert server.request("GET", "/health")[0] == 200


def test_a_silence_is_broken_by_pings(tiny: TinyModel) -> None:
    """A stream that waits for its place gets comments, which are no events."""
    options = ("--max-num-sequences", "1", "--limit", "ping_seconds=0.05", "--page-size", "16")
    with running(tiny.directory, *options, *PATIENT) as server:
        first = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
        headers = {"content-type": "application/json"}
        first.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}), headers)
        assert first.getresponse().readline().startswith(b"data: ")
        second = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
        asked = {"prompt": "x", "max_tokens": 2, "stream": True}
        second.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = second.getresponse()
        lines = [answer.readline() for _ in range(4)]
        assert lines == [b": ping\n", b"\n"] * 2
        first.close()
        rest = answer.read()
        assert b"data: {" in rest and rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("tenant", "told"), [(STRANGER, False), (ANYONE, True)])
def test_a_key_sees_why_the_server_is_not_healthy(tenant: Any, told: bool) -> None:
    async def reason() -> str:
        return "no token was made within 10 s"

    request: Any = SimpleNamespace(scope={"state": {"call": Call("id", tenant)}})
    answer = asyncio.run(health(request, SimpleNamespace(health=reason)))  # type: ignore[arg-type]
    assert answer.status == 503
    assert (b"no token" in answer._body) == told


