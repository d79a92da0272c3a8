"""`/tokenize`, `/detokenize`, `/v1/models`, `/version`, `/query`, `/health`, `/health/live`,
`/metrics`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

import quire
from quire.serve import generation as common
from quire.serve.calls import Call, answer_beside
from quire.serve.fields import Fields
from quire.serve.guard import STRANGER
from quire.serve.metrics import CONTENT_TYPE
from quire.serve.prefill_pairs import engine_id
from quire.serve.problems import Problem
from quire.serve.responses import JsonAnswer
from quire.serve.service import Service
from quire.text import Tokenizer

__all__ = [
    "detokenize",
    "health",
    "live",
    "metrics",
    "model",
    "models",
    "query",
    "tokenize",
    "version",
]

_TOKENS_MAX = 65_536  # of /detokenize, where the model has no more positions


async def tokenize(request: Request, service: Service) -> Any:
    """The token ids of a `prompt`, or of `messages` put through the chat template."""
    return await answer_beside(request, service, _read_text)


def _read_text(fields: Fields, service: Service) -> Callable[[dict[str, str]], JsonAnswer]:
    encode = _read_encoder(fields, service)
    positions = service.facts.positions

    def make(headers: dict[str, str]) -> JsonAnswer:  # of a million tokens in tenths of a second
        ids = encode()
        content = {"tokens": ids, "count": len(ids), "max_model_len": positions}
        return JsonAnswer(content, headers=headers)

    return make


def _read_encoder(fields: Fields, service: Service) -> Callable[[], list[int]]:
    """What encodes it."""
    service.facts.check_name(fields)
    tokenizer = service.engine.tokenizer
    if fields.has("messages"):
        messages = common.read_messages(fields, service.limits)
        variables = common.read_template_args(fields)
        fields.only("add_generation_prompt", True)
        fields.only("add_special_tokens", False)
        return functools.partial(_chat_ids, tokenizer, messages, variables)
    prompt = fields.text("prompt")
    if prompt is None:
        fields.refuse("prompt", "a text; or give messages")
    special = fields.boolean("add_special_tokens", True)
    return functools.partial(tokenizer.encode, prompt, add_special_tokens=special)


def _chat_ids(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> list[int]:
    """As a chat with these arguments of the template, of which a client chose the names."""
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.check_variables(variables)
    return tokenizer.encode_chat(messages, **variables)


async def detokenize(request: Request, service: Service) -> Any:
    """The text of `tokens`."""
    return await answer_beside(request, service, _read_tokens)


def _read_tokens(fields: Fields, service: Service) -> Callable[[dict[str, str]], JsonAnswer]:
    service.facts.check_name(fields)
    ids = fields.entries("tokens", max(service.facts.positions, _TOKENS_MAX))
    vocab_size = service.facts.vocab_size
    if ids is None or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        fields.refuse("tokens", f"a list of token ids from 0 to {vocab_size - 1}")
    decode = functools.partial(service.engine.tokenizer.decode, ids, skip_special_tokens=False)
    return lambda headers: JsonAnswer({"prompt": decode()}, headers=headers)


def _model_object(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "quire",
        "max_model_len": facts.positions,
    }


async def models(request: Request, service: Service) -> Any:
    data = [_model_object(service, name) for name in service.facts.names]
    return JsonAnswer({"object": "list", "data": data})


async def model(request: Request, service: Service) -> Any:
    Call.of(request).route = "/v1/models/NAME"
    name = request.path_params["name"]
    if name not in service.facts.names:
        raise Problem(404, f"the model {name[:80]!r} is not served here", code="model_not_found")
    return JsonAnswer(_model_object(service, name))


async def version(request: Request, service: Service) -> Any:
    return JsonAnswer({"version": quire.__version__})


async def query(request: Request, service: Service) -> Any:
    """What a router of Mooncake's form asks a prefill server: the engine ids by data-parallel rank,
    of which there is one."""
    return JsonAnswer({"0": {"engine_id": engine_id(service.prefill_endpoint)}})


async def live(request: Request, service: Service) -> Any:
    """200 as long as the process answers."""
    return JsonAnswer({"status": "ok"})


async def health(request: Request, service: Service) -> Any:
    """200 if a token was made within 10 s, else 503; the reason for those with a key."""
    reason = await service.health()
    if reason is None:
        return JsonAnswer({"status": "ok"})
    if Call.of(request).tenant is STRANGER:
        return JsonAnswer({"status": "unavailable"}, 503)
    return JsonAnswer({"status": "unavailable", "reason": reason}, 503)


async def metrics(request: Request, service: Service) -> Any:
    page = service.metrics.text(service.stats(), service.engine)
    return PlainTextResponse(page, media_type=CONTENT_TYPE)
