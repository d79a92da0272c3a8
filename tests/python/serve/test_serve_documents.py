"""Documents of chats: the answers are those of the engine, and say what is approximate."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire
from quire.serve.service import Service
from server_process import DEADLINE, PATIENT, Server, running
from tiny_model import Shape, TinyModel

MESSAGES = [{"role": "user", "content": "Which fox?"}]
DOCUMENTS = [
    "The quick brown fox is red and jumps.",
    "A quire has sixteen pages, folded once.",
    "The lazy dog sleeps over naïve café.",
]
SECONDS = ("move_seconds", "select_seconds", "wait_seconds")


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("documents"), Shape(layers=4, positions=2048))


@pytest.fixture(scope="module")
def blending(long_tiny: TinyModel) -> Iterator[Server]:
    options = ("--page-size", "16", "--blend-piece", "256", "--blend-unverified")
    with running(long_tiny.directory, *options) as server:
        yield server


def test_the_verdict_is_read_before_the_first_request(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the weights, for which no request waits."""
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with running(long_tiny.directory, "--blend-piece", "256") as server:
        assert server.wait_log(lambda line: line["event"] == "blend")["verdict"] is None
        assert list((tmp_path / "identities").iterdir())
        status, _, found = server.request("POST", "/v1/chat/completions", body("v", blend=0.1))
        assert status == 400 and "quire blend eval" in found["error"]["message"]


@pytest.fixture
def engine(long_tiny: TinyModel) -> Iterator[quire.Engine]:
    options: Any = {"threads": 1, "page_size": 16, "blend_piece": 256, "blend_unverified": True}
    with quire.Engine(long_tiny.directory, dtype="float32", **options) as engine:
        yield engine


def body(salt: str, **fields: Any) -> dict[str, Any]:
    """Of a chat whose documents nobody has asked about."""
    head = {"messages": MESSAGES, "max_tokens": 6, "return_token_ids": True, "cache_salt": salt}
    return {**head, "documents": DOCUMENTS, **fields}


def told(blend: dict[str, Any] | None) -> dict[str, Any]:
    assert blend is not None
    return {name: value for name, value in blend.items() if name not in SECONDS}


BLENDS: tuple[Any, ...] = (
    0.1,
    0,
    {"ratio": 0.3},
    {"ratio": 0.2, "metric": "cosine", "link_tokens": 2},
    {"ratio": 0.2, "min_tokens": 10_000},
    {"learn": False},
    {"learn": "idle"},
    "auto",
    {"ratio": "auto", "metric": "k_l2"},
    {},
)


@pytest.mark.parametrize("index", range(len(BLENDS)))
def test_a_blended_chat_has_the_answer_of_the_engine(
    blending: Server, engine: quire.Engine, index: int
) -> None:
    expected = engine.chat(MESSAGES, documents=DOCUMENTS, blend=BLENDS[index], max_tokens=6)
    assert expected.usage.blend is not None
    found = blending.post(
        "/v1/chat/completions", body(f"whole {index}", blend=BLENDS[index])
    )
    assert found["choices"][0]["token_ids"] == expected.ids
    assert told(found["usage"]["blend"]) == told(dataclasses.asdict(expected.usage.blend))
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_ids)


def test_usage_says_what_is_approximate(blending: Server) -> None:
    found = blending.post("/v1/chat/completions", body("told", blend=0.1))["usage"]
    blend = found["blend"]
    assert blend["approximate"] is True
    assert 0 < blend["recomputed_tokens"] < blend["moved_tokens"]
    assert blend["learned_tokens"] > 0 and blend["deviation_max"] >= blend["deviation_mean"] > 0
    parts = ("exact_tokens", "kept_tokens", "moved_tokens", "computed_tokens")
    assert sum(blend[name] for name in parts) == found["prompt_tokens"]
    # All computed again: exact, and said to be.
    ones = blending.post("/v1/chat/completions", body("ones", blend=1))["usage"]["blend"]
    assert ones["approximate"] is False
    assert ones["moved_tokens"] == ones["recomputed_tokens"] > 0
    full = blending.post("/v1/chat/completions", body("full"))
    assert "blend" not in full["usage"]


