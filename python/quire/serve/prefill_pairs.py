"""Two servers for one answer: `kv_transfer_params` of a body, as routers send them for vLLM's
connectors of NIXL and of Mooncake.

A router sends a request to the prefill server with `do_remote_decode`, and to the decode server
with `do_remote_prefill` and the `remote_engine_id` that the prefill server has told: in its answer
(NIXL), or at `/query` (Mooncake). Here that is the address of `--prefill-listen`. The decode server
asks the process at this address for the prompt, and only if it is one of its own `--prefill-from`:
a body makes no connection. The prefill server holds the prompt's KV in its prefix cache for a
while, or computes it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from quire.serve.fields import Fields
from quire.serve.problems import Problem

__all__ = ["FIELD", "Handover", "engine_id", "least_tokens", "read_handover", "told_of"]

FIELD = "kv_transfer_params"
_ENGINE_ID_BYTES = 512


@dataclasses.dataclass(frozen=True)
class Handover:
    """keeps: the prompt's KV is held for another server, which is told where it is. peer: the
    engine id of the server that has the prompt's KV. Both at their defaults: an ordinary request.
    """

    keeps: bool = False
    peer: str | None = None


def read_handover(fields: Fields, stream: bool) -> Handover:
    """What `kv_transfer_params` ask for. Names that are not known here are of other connectors, and
    are left alone."""
    params = fields.object(FIELD)
    if params is None:
        return Handover()
    keeps = params.boolean("do_remote_decode")
    if not params.boolean("do_remote_prefill"):
        if keeps and stream:
            params.refuse("do_remote_decode", "false where stream is true")
        return Handover(keeps=keeps)
    if keeps:
        params.refuse("do_remote_decode", "false where do_remote_prefill is true")
    peer = params.text("remote_engine_id", _ENGINE_ID_BYTES)
    if not peer:
        params.refuse("remote_engine_id", "the engine id that the prefill server has told")
    return Handover(peer=peer)


def least_tokens(fields: Fields) -> tuple[int, ...]:
    """Values of `min_tokens` that change nothing: nobody reads the token of a prefill server."""
    params = fields.any(FIELD)
    keeps = isinstance(params, dict) and params.get("do_remote_decode") is True
    return (0, 1) if keeps else (0,)


def engine_id(endpoint: str | None) -> str:
    """What this server tells routers: where it computes prompts for others. Problem (400) if
    nowhere."""
    if endpoint is None:
        raise Problem(
            400,
            "this server computes no prompts for others; begin it with --prefill-listen HOST:PORT",
            param=FIELD,
            code="unsupported_value",
        )
    return endpoint


def told_of(handover: Handover, endpoint: str | None) -> dict[str, Any]:
    """What the answer has beside its own fields."""
    if not handover.keeps:
        return {}
    told = {"do_remote_prefill": True, "do_remote_decode": False}
    return {FIELD: {**told, "remote_engine_id": engine_id(endpoint)}}
