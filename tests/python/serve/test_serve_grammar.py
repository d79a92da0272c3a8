"""Answers that must look like something: every field of every API that says so."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import quire
from quire.serve.tool_parser import PARSERS, ToolParser
from scripted_model import ScriptedModel
from server_process import Server, running
from tiny_model import TinyModel
from tool_model import ToolModel

MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
WILD: Any = {"model": "tiny", "temperature": 2, "max_tokens": 150}


@pytest.fixture(scope="module")
def server(tiny: TinyModel) -> Iterator[Server]:
    with running(tiny.directory, "--page-size", "16", "--kv-bytes", "16M") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def is_person(text: str | None) -> bool:
    found = json.loads(text or "")
    return list(found) == ["name", "age"] and len(found["name"]) <= 5 and found["age"] in (1, 22)


def test_a_chat_has_a_response_format(client: openai.OpenAI, engine: quire.Engine) -> None:
    for seed in range(4):
        found = client.chat.completions.create(
            messages=MESSAGES, response_format=FORMAT, seed=seed, n=2, **WILD
        )
        expected = engine.generate(
            MESSAGES, grammar={"json_schema": PERSON}, temperature=2, max_tokens=150, seed=seed, n=2
        )
        for choice, sample in zip(found.choices, expected.samples, strict=True):
            assert choice.message.content == sample.text
            assert choice.finish_reason != "stop" or is_person(choice.message.content)
    found = client.chat.completions.create(
        messages=MESSAGES, response_format={"type": "json_object"}, seed=1, **WILD
    )
    choice = found.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"json": {"enum": ["a", 5]}}}, '"a"|5'),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [yz]'}}, "x[yz]"),
        ({"guided_json": '{"enum": ["a", 5]}'}, '"a"|5'),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" [yz]'}, "x[yz]"),
    ],
)
def test_the_fields_of_vllm(client: openai.OpenAI, body: Any, pattern: str) -> None:
    chat = client.chat.completions.create(messages=MESSAGES, extra_body=body, **WILD)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    text = client.completions.create(prompt="Once", extra_body=body, n=3, **WILD)
    assert all(re.fullmatch(pattern, choice.text) for choice in text.choices)


def test_a_stream_and_its_logprobs(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        messages=MESSAGES,
        stream=True,
        logprobs=True,
        top_logprobs=5,
        extra_body={"guided_choice": ["a", "b"]},
        **WILD,
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) in ("a", "b")
    first = choices[0].logprobs.content[0]
    assert sorted(entry.token for entry in first.top_logprobs) == ["a", "b"]


def test_a_response_has_a_text_format(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    found = client.responses.create(
        model="tiny", input="Who?", text={"format": format}, temperature=2, max_output_tokens=150
    )
    assert found.status == "incomplete" or is_person(found.output_text)


def deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": deep(64)}}},
            "response_format.json_schema.schema",
            "more than 64 levels",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "json_schema.not cannot be held",
        ),
        ({"guided_regex": "a("}, "guided_regex", "parenthesis is not closed"),
        ({"guided_regex": "a" * 66000}, "guided_regex", "at most 65536 bytes"),
        ({"guided_grammar": "root ::= root"}, "guided_grammar", "no text of this model"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "one of json, regex",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both say"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "does not go with guided_regex"),
    ],
)
def test_what_is_refused_has_the_name_of_its_field(
    server: Server, body: Any, param: str, words: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, **body}
    status, _, found = server.request("POST", "/v1/chat/completions", body)
    assert status == 400 and found["error"]["param"] == param
    assert words in found["error"]["message"]


def test_others_are_answered_while_grammars_are_compiled(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=MESSAGES, model="tiny", max_tokens=20)
    names = [f"p{i}" for i in range(1500)]

    def hostile(number: int) -> Any:
        schema = {"type": "object", "properties": {f"{n}{number}": {} for n in names}}
        body = {"guided_json": schema}
        return client.chat.completions.create(messages=MESSAGES, extra_body=body, **WILD)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        compiling = [pool.submit(hostile, number) for number in range(6)]
        for _ in range(5):
            again = client.chat.completions.create(messages=MESSAGES, model="tiny", max_tokens=20)
            assert again.choices[0].message.content == plain.choices[0].message.content
        for call in compiling:
            assert call.result().choices[0].message.content.startswith("{")


# ---- Calls that must be made

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bergen", "Oslo"]}},
    "required": ["city"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time_of_day"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral", "deepseek"])
def calling(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    model = ToolModel(tmp_path_factory.mktemp(request.param), request.param)
    with running(model.directory, "--page-size", "16") as server:
        yield server


def check_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    assert name in ("weather", "time_of_day")
    assert name != "weather" or found.keys() == {"city"} and found["city"] in ("Bergen", "Oslo")


def test_a_call_that_must_be_made_is_made(calling: Server) -> None:
    client = openai.OpenAI(base_url=calling.url + "/v1", api_key="none", max_retries=0)
    asked: Any = {"messages": MESSAGES, "tools": TOOLS, **WILD, "max_tokens": 400}
    ended = 0
    for seed in range(6):
        for choice in (NAMED, "required"):
            found = client.chat.completions.create(tool_choice=choice, seed=seed, **asked)
            (answer,) = found.choices
            if answer.finish_reason == "length":
                continue
            calls = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls" and not answer.message.content
            assert calls and (choice == "required" or len(calls) == 1)
            for call in calls:
                check_call(call.function.name, call.function.arguments)
                assert choice == "required" or call.function.name == "weather"
            ended += choice is NAMED
        one = client.chat.completions.create(
            tool_choice="required", parallel_tool_calls=False, seed=seed, **asked
        )
        assert len(one.choices[0].message.tool_calls or ()) <= 1
    assert ended >= 5


def test_the_other_apis_force_calls_too(calling: Server) -> None:
    claude = anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "weather", "input_schema": CITY}]
    choices: Any = [{"type": "any", "disable_parallel_tool_use": True}]
    choices.append({"type": "tool", "name": "weather"})
    for choice in choices:
        found = claude.messages.create(
            model="tiny",
            max_tokens=400,  # blanks and all
            messages=MESSAGES,
            tools=tools,
            tool_choice=choice,
            extra_body={"temperature": 2},
        )
        (block,) = found.content
        assert found.stop_reason == "tool_use" and block.type == "tool_use"
        assert block.input["city"] in ("Bergen", "Oslo")
    client = openai.OpenAI(base_url=calling.url + "/v1", api_key="none", max_retries=0)
    response = client.responses.create(
        model="tiny",
        input="Who?",
        temperature=2,
        max_output_tokens=400,
        tools=[{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
    )
    (item,) = response.output
    assert item.type == "function_call" and json.loads(item.arguments)["city"] in ("Bergen", "Oslo")


BAD_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
STRICT_BAD_TOOL = {"type": "function", "function": {**BAD_TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [BAD_TOOL]}, "tools[0].function.parameters"),
        ({"tools": [STRICT_BAD_TOOL]}, "tools[0].function.parameters"),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag"}}},
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_choices_that_are_refused(calling: Server, body: Any, param: str) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2, **body}
    status, _, found = calling.request("POST", "/v1/chat/completions", body)
    assert status == 400 and found["error"]["param"] == param


# ---- Calls that may be made

STRICT: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
_DEEPSEEK = {
    name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
}
# By the format: the template's mark, the special tokens, and two calls as a model writes them; the
# arguments of the first follow no schema.
SCRIPTS: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "hermes": (
        "<tool_call>",
        (),
        ["Well.", "<tool_call>", '\n{"name": "weather", "arguments": ', '{"city": "Rome"}', "}\n"]
        + ["</tool_call>", "\n<tool_call>", '\n{"name": "weather", "arguments": {"a"', ": 1}}\n"]
        + ["</tool_call", ">"],
    ),
    "llama3": (
        "<|python_tag|>",
        (),
        ['{"name": "weather", "parameters": ', '{"city": "Rome"}', "}; "]
        + ['{"name": "weather", "parameters"', ': {"a": 1}', "}"],
    ),
    "mistral": (
        "[TOOL_CALLS] [ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        ["Well.", "[TOOL_CALLS]", "weather", "[ARGS]", '{"city": "Rome"}', "[TOOL_CALLS]w"]
        + ["eather[", "ARGS]", '{"a": 1}'],
    ),
    "mistral list": (
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        ["Well.", "[TOOL_CALLS]", '[{"name": "weather", "arguments": ', '{"city": "Rome"}', "}, "]
        + ['{"name": "weather", "arguments"', ': {"a": 1}', "}]"],
    ),
    "deepseek": (
        _DEEPSEEK["call▁begin"],
        tuple(_DEEPSEEK.values()),
        ["Well.", _DEEPSEEK["calls▁begin"], _DEEPSEEK["call▁begin"], "weather", _DEEPSEEK["sep"]]
        + ['{"city": "Rome"}', _DEEPSEEK["call▁end"], _DEEPSEEK["call▁begin"] + "w", "eather<｜tool"]
        + ["▁sep｜>", '{"a": 1}', _DEEPSEEK["call▁end"] + "<｜tool", "▁calls▁end｜>"],
    ),
}


@pytest.fixture(scope="module", params=SCRIPTS)
def scripted(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    """A model that writes two calls, whatever it is asked."""
    mark, special, pieces = SCRIPTS[request.param]
    template = "{% if tools %}{{ tools | tojson }} " + mark + "{% endif %}"
    model = ScriptedModel(tmp_path_factory.mktemp("script"), pieces, special, template)
    with running(model.directory) as server:
        yield server


def test_calls_follow_strict_schemas(scripted: Server) -> None:
    def first(tools: Any) -> tuple[str, Any]:
        body = {"messages": MESSAGES, "tools": tools, "max_tokens": 400}
        (choice,) = scripted.post("/v1/chat/completions", body)["choices"]
        call = choice["message"]["tool_calls"][0]["function"]
        text = (choice["message"]["content"] or "")[:5]  # the model goes on behind the call
        return text, (call["name"], json.loads(call["arguments"]))

    text, call = first(TOOLS)
    assert call == ("weather", {"city": "Rome"})  # what the model writes
    held = [(text, ("weather", {"city": city})) for city in ("Bergen", "Oslo")]
    assert first(STRICT) in held
    # Beside a strict function the others' arguments are any object.
    other = {"type": "function", "function": {**STRICT[0]["function"], "name": "other"}}
    assert first([TOOLS[0], other]) == (text, call)


def test_one_call_or_several(scripted: Server) -> None:
    def calls(**more: Any) -> list[str]:
        body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **more}
        (choice,) = scripted.post("/v1/chat/completions", body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        return [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]

    assert calls() == ['{"city": "Rome"}', '{"a": 1}']
    assert calls(parallel_tool_calls=False) == ['{"city": "Rome"}']


def test_without_a_call_strict_tools_leave_any_text(tmp_path: Path) -> None:
    pieces = ["\n Well, ", '{"name": 1}', " <tool_cal", "l \t世", "界\x1b [TOOL_CALL ", "<｜tool▁call"]
    model = ScriptedModel(tmp_path, pieces)
    for kind in PARSERS:
        with running(model.directory, "--tool-parser", kind) as server:
            body: Any = {"messages": MESSAGES, "max_tokens": 60}
            for tools in (TOOLS, STRICT):
                (choice,) = server.post("/v1/chat/completions", {**body, "tools": tools})["choices"]
                assert choice["message"]["content"] == "".join(pieces), kind
                assert choice["finish_reason"] == "stop"


def test_calls_beside_a_format(calling: Server) -> None:
    """The answer is calls, or what the format says."""
    kinds = set()
    for seed in range(12):
        body = {"messages": MESSAGES, "tools": STRICT, "response_format": FORMAT, "seed": seed}
        found = calling.post("/v1/chat/completions", {**WILD, **body, "max_tokens": 400})
        (choice,) = found["choices"]
        if choice["finish_reason"] == "length":
            continue
        kinds.add(choice["finish_reason"])
        for call in choice["message"].get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"])["city"] in ("Bergen", "Oslo")
        assert choice["finish_reason"] == "tool_calls" or is_person(choice["message"]["content"])
    assert "stop" in kinds or "tool_calls" in kinds


def test_the_other_apis_hold_strict_schemas_too(scripted: Server) -> None:
    claude = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": CITY, "strict": True}
    asked: Any = {"model": "tiny", "max_tokens": 400, "messages": MESSAGES, "tools": [tool]}
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    blocks = claude.messages.create(tool_choice=choice, **asked).content
    (used,) = [block for block in blocks if block.type == "tool_use"]
    assert used.input["city"] in ("Bergen", "Oslo")
    client = openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0)
    response = client.responses.create(
        model="tiny",
        input="Who?",
        max_output_tokens=400,
        parallel_tool_calls=False,
        tools=[{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
    )
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Bergen", "Oslo")
    assert response.parallel_tool_calls is False


def test_a_message_has_an_output_format(server: Server) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    config: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    asked: Any = {"model": "tiny", "max_tokens": 150, "messages": MESSAGES}
    more = {"temperature": 2, "seed": 1}
    found = claude.messages.create(output_config=config, extra_body=more, **asked)
    assert found.stop_reason == "end_turn" and is_person(found.content[0].text)


def test_every_format_of_calls_is_tried() -> None:
    assert set(PARSERS) == {"hermes", "llama3", "mistral", "deepseek"}
    assert ToolParser("hermes").put("") == ("", [])