def test_metrics_count_what_was_moved(long_tiny: TinyModel) -> None:
    with running(long_tiny.directory, "--blend-piece", "256", "--blend-unverified") as server:
        names = ("exact", "kept", "moved", "recomputed", "computed")

        def counters() -> list[int]:
            _, _, page = server.request("GET", "/metrics")
            found = [re.search(rf"quire:blend_{name}_tokens_total (\d+)", page) for name in names]
            return [int(each[1]) for each in found if each is not None]

        assert counters() == [0] * 5
        blend = server.post("/v1/chat/completions", body("first", blend=0.1))["usage"]["blend"]
        assert counters() == [blend[f"{name}_tokens"] for name in names]
        assert 0 < blend["recomputed_tokens"] < blend["moved_tokens"]


@pytest.mark.parametrize("documents, characters", [(["y" * 4000, "z"], 4005), ("auto", 4)])
def test_documents_are_a_part_of_what_a_request_costs(documents: Any, characters: int) -> None:
    """Megabytes of them were predicted to take no time, so those behind them waited for longer than
    `wait_seconds` without being told."""
    metrics = SimpleNamespace(inter_token_latency=SimpleNamespace(sum=0, count=0))

    def seconds(content: str, **options: Any) -> float:
        chat = [{"role": "user", "content": content}]
        generation = SimpleNamespace(prompts=[chat], samples=1, options=options)
        service: Any = SimpleNamespace(metrics=metrics)
        stats = {"compute_ns_per_token": 10**9}
        return Service._cost(service, generation, stats).prompt_seconds  # type: ignore[arg-type]

    assert seconds("fox?", documents=documents) == seconds("x" * characters) > 0
    assert seconds([part("fox"), part("?", "text")]) == seconds("fox?")  # type: ignore[arg-type]


