"""What clients get: answers that are equal to `quire generate`'s, in the forms of the APIs."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import quire
from quire.serve.openai_completions import _CompletionView
from quire.serve.tokens import TokenTexts
from server_process import Server, running
from tiny_model import TinyModel


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def guessing(tiny: TinyModel) -> Iterator[Server]:
    """With room for guesses, of which it makes none by itself."""
    with running(tiny.directory, "--page-size", "16", "--max-tree-nodes", "16") as server:
        yield server


MESSAGES = [{"role": "user", "content": "What is a quire?"}]


def test_a_chat_has_the_answer_of_the_engine(client: openai.OpenAI, engine: quire.Engine) -> None:
    expected = engine.generate(MESSAGES, max_tokens=12)
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12
    )
    choice = found.choices[0]
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert found.usage.completion_tokens == len(expected.ids)
    assert found.usage.prompt_tokens == len(expected.prompt_ids)


def test_a_stream_has_the_same_text_and_its_usage(
    client: openai.OpenAI, engine: quire.Engine
) -> None:
    expected = engine.generate(MESSAGES, max_tokens=20, ignore_eos=True)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 20 and not chunks[-1].choices
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])


def test_logprobs_are_those_of_the_engine(client: openai.OpenAI, engine: quire.Engine) -> None:
    expected = engine.generate(MESSAGES, max_tokens=8, logprobs=3)
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3
    )
    entries = whole.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == expected.logprobs
    top = [[other.logprob for other in entry.top_logprobs] for entry in entries]
    assert top == [[value for _, value in best] for best in expected.top_logprobs]
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [e for c in chunks if c.choices for e in c.choices[0].logprobs.content]
    assert streamed == entries


def test_bytes_of_logprobs_are_those_of_the_answer(server: Server) -> None:
    """Tokens that are a part of a character had none, which are those that need them."""
    bias = {str(i): 100 for i in server.post("/tokenize", {"prompt": "龘"})["tokens"]}
    assert len(bias) == 3
    body = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "logit_bias": bias}
    (choice,) = server.post("/v1/chat/completions", body)["choices"]
    data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert len(data) == 6 and data.decode("utf-8", "replace") == choice["message"]["content"]


def test_completions_take_texts_and_ids(client: openai.OpenAI, engine: quire.Engine) -> None:
    expected = engine.generate([7, 8, 9], max_tokens=9, logprobs=2)
    found = client.completions.create(model="tiny", prompt=[7, 8, 9], max_tokens=9, logprobs=2)
    assert found.choices[0].text == expected.text
    assert found.choices[0].logprobs.token_logprobs == expected.logprobs
    text = client.completions.create(model="tiny", prompt="Once upon", n=2, temperature=1, seed=4)
    both = engine.generate("Once upon", max_tokens=16, n=2, temperature=1, seed=4)
    assert [choice.text for choice in text.choices] == [sample.text for sample in both.samples]


def test_several_prompts_of_one_request(client: openai.OpenAI, engine: quire.Engine) -> None:
    options: Any = {"n": 2, "temperature": 1, "seed": 6, "max_tokens": 7}
    for prompts in (["Once", "Twice upon", "x"], [[7, 8], [9, 10, 11]], ["One", [12, 13]]):
        results = [engine.generate(prompt, **options) for prompt in prompts]
        expected = [sample.text for result in results for sample in result.samples]
        found = client.completions.create(model="tiny", prompt=prompts, **options)
        assert [choice.index for choice in found.choices] == list(range(2 * len(prompts)))
        assert [choice.text for choice in found.choices] == expected
        assert found.usage.prompt_tokens == sum(len(result.prompt_ids) for result in results)
        assert found.usage.completion_tokens == sum(
            len(sample.ids) for result in results for sample in result.samples
        )
        texts = [""] * len(expected)
        for chunk in client.completions.create(
            model="tiny", prompt=prompts, stream=True, **options
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ("", "prompt"), (["x"] * 65, "prompt"), (["x", ""], "prompt[1]")]
    + [([[5], [99999]], "prompt[1]"), ([[5], [True]], "prompt[1]"), ([[5], []], "prompt[1]")],
)
def test_prompts_that_are_none(server: Server, prompt: Any, param: str) -> None:
    status, _, found = server.request("POST", "/v1/completions", {"prompt": prompt})
    assert status == 400 and found["error"]["param"] == param


def test_one_prompt_that_never_fits_ends_them_all(server: Server) -> None:
    body = {"prompt": ["x", [5] * 300], "max_tokens": 1}
    assert server.request("POST", "/v1/completions", body)[0] == 413
    server.wait_metrics(lambda m: m['quire:kv_pages{state="used"}'] == 0)


def _mixed(index: int) -> tuple[str, dict[str, Any], Any, dict[str, Any]]:
    """Path, body, and the prompt and options of the engine that mean the same."""
    text = f"Number {index} of them " + "and more " * (index % 7)
    options: dict[str, Any] = {"max_tokens": 5 + index % 11, "ignore_eos": index % 3 == 0}
    if index % 2:
        options |= {"temperature": 0.5 + index / 16, "seed": index, "top_k": 40 + index}
        options |= {"top_p": 0.9, "min_p": 0.001, "presence_penalty": 0.1 * (index % 3)}
    if index % 5 == 0:
        options["logit_bias"] = {str(index + 20): 3.5}
    if index % 4 == 0:
        options["stop"] = ["e", "qu"]
    if index % 6 == 0:
        options["n"] = 2
    engine_options = dict(options)
    if "logit_bias" in options:
        engine_options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
    body = {**options, "return_token_ids": True, "stream": index % 3 == 1}
    if index % 8 < 4:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {**body, "messages": messages}, messages, engine_options
    return "/v1/completions", {**body, "prompt": text}, text, engine_options


def _ask(server: Server, path: str, body: dict[str, Any]) -> dict[int, tuple[list[int], str, str]]:
    """Ids, text and finish reason of each sample."""
    content = server.post(path, body)
    found: dict[int, tuple[list[int], str, str]] = {}
    if not body["stream"]:
        parts = [content]
    else:
        lines = [line[6:] for line in content.split("\n\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        parts = [json.loads(line) for line in lines]
    for part in parts:
        for choice in part["choices"]:
            message = choice.get("message") or choice.get("delta") or choice
            text = message.get("content", message.get("text", "")) or ""
            ids, before, _ = found.get(choice["index"], ([], "", ""))
            found[choice["index"]] = (
                ids + choice["token_ids"],
                before + text,
                choice["finish_reason"],
            )
    return found


def test_32_mixed_clients_get_the_tokens_of_generate(server: Server, engine: quire.Engine) -> None:
    requests = [_mixed(index) for index in range(32)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda request: _ask(server, *request[:2]), requests))
    for answer, (_, _, prompt, options) in zip(found, requests):
        expected = engine.generate(prompt, **options)
        samples = [(s.ids, s.text, s.finish_reason) for s in expected.samples]
        assert [answer[index] for index in sorted(answer)] == samples, options


def test_a_window_goes_on_behind_the_models_positions(
    client: openai.OpenAI, engine: quire.Engine
) -> None:
    options = {"window": 32, "sinks": 4, "ignore_eos": True}
    expected = engine.generate("Endless", max_tokens=300, **options)
    found = client.completions.create(
        model="tiny", prompt="Endless", max_tokens=300, extra_body=options
    )
    assert found.choices[0].text == expected.text and found.usage.completion_tokens == 300


def test_models_and_version(client: openai.OpenAI, server: Server) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    assert server.request("GET", "/version")[2] == {"version": quire.__version__}
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert client.chat.completions.create(model=model.id, messages=MESSAGES, max_tokens=1).choices


def test_tokenize_and_detokenize(server: Server, engine: quire.Engine) -> None:
    found = server.post("/tokenize", {"prompt": "A quire"})
    assert found["tokens"] == engine.tokenizer.encode("A quire")
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 256
    chat = server.post("/tokenize", {"messages": MESSAGES})
    assert chat["tokens"] == engine.tokenizer.encode_chat(MESSAGES)
    assert server.post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "A quire"}


@pytest.mark.parametrize("name", ["messages", "self", "nothing"])
def test_tokenize_takes_the_arguments_of_a_chat(server: Server, name: str) -> None:
    """The names are a client's: one that Python's method has was a defect of the server."""
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}
    status, _, found = server.request("POST", "/tokenize", body)
    assert status == 400 and f"has no variable '{name}'" in found["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1; it must be a number from 0"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": 10**38}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "above 0 to 1"),
        ({"n": 17}, "n", "n is 17; it must be an integer from 1 to 16"),
        ({"n": 10**9}, "n", "from 1 to 16"),
        ({"n": True}, "n", "integer"),
        ({"max_tokens": -1}, "max_tokens", "from 0 to"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ["x" * 257]}, "stop[0]", "1 to 256 bytes"),
        ({"stop": [""]}, "stop[0]", "1 to 256 bytes"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "below"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"a.5": 1}}, "logit_bias", "token ids"),
        ({"sinks": 4}, "sinks", "together with window"),
        ({"cache_salt": ""}, "cache_salt", "1 to 4096 bytes"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"messages": []}, "messages", "1 to 4096 messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "'input_audio'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is a JSON schema"),
        ({"prediction": {"type": "content"}}, "prediction.content", "a text, or a list"),
        ({"prediction": {"type": "words"}}, "prediction.type", "only \"content\" is taken"),
        (
            {"prediction": {"type": "content", "content": "A quire"}},
            "prediction",
            "no room for guesses; begin it with --speculate ngram, or with --max-tree-nodes",
        ),
        ({"best_of": 2}, "best_of", "only 1"),
        ({"window": 4, "sinks": 9}, "sinks", "sinks is 9; it must be at least 0 and below window"),
        ({"window": 100_000}, "window", "the model has"),
        ({"chat_template_kwargs": {"nothing": 1}}, None, "has no variable 'nothing'"),
    ],
)
def test_bad_input_names_field_value_and_range(
    server: Server, body: dict[str, Any], param: str | None, words: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **body}
    status, _, found = server.request("POST", "/v1/chat/completions", body)
    assert status == 400, found
    error = found["error"]
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) <= 300


CALL: dict[str, Any] = {"id": "c", "type": "function", "index": 0, "y": 1}
CALL["function"] = {"name": "g", "arguments": "{}", "parsed_arguments": {}, "x": 1}
SAID: dict[str, Any] = {"type": "message", "id": "m", "status": "completed", "role": "assistant", "phase": None}
SAID["content"] = [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]


def test_defaults_of_routers_are_taken_and_unknown_fields_are_named(server: Server) -> None:
    defaults = {"best_of": 1, "use_beam_search": False, "min_tokens": 0, "priority": 0}
    defaults |= {"response_format": {"type": "text"}, "user": "u", "metadata": {}, "n": 1}
    defaults |= {"skip_special_tokens": True, "kv_transfer_params": None, "top_k": -1}
    defaults |= {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True}
    defaults |= {"return_hidden_states": False, "include_reasoning": True}
    body = {"messages": MESSAGES, "max_tokens": 1, **defaults}
    status, headers, _ = server.request("POST", "/v1/chat/completions", body)
    assert status == 200 and "x-quire-ignored" not in headers
    status, headers, _ = server.request(
        "POST", "/v1/chat/completions", {**body, "foo": 1, "b\r\nar": 2}
    )
    assert status == 200 and headers["x-quire-ignored"] == "foo, b??ar"
    # What other servers add to their answers comes back within a message.
    messages = [*MESSAGES, {"role": "assistant", "content": "Hi", "provider_data": {}}]
    options = {"stream": True, "stream_options": {"chunks": 1}}
    body = {**body, "messages": messages, **options}
    status, headers, _ = server.request("POST", "/v1/chat/completions", body)
    ignored = f"stream_options.chunks, messages[{len(messages) - 1}].provider_data"
    assert status == 200 and headers["x-quire-ignored"] == ignored


MARKED = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "a", "w": 1, **MARKED}]},
                    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
                    {"role": "user", "content": "c", **MARKED},
                ]
            },
            "messages[0].content[0].w, messages[1].tool_calls[0].function.x, "
            "messages[1].tool_calls[0].y",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a", "w": 1, **MARKED}]},
                    {**SAID, "x": 1},
                    {"type": "function_call", "id": "f", "status": "completed", "name": "g",
                     "caller": {"type": "direct"}, "call_id": "c", "arguments": "{}", "y": 1},
                    {"type": "function_call_output", "call_id": "c", "output": "d", "z": 1},
                    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "e"},
                    {"role": "user", "content": "c"},
                ],
                "text": {"format": {"type": "text"}, "v": 1},
                "stream_options": {"include_obfuscation": False},
                "include": ["reasoning.encrypted_content"],
                "max_output_tokens": 1,
            },
            "input[0].content[0].w, input[1].x, input[2].y, input[3].z, text.v",
        ),
        (
            "/v1/messages",
            {
                "system": [{"type": "text", "text": "a", "w": 1, "cache_control": None}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "b", "x": 1, **MARKED}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "h", "signature": "s"},
                            {"type": "text", "text": "c", "citations": []},
                            {"type": "tool_use", "id": "t", "name": "g", "input": {}, "y": 1,
                             "caller": {"type": "direct"}, **MARKED},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "is_error": True, "z": 1,
                             "content": [{"type": "text", "text": "d", "v": 1}], **MARKED},
                        ],
                    },
                ],
                "thinking": {"type": "disabled", "u": 1},
                "output_config": {"t": 1},
                "cache_control": {"type": "ephemeral"},
            },
            "thinking.u, output_config.t, system[0].w, messages[0].content[0].x, "
            "messages[1].content[2].y, messages[2].content[0].z, messages[2].content[0].content[0].v",
        ),
    ],
)
def test_unknown_fields_of_parts_are_named(
    server: Server, path: str, body: dict[str, Any], ignored: str
) -> None:
    """They were ignored without a word; what clients of today add to their parts is none."""
    body = {"max_tokens": 1, **body} if path != "/v1/responses" else body
    status, headers, found = server.request("POST", path, body)
    assert status == 200, found
    assert sorted(headers["x-quire-ignored"].split(", ")) == sorted(ignored.split(", "))


def test_completions_name_the_likeliest_of_tokens_with_one_text() -> None:
    """Parts of characters all look alike: the last of them, the unlikeliest, was told."""
    tokenizer: Any = SimpleNamespace(bytes_of=lambda id: bytes([0xE0 + id]) if id < 9 else b"a")
    view: Any = SimpleNamespace(_texts=TokenTexts(tokenizer))
    best = _CompletionView._best(view, [(1, -0.5), (9, -1.0), (2, -2.0)])
    assert best == {"\ufffd": -0.5, "a": -1.0}


def test_too_long_for_ever_is_413(server: Server) -> None:
    body = {"prompt": [5] * 250, "max_tokens": 20}
    status, _, found = server.request("POST", "/v1/completions", body)
    assert status == 413 and found["error"]["code"] == "context_length_exceeded"
    body = {"prompt": [5] * 300, "max_tokens": 1}
    assert server.request("POST", "/v1/completions", body)[0] == 413
    # Before it is looked at, or waits for a turn with its megabytes.
    body = {"prompt": ["x", [True] * 300], "max_tokens": 1}
    status, _, found = server.request("POST", "/v1/completions", body)
    assert (status, found["error"]["param"]) == (413, "prompt[1]")
    status, _, found = server.request("POST", "/detokenize", {"tokens": [5] * 65_537})
    assert status == 400 and "at most 65536 entries" in found["error"]["message"]
    body = {"prompt": [5] * 100, "max_tokens": 150, "n": 16}
    status, _, found = server.request("POST", "/v1/completions", body)
    message = found["error"]["message"]
    assert status == 413 and "Engine" not in message and message.endswith("lower max_tokens or n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x " * 500}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 500}]}, "messages"),
        ("/v1/responses", {"input": "x " * 500}, "input"),
    ],
)
def test_413_names_the_field_of_the_prompt(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, found = server.request("POST", path, body)
    assert (status, found["error"]["param"]) == (413, param)


def test_a_prediction_changes_no_answer(
    guessing: Server, client: openai.OpenAI, engine: quire.Engine
) -> None:
    """One that is right is accepted, in both forms; usage says how much of it."""
    expected = engine.generate(MESSAGES, max_tokens=60, temperature=0)
    assert expected.text is not None
    parts = [{"type": "text", "text": expected.text[:9]}, {"type": "text", "text": expected.text[9:]}]
    guesses = openai.OpenAI(base_url=guessing.url + "/v1", api_key="none", max_retries=0)
    for content in (expected.text, parts, "something else"):
        prediction: Any = {"type": "content", "content": content}
        found = guesses.chat.completions.create(
            messages=MESSAGES, model="tiny", max_tokens=60, temperature=0, prediction=prediction
        )
        assert found.choices[0].message.content == expected.text
        details = found.usage.completion_tokens_details
        if content != "something else":
            assert details.accepted_prediction_tokens >= 10  # a text has other tokens than it was drawn as
    plain = guesses.chat.completions.create(
        messages=MESSAGES, model="tiny", max_tokens=60, temperature=0
    )
    assert plain.choices[0].message.content == expected.text
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_405_names_the_methods(server: Server) -> None:
    status, headers, _ = server.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


def test_unknown_paths_and_methods(server: Server) -> None:
    assert server.request("GET", "/v1/nothing")[0] == 404
    status, _, found = server.request("GET", "/v1/completions")
    assert status == 405 and "is not a method of" in found["error"]["message"]


def test_other_content_types_and_hosts_are_refused(server: Server) -> None:
    """What a web page can send without being asked."""
    body = json.dumps({"prompt": "x"}).encode()
    headers = {"content-type": "text/plain"}
    status, _, found = server.request("POST", "/v1/completions", body, **headers)
    assert status == 415 and "application/json" in found["error"]["message"]
    status, _, found = server.request("GET", "/v1/models", host="evil.example")
    assert status == 403 and found["error"]["code"] == "host"
