"""Usage says where KV came from and why not all of it was there: in all APIs, and to each key what is
of that key alone."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from server_process import Server

ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"


def _details(server: Server, text: str, key: str = ANN, **fields: Any) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": 1, **fields}
    found = server.post("/v1/completions", body, authorization=f"Bearer {key}")
    return found["usage"]["prompt_tokens_details"]  # type: ignore[no-any-return]


def test_a_key_is_told_why_and_of_its_own_alone(keyed: Server) -> None:
    text = "Why was this text not there? It is long enough for some pages, or so we hope. " * 2
    other = text[:90] + "Another end."
    assert _details(keyed, text)["prefix_miss"] == {"kind": "new", "position": 0, "evicted_ms": 0}
    assert _details(keyed, text)["prefix_miss"] is None
    miss = _details(keyed, other)["prefix_miss"]
    assert miss["kind"] == "differs" and 10 < miss["position"] < 90
    for name, prompt, kind in (("miss-1", other, None), ("miss-2", other[:60] + "?", "differs")):
        body = {"prompt": prompt, "max_tokens": 1}
        keyed.post("/v1/completions", body, **{"x-request-id": name})
        line = keyed.wait_log(lambda line, name=name: line.get("id") == name)
        assert line.get("prefix_miss") == kind
    # Bob's same texts are new to him, whatever ann has asked; so is a salt of ann's.
    for fields in ({"key": BOB}, {"cache_salt": "one"}):
        first = _details(keyed, text, **fields)
        assert first["prefix_miss"]["kind"] == "new" and first["prefix_miss"]["position"] == 0
        assert first["cached_tokens"] == 0
    metrics = keyed.metrics()
    assert metrics['quire:prefix_cache_miss_total{reason="differs"}'] >= 1


def test_all_apis_say_where_kv_came_from(keyed: Server) -> None:
    client = openai.OpenAI(base_url=keyed.url + "/v1", api_key=ANN, max_retries=0)
    asked: Any = {"model": "tiny", "input": "Where did it come from? " * 6, "max_output_tokens": 2}
    client.responses.create(**asked)
    usage = client.responses.create(**asked).usage.model_dump()
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] == details["memory_tokens"] > 30
    assert details["prefix_miss"] is None and details["miss"] is None
    assert usage["output_tokens_details"]["accepted_prediction_tokens"] == 0

    messages = anthropic.Anthropic(base_url=keyed.url, api_key=ANN, max_retries=0).messages
    asked = {"model": "tiny", "max_tokens": 3}
    asked["messages"] = [{"role": "user", "content": "Where does that come from? " * 6}]
    found = messages.create(**asked).usage
    assert found.model_dump()["quire"]["prefix_miss"]["kind"] in ("new", "differs")
    again = messages.create(**asked).usage
    assert again.cache_read_input_tokens == again.model_dump()["quire"]["memory_tokens"] > 30


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_of_anthropics_begins_with_the_usage_that_it_ends_with(
    keyed: Server, max_tokens: int
) -> None:
    """They once differed by the tokens of the cache."""
    messages = anthropic.Anthropic(base_url=keyed.url, api_key=ANN, max_retries=0).messages
    asked: Any = {"model": "tiny", "max_tokens": max_tokens, "stream": True}
    asked["messages"] = [{"role": "user", "content": "What begins as it ends? " * 6}]
    for _ in range(2):
        start, *rest = list(messages.create(**asked))
        assert start.type == "message_start"
        (end,) = [event.usage for event in rest if event.type == "message_delta"]
        begin = start.message.usage
        assert begin.input_tokens == end.input_tokens
        assert begin.cache_read_input_tokens == end.cache_read_input_tokens
    assert begin.cache_read_input_tokens > 30