def test_lessons_are_no_answers_that_wait(long_tiny: TinyModel) -> None:
    """Lessons that waited for the engine to be idle once counted: while an answer was computed, all
    others were refused as one too many."""
    limits = ("--limit", "queue=2", "--blend-piece", "256", "--blend-unverified")
    with running(long_tiny.directory, *limits, *PATIENT) as server:
        peer = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
        endless = {"prompt": "x", "max_tokens": 10**7, "window": 32, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        with contextlib.closing(peer):
            asked = json.dumps({**endless, "stream": True})
            peer.request("POST", "/v1/completions", asked, headers)
            stream = peer.getresponse()
            assert stream.readline().startswith(b"data: ")
            documents = [f"{index}: {text}" for index, text in enumerate(DOCUMENTS * 2)]
            idle = body("idle", documents=documents, blend={"learn": "idle"})
            server.post("/v1/chat/completions", idle)
            assert server.metrics()["quire:num_requests_waiting"] == 5
            server.post("/v1/completions", {"prompt": "y", "max_tokens": 1})
            stream.close()


def test_documents_without_blend_are_a_part_of_the_prompt(
    blending: Server, engine: quire.Engine
) -> None:
    expected = engine.chat(MESSAGES, documents=DOCUMENTS, max_tokens=6)
    found = blending.post("/v1/chat/completions", body("plain"))
    ones = blending.post("/v1/chat/completions", body("plain ones", blend=1.0))
    for answer in (found, ones):
        assert answer["choices"][0]["token_ids"] == expected.ids


def test_documents_of_earlier_chats_are_found(blending: Server) -> None:
    def asking(first: str) -> dict[str, Any]:
        text = f"{first} words. {DOCUMENTS[1]} More.\n\n{DOCUMENTS[0]} Which fox?"
        options = {"max_tokens": 3, "cache_salt": "find", "documents": "auto", "blend": 0.2}
        return {"messages": [{"role": "user", "content": text}], **options}

    search = asking("Some")
    nothing = blending.post("/v1/chat/completions", search)["usage"]["blend"]
    assert nothing["documents"] == 0 and nothing["approximate"] is False
    blending.post("/v1/chat/completions", body("find", blend=0.2))
    search = asking("Other")
    found = blending.post("/v1/chat/completions", search)["usage"]["blend"]
    assert found["documents"] == 2 and found["moved_tokens"] > 30
    search["messages"] = [{"role": "system", "content": "Be brief."}, *search["messages"]]
    other = blending.post("/v1/chat/completions", search)["usage"]["blend"]
    assert other["documents"] == 0, "they stand behind another beginning"
    search["blend"] = {"ratio": 0.2, "contextual": True}
    assert blending.post("/v1/chat/completions", search)["usage"]["blend"]["documents"] == 2


def test_a_stream_ends_with_the_same_usage(blending: Server, engine: quire.Engine) -> None:
    expected = engine.chat(MESSAGES, documents=DOCUMENTS, blend=0.1, max_tokens=6)
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    content = blending.post("/v1/chat/completions", body("stream", blend=0.1, **fields))
    lines = [line[6:] for line in content.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    ids = [id for c in chunks for choice in c["choices"] for id in choice["token_ids"]]
    assert ids == expected.ids
    assert expected.usage.blend is not None
    assert told(chunks[-1]["usage"]["blend"]) == told(dataclasses.asdict(expected.usage.blend))


# ---- Documents in messages


def part(text: str, type: str = "document") -> dict[str, Any]:
    return {"type": type, "text": text}


def parted(text: str, document: Any) -> list[dict[str, Any]]:
    """A user's message with three documents; text: the type of other parts."""
    content = [part("Here: ", text), document(DOCUMENTS[0]), part("and ", text)]
    content += [document(DOCUMENTS[1]), document(DOCUMENTS[2]), part("Which fox?", text)]
    return [{"role": "user", "content": content}]


def sourced(text: str) -> dict[str, Any]:
    """A document as Anthropic's API has it."""
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source}


@pytest.mark.parametrize("blend", [None, 0.1, 1.0])
def test_documents_in_messages_stand_at_their_places(
    blending: Server, engine: quire.Engine, blend: float | None
) -> None:
    options: Any = {} if blend is None else {"blend": blend}
    expected = engine.chat(parted("text", part), max_tokens=6, **options)
    counts = None if expected.usage.blend is None else dataclasses.asdict(expected.usage.blend)

    def check(usage: dict[str, Any], text: str) -> None:
        assert text == expected.text
        assert ("blend" in usage) == (counts is not None)
        if counts is not None:
            assert told(usage["blend"]) == told(counts)

    fields = {"max_tokens": 6, **options}
    asked = {"messages": parted("text", part), "cache_salt": f"parts {blend}", **fields}
    found = blending.post("/v1/chat/completions", asked)
    check(found["usage"], found["choices"][0]["message"]["content"])
    asked = {"messages": parted("text", sourced), "cache_salt": f"source {blend}", **fields}
    found = blending.post("/v1/messages", asked)
    check(found["usage"]["quire"], found["content"][0]["text"])
    counted = blending.post("/v1/messages/count_tokens", {"messages": asked["messages"]})
    assert counted["input_tokens"] == len(expected.prompt_ids)
    tokens = blending.post("/tokenize", {"messages": parted("text", part)})["tokens"]
    assert tokens == expected.prompt_ids
    asked = {"input": parted("input_text", part), "cache_salt": f"items {blend}"}
    found = blending.post("/v1/responses", {**asked, "max_output_tokens": 6, **options})
    check(found["usage"], found["output"][0]["content"][0]["text"])


def test_documents_before_a_chat_are_in_every_api(blending: Server, engine: quire.Engine) -> None:
    expected = engine.chat(MESSAGES, documents=DOCUMENTS, max_tokens=6)
    asked = {"messages": MESSAGES, "documents": DOCUMENTS, "max_tokens": 6}
    found = blending.post("/v1/messages", asked)
    assert found["content"][0]["text"] == expected.text
    del asked["max_tokens"]
    counted = blending.post("/v1/messages/count_tokens", asked)
    assert counted["input_tokens"] == len(expected.prompt_ids)
    asked = {"input": "Which fox?", "documents": DOCUMENTS, "max_output_tokens": 6}
    found = blending.post("/v1/responses", asked)
    assert found["output"][0]["content"][0]["text"] == expected.text


def test_a_kept_conversation_keeps_its_documents(blending: Server, engine: quire.Engine) -> None:
    asked: Any = {"max_output_tokens": 4, "cache_salt": "kept", "blend": 0.1}
    first = blending.post("/v1/responses", {"input": parted("input_text", part), **asked})
    again = {"input": "Why?", "previous_response_id": first["id"], **asked}
    found = blending.post("/v1/responses", again)
    turns = parted("text", part)
    engine.chat(turns, blend=0.1, max_tokens=4)
    turns.append({"role": "assistant", "content": first["output"][0]["content"][0]["text"]})
    turns.append({"role": "user", "content": "Why?"})
    expected = engine.chat(turns, blend=0.1, max_tokens=4)
    assert found["output"][0]["content"][0]["text"] == expected.text
    assert found["usage"]["blend"]["documents"] == 3


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        (part(" "), ".text", "it must be a text that is not empty"),
        ({"type": "document"}, ".text", "it must be a text that is not empty"),
        (part("a\ud800"), ".text", "lone surrogate"),
        ({**part("a"), "title": "b"}, ".title", "title is not supported"),
        ({**part("a"), "pages": 2}, ".pages", "pages is not a field of this request; messages[0]"),
        ({**part("a"), "citations": {"enabled": True}}, ".citations.enabled", "only false is taken"),
        ({**sourced("a"), "text": "b"}, ".text", "text is a second text beside source"),
        (
            {**sourced("a"), "source": {**sourced("a")["source"], "url": "b"}},
            ".source.url",
            "source.url is not a field of this request",
        ),
        (sourced(" "), ".source.data", "it must be a text that is not empty"),
        (
            {"type": "document", "source": {"type": "base64", "data": "eA=="}},
            ".source.type",
            "is 'base64'; this model takes text alone",
        ),
        (
            {"type": "document", "source": {"type": "text", "media_type": "a/b", "data": "x"}},
            ".source.media_type",
            'only "text/plain" is taken',
        ),
    ],
)
def test_what_is_wrong_with_a_document_in_a_message_is_named(
    blending: Server, document: Any, field: str, words: str
) -> None:
    messages = [{"role": "user", "content": [part("See ", "text"), document]}]
    asked = {"messages": messages, "max_tokens": 1}
    status, _, found = blending.request("POST", "/v1/chat/completions", asked)
    assert status == 400, found
    assert found["error"]["param"] == "messages[0].content[1]" + field
    assert words in found["error"]["message"]
    status, _, found = blending.request("POST", "/v1/messages", asked)
    assert status == 400 and words in found["error"]["message"]


