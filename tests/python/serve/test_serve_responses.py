"""`/v1/responses`: texts, streams, calls, and conversations that the server keeps."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pytest
import quire
from quire.serve.kept_responses import KeptResponses
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from server_process import Server, running
from test_serve_tools import ARGUMENTS, CITY, scripted  # noqa: F401 (a fixture)
from tiny_model import TinyModel

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_a_response_has_the_answer_of_the_engine(
    client: openai.OpenAI, engine: quire.Engine
) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = engine.generate(prompt, max_tokens=9)
    asked: Any = {"model": "tiny", "instructions": "Be brief.", "input": "Hi"}
    found = client.responses.create(max_output_tokens=9, **asked)
    assert found.output_text == expected.text and found.status == "incomplete"
    assert found.usage.output_tokens == len(expected.ids)
    events = list(client.responses.create(max_output_tokens=9, stream=True, **asked))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == expected.text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"


def test_a_conversation_goes_on(client: openai.OpenAI, engine: quire.Engine) -> None:
    """Instructions are of one response alone."""
    asked: Any = {"model": "tiny", "max_output_tokens": 5}
    first = client.responses.create(input="One", instructions="Be brief.", **asked)
    second = client.responses.create(input="Two", previous_response_id=first.id, **asked)
    prompt = [{"role": "user", "content": "One"}]
    prompt += [{"role": "assistant", "content": first.output_text}]
    prompt += [{"role": "user", "content": "Two"}]
    assert second.output_text == engine.generate(prompt, max_tokens=5).text
    lost = client.responses.create(input="One", store=False, **asked)
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.create(input="Two", previous_response_id=lost.id, **asked)


def test_a_tenant_finds_its_own_conversations_alone(keyed: Server) -> None:
    body = {"input": "One", "max_output_tokens": 2}
    first = keyed.post("/v1/responses", body)
    body["previous_response_id"] = first["id"]
    assert keyed.request("POST", "/v1/responses", body)[0] == 200
    status, _, found = keyed.request(
        "POST", "/v1/responses", body, authorization="Bearer bob-key-0123456789"
    )
    assert status == 404 and found["error"]["code"] == "previous_response_not_found"


def test_calls_are_items(scripted: Server) -> None:  # noqa: F811
    client = openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "tools": TOOLS}
    found = client.responses.create(input="What is the weather?", **asked)
    message, call = found.output
    assert message.content[0].text == "Let me look." and found.status == "completed"
    assert call.name == "weather" and json.loads(call.arguments) == ARGUMENTS
    with client.responses.stream(input="What is the weather?", **asked) as stream:
        final = stream.get_final_response()
    assert json.loads(final.output[1].arguments) == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    assert client.responses.create(input=[result], previous_response_id=found.id, **asked).output


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
def test_what_is_not_there_is_refused(server: Server, body: Any, param: str | None) -> None:
    body = {"input": "Hi", "max_output_tokens": 1, **body}
    status, _, found = server.request("POST", "/v1/responses", body)
    assert status == 400 and param in (None, found["error"]["param"])


def test_what_a_response_repeats_is_bounded(tiny: TinyModel) -> None:
    """Tools that may not be called are in no prompt, so nothing bounded them: each of hundreds of
    requests that waited kept megabytes, and wrote them twice."""
    with running(tiny.directory, "--limit", "answers_bytes=1M") as server:
        tool = {"type": "function", "name": "a", "description": "x" * 100}
        body = {"input": "Hi", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
        assert server.post("/v1/responses", body)["tools"] == [tool]
        tool["description"] = "x" * 300_000
        for stream in (False, True):
            answer = server.request("POST", "/v1/responses", {**body, "stream": stream})
            assert '"code":"answers_bytes"' in json.dumps(answer[2], separators=(",", ":")).replace("\\", "")
        server.wait_metrics(lambda m: m['quire:kv_pages{state="used"}'] == 0)
        tool["description"] = "x" * 100
        assert server.post("/v1/responses", body)["status"] == "incomplete"


def test_what_was_cut_is_incomplete(server: Server) -> None:
    found = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 3})
    assert found["status"] == "incomplete"
    assert [item["status"] for item in found["output"]] == ["incomplete"]


def test_the_oldest_make_room() -> None:
    kept = KeptResponses(Limits(responses=2, responses_bytes=1000))
    for id in "abc":
        kept.put("ann", id, [{"content": id}])
    with pytest.raises(Problem):
        kept.get("ann", "a")
    assert kept.get("ann", "b") == [{"content": "b"}]
    kept.put("ann", "d", [])  # "c" is the one that was used longest ago
    with pytest.raises(Problem):
        kept.get("ann", "c")
    kept.put("ann", "e", [{"content": "x" * 970}])
    assert kept.get("ann", "e")
    with pytest.raises(Problem):
        kept.get("ann", "b")
    kept.put("ann", "f", [{"content": "x" * 2000}])  # more than there is room for
    for id in "def":
        with pytest.raises(Problem):
            kept.get("ann", id)


def test_a_conversation_is_no_longer_than_a_body() -> None:
    """Calls that no template reads count as no tokens: a few turns made 64 MiB, which held the
    event loop for a second with each turn."""
    kept = KeptResponses(Limits(body_bytes=1000))
    kept.put("ann", "a", [{"content": "x" * 900}])
    kept.put("ann", "b", [{"content": "x" * 990}])
    assert kept.get("ann", "a") and kept.count == 1
    with pytest.raises(Problem, match="more than 1000 bytes"):
        kept.get("ann", "b")


def test_an_id_that_comes_twice_counts_once() -> None:
    """420 puts of one id once left room for nothing else, for all tenants."""
    kept = KeptResponses(Limits(responses=10, responses_bytes=10_000))
    for _ in range(500):
        kept.put("ann", "a", [{"content": "x" * 100}])
    assert kept.count == 1 and kept.bytes < 200
    kept.put("bob", "b", [{"content": "y"}])
    assert kept.get("ann", "a") and kept.get("bob", "b") == [{"content": "y"}]


def test_what_is_kept_takes_the_memory_that_is_counted() -> None:
    """Conversations of short messages once took seven times as much."""
    kept = KeptResponses(Limits())
    tracemalloc.start()
    try:
        for i in range(20):
            kept.put("ann", str(i), [{"role": "user", "content": f"{n}"} for n in range(1000)])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept.bytes > 500_000 and taken < 1.2 * kept.bytes
    found = kept.get("ann", "3")
    found.clear()  # the caller's own
    assert len(kept.get("ann", "3")) == 1000


def test_a_tenant_keeps_what_is_within_an_equal_part() -> None:
    kept = KeptResponses(Limits(responses=10, responses_bytes=1000))
    for i in range(4):
        kept.put("bob", f"b{i}", [{"content": "b"}])
    for i in range(100):  # more of them, and more bytes, than there is room for
        kept.put("ann", f"a{i}", [{"content": "x" * (i % 3 * 200)}])
        assert kept.count <= 10 and kept.bytes <= 1000
    assert all(kept.get("bob", f"b{i}") for i in range(4))
    assert kept.get("ann", "a99")


def test_ids_of_responses_are_the_servers_own(server: Server) -> None:
    body = {"input": "Hi", "max_output_tokens": 1}
    ids = [server.post("/v1/responses", body, **{"x-request-id": "mine"})["id"] for _ in "ab"]
    assert ids[0] != ids[1] and not any("mine" in id for id in ids)
