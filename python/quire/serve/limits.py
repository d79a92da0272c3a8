"""What one client can take of the server: every limit, with its default."""

from __future__ import annotations

import dataclasses

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds.

    header_*: of one request's line and headers together; header_seconds: from their first byte.
        What stands between two parts of a body, or behind it, has at most header_bytes, too.
    body_*: of one request's body; it must come at body_rate_least bytes/s, after a grace of
        body_grace_seconds.
    bodies_bytes: of all bodies that are being read or parsed, or whose text is tokenized alone; a
        key has at most a half of it.
    connections, connections_per_address: those of IPv6 are counted per /64.
    wrong_keys: requests without a valid API key that an address may send at once, and in a minute.
    idle_seconds: of a connection without a request.
    pipelined: requests of one connection that wait for the one in work; their bodies together have
        at most 64 KiB.
    write_buffer_bytes: answers that the client has not taken; one that takes nothing of them for
        slow_client_seconds is cancelled.
    unread_bytes: of an answer's tokens that wait for a place in that buffer.
    answers_bytes: of the tokens of all answers that wait so, or are kept until an answer is whole.
    queue, queue_per_key: requests that wait in the engine for their turn; as many texts that are
        tokenized alone.
    wait_seconds: a request that is predicted to wait longer is refused.
    grammars, grammars_per_key: that are being compiled or wait for it.
    grammar_seconds, grammar_bytes: of computing and of memory, to compile one; grammar_cache_bytes:
        of those that are kept; grammar_pause_seconds: no new ones for a key of which one took too
        long for a token.
    ping_seconds: the longest silence of a stream.
    samples (n), prompts, logprobs, stops, stop_bytes, logit_biases, messages, documents, tools: of
        one request.
    responses, responses_bytes: that /v1/responses keeps for previous_response_id; each key keeps
        what it has within an equal part of them.
    """

    header_bytes: int = 16 << 10
    header_count: int = 100
    header_seconds: float = 10.0
    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    body_rate_least: int = 1 << 10
    body_grace_seconds: float = 5.0
    bodies_bytes: int = 256 << 20
    connections: int = 10_000
    connections_per_address: int = 256
    wrong_keys: int = 60
    idle_seconds: float = 75.0
    pipelined: int = 16
    write_buffer_bytes: int = 256 << 10
    slow_client_seconds: float = 30.0
    unread_bytes: int = 1 << 20
    answers_bytes: int = 256 << 20
    queue: int = 1024
    queue_per_key: int = 64
    wait_seconds: float = 60.0
    grammars: int = 64
    grammars_per_key: int = 8
    grammar_seconds: float = 5.0
    grammar_bytes: int = 1 << 30
    grammar_cache_bytes: int = 64 << 20
    grammar_pause_seconds: float = 60.0
    ping_seconds: float = 15.0
    samples: int = 16
    prompts: int = 64
    logprobs: int = 20
    stops: int = 16
    stop_bytes: int = 256
    logit_biases: int = 1024
    messages: int = 4096
    documents: int = 4096
    tools: int = 256
    responses: int = 1000
    responses_bytes: int = 64 << 20