def test_documents_in_messages_are_counted_and_not_searched(blending: Server) -> None:
    messages = [{"role": "user", "content": [part("x")] * 4096}]
    asked: dict[str, Any] = {"messages": messages, "documents": ["y"], "max_tokens": 1}
    status, _, found = blending.request("POST", "/v1/chat/completions", asked)
    assert status == 400 and found["error"]["param"] == "documents"
    assert "has 4097 documents; it may have at most 4096" in found["error"]["message"]
    asked = {"messages": parted("text", part), "documents": "auto", "blend": 0.1}
    status, _, found = blending.request("POST", "/v1/chat/completions", asked)
    assert status == 400 and found["error"]["param"] == "documents"
    assert "a message names some as its parts" in found["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"blend": 1.5}, "blend", "blend is 1.5; it must be a number from 0 to 1"),
        ({"blend": -0.1}, "blend", "blend is -0.1; it must be a number from 0 to 1"),
        ({"blend": True}, "blend", "blend is true; it must be a number from 0 to 1"),
        ({"blend": "much"}, "blend", 'blend is "much"; it must be a number from 0 to 1'),
        ({"blend": [0.1]}, "blend", "blend is a list of 1 entries; it must be a number"),
        ({"blend": {"ratio": 2}}, "blend.ratio", "blend.ratio is 2; it must be a number from 0"),
        (
            {"blend": {"metric": "x"}},
            "blend.metric",
            'blend.metric is "x"; it must be one of v_l2, k_l2, kv_l2, cosine',
        ),
        (
            {"blend": {"link_tokens": -1}},
            "blend.link_tokens",
            "blend.link_tokens is -1; it must be an integer from 0 to 2147483647",
        ),
        ({"blend": {"min_tokens": 1.5}}, "blend.min_tokens", "1.5; it must be an integer"),
        ({"blend": {"learn": 1}}, "blend.learn", "blend.learn is 1; it must be true or false"),
        (
            {"blend": {"layers": [1]}},
            "blend.layers",
            "blend.layers is not a field of this request; blend may have contextual, learn, link_tok",
        ),
        ({"documents": "auto"}, "documents", 'it must be a list of texts, or "auto" with blend'),
        (
            {"blend": {"contextual": True}},
            "blend",
            "blend: contextual is about documents that the engine finds",
        ),
        ({"documents": "text"}, "documents", 'documents is "text"; it must be a list'),
        ({"documents": [" "]}, "documents", "documents is a list of 1 entries; it must be a list"),
        ({"documents": [7]}, "documents", "a list of texts that are not empty"),
        ({"documents": ["x"] * 4097}, "documents", "4097 entries; it must be a list of at most 4096"),
        ({"documents": ["a", "\ud800"]}, "documents[1]", "lone surrogate"),
        ({"documents": [], "blend": 0.1}, "blend", "blend is 0.1; it must be given together with"),
        ({"documents": None, "blend": 0}, "blend", "blend is 0; it must be given together with"),
        ({"documents": None, "blend": {}}, "blend", "it must be given together with documents"),
        ({"blend": 0.1, "window": 64}, "blend", "blend: window is 64; endless text"),
    ],
)
def test_what_is_refused_is_named_with_its_range(
    blending: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    status, _, found = blending.request("POST", "/v1/chat/completions", body("bad", **fields))
    assert status == 400, found
    assert found["error"]["param"] == param and words in found["error"]["message"]
    assert found["error"]["type"] == "invalid_request_error"


def test_a_server_that_cannot_blend_says_how_to_begin_it(server: Server, keyed: Server) -> None:
    for place, words in ((server, "without --no-prefix-cache"), (keyed, "with --blend-piece 2048")):
        status, _, found = place.request("POST", "/v1/chat/completions", body("none", blend=0.1))
        assert status == 400 and found["error"]["param"] == "blend"
        assert "begin it " + words in found["error"]["message"]


def test_an_exact_server_refuses_what_may_be_approximate(long_tiny: TinyModel) -> None:
    options = ("--blend-piece", "256", "--blend-unverified", "--exact")
    with running(long_tiny.directory, *options) as server:
        status, _, found = server.request("POST", "/v1/chat/completions", body("no", blend=0.1))
        assert status == 400 and found["error"]["param"] == "blend"
        assert "gives exact answers only" in found["error"]["message"]
        assert server.post("/v1/chat/completions", body("ones", blend=1))["usage"]["blend"]


def test_a_model_without_a_verdict_is_not_blended(
    long_tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    with running(long_tiny.directory, "--blend-piece", "256") as server:
        status, _, found = server.request("POST", "/v1/chat/completions", body("none", blend=0.1))
        assert status == 400 and found["error"]["param"] == "blend"
        message = found["error"]["message"]
        assert "nobody has measured what blending costs" in message
        assert message.endswith("--blend-unverified of the server forces it")
        assert server.post("/v1/chat/completions", body("ones", blend=1))["usage"]["blend"]
