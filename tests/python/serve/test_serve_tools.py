"""Calls of functions, and Anthropic's API, in which they are blocks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
import quire
from quire.serve import anthropic_messages, openai_responses
from quire.serve._streams import Delta
from quire.serve.anthropic_messages import _MessageView
from quire.serve.calls import Call as GuardedCall
from quire.serve.fields import Fields
from quire.serve.generation import Generation
from quire.serve.grammars import read_wanted
from quire.serve.limits import Limits
from quire.serve.openai_responses import _Asked, _ResponseView
from quire.serve.problems import Problem
from quire.serve.tenants import ANYONE
from quire.serve.tool_parser import PARSERS, Call, ToolParser, call_id, parser_of_template
from quire.serve.tools import read_tools
from scripted_model import ScriptedModel
from server_process import Server, running

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ARGUMENTS = {"city": 'Ber"gen}', "days": [1, {"a": 2}]}
PIECES = ["Let me look.", "\n\n", "<tool", '_call>{"name": "weather", ', '"arguments": {"ci']
PIECES += ['ty": "Ber\\"gen}", ', '"days": [1, {"a": 2}]', "}} ", "</tool_call>"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = ScriptedModel(tmp_path_factory.mktemp("scripted"), PIECES)
    with running(model.directory) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(scripted: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


# ---- OpenAI


def test_a_chat_calls_a_function(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    (choice,) = found.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    again = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
    again += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(model="tiny", messages=again, tools=TOOLS).choices


def test_a_stream_has_arguments_as_they_come(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, stream=True
    )
    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join(choice.delta.content or "" for choice in choices)
    parts = [part for choice in choices for part in choice.delta.tool_calls or []]
    assert text == "Let me look." and choices[-1].finish_reason == "tool_calls"
    assert parts[0].function.name == "weather" and parts[0].id.startswith("call_")
    assert all(part.index == 0 and not part.id for part in parts[1:]) and len(parts) > 1
    assert json.loads("".join(part.function.arguments for part in parts)) == ARGUMENTS


def test_without_tools_all_of_it_is_text(client: openai.OpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = client.chat.completions.create(model="tiny", messages=MESSAGES, **more)
        assert found.choices[0].message.content == "".join(PIECES)
        assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
            "tools[0].function.strict",
        ),
    ],
)
def test_tools_that_are_refused(scripted: Server, body: Any, param: str) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, **body}
    status, _, found = scripted.request("POST", "/v1/chat/completions", body)
    assert status == 400 and found["error"]["param"] == param


def test_a_model_whose_template_knows_no_tools(server: Server) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    status, _, found = server.request("POST", "/v1/chat/completions", body)
    assert status == 400 and "knows no tools" in found["error"]["message"]


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """Mistral's: texts are decoded without them, but for answers in which calls are looked for."""
    special = ("[TOOL_CALLS]", "[ARGS]")
    pieces = ["Well.", "[TOOL_CALLS]", "weather", "[ARGS]", '{"city":', ' "Bergen"}']
    template = "{% if tools %}{{ tools | tojson }} [TOOL_CALLS]{% endif %}"
    model = ScriptedModel(tmp_path, pieces, special, template)
    with running(model.directory) as server:
        body = {"messages": MESSAGES, "tools": TOOLS}
        (choice,) = server.post("/v1/chat/completions", body)["choices"]
        plain = server.post("/v1/chat/completions", {"messages": MESSAGES})["choices"][0]
        body = {"messages": MESSAGES, "tools": CLAUDE_TOOLS, "max_tokens": 99}
        ended = server.post("/v1/messages", {**body, "stop_sequences": [' "Ber']})
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bergen"}'}
    assert len(call["id"]) == 9
    assert plain["message"]["content"] == 'Well.weather{"city": "Bergen"}'
    # Where the text was cut is told by one that has the tags, too.
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", ' "Ber')


# ---- Anthropic

CLAUDE_TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": CITY}]


def test_a_message_has_the_answer_of_the_engine(server: Server, engine: quire.Engine) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    prompt = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = engine.generate(prompt, max_tokens=9)
    asked = {"model": "tiny", "system": "Be brief.", "messages": MESSAGES}
    found = claude.messages.create(max_tokens=9, **asked)
    assert found.content[0].text == expected.text
    assert found.usage.input_tokens == len(expected.prompt_ids)
    assert found.usage.output_tokens == len(expected.ids) and found.stop_reason == "max_tokens"
    assert claude.messages.count_tokens(**asked).input_tokens == len(expected.prompt_ids)
    with claude.messages.stream(max_tokens=9, **asked) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == len(expected.ids)
    stop = expected.text[3:5]
    ended = claude.messages.create(max_tokens=9, stop_sequences=[stop], **asked)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)


def test_blocks_of_a_message(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 99, "messages": MESSAGES, "tools": CLAUDE_TOOLS}
    found = claude.messages.create(**asked)
    text, call = found.content
    assert text.text == "Let me look." and found.stop_reason == "tool_use"
    assert (call.name, call.input) == ("weather", ARGUMENTS)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert streamed.content[0].text == text.text and streamed.content[1].input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    again = [*MESSAGES, {"role": "assistant", "content": found.content}]
    again.append({"role": "user", "content": [result]})
    assert claude.messages.create(**{**asked, "messages": again}).content


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        # It would be the begin of the answer; as a turn of its own it is something else.
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "{"}]}, "is not supported"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ],
)
def test_errors_in_anthropics_form(scripted: Server, body: Any, words: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, **body}
    status, _, found = scripted.request("POST", "/v1/messages", body)
    assert status == 400 and found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error" and words in found["error"]["message"]


@pytest.mark.parametrize(
    ("read", "schema", "place"),
    [
        (openai_responses._read_tools, "parameters", "tools[0].parameters"),
        (anthropic_messages._read_tools, "input_schema", "tools[0].input_schema"),
    ],
)
def test_errors_of_tools_name_the_fields_of_their_api(read: Any, schema: str, place: str) -> None:
    """They named those of /v1/chat/completions: tools[0].function.parameters."""
    service: Any = SimpleNamespace(limits=Limits(), tool_parser="hermes", template="")

    def param(**tool: Any) -> str | None:
        with pytest.raises(Problem) as caught:
            read(Fields({"tools": [tool]}), service, None)
        return caught.value.param

    wrong = {schema: {"type": "array"}, "strict": True}
    assert param(name="f", **wrong) == place
    assert param(name="not a name") == "tools[0]"
    assert param(name="f", description=1) == "tools[0].description"


def test_unknown_fields_within_others_are_named() -> None:
    schema = {"name": "n", "schema": {"type": "object"}, "a": 1}
    function = {"name": "f", "parameters": {"x-mine": 1}, "c": 1}
    fields = Fields(
        {
            "response_format": {"type": "json_schema", "json_schema": schema, "b": 1},
            "tools": [{"type": "function", "function": function, "d": 1}],
            "tool_choice": {"type": "function", "function": {"name": "f"}, "e": 1},
        }
    )
    assert read_wanted(fields) is not None
    assert read_tools(fields, Limits(), "hermes", "", None) is not None
    assert sorted(fields.unknown()) == [
        "response_format.b",
        "response_format.json_schema.a",
        "tool_choice.e",
        "tools[0].d",
        "tools[0].function.c",
    ]
    fields = Fields({"structured_outputs": {"regex": "a", "f": 1}, "g": None})
    assert read_wanted(fields) is not None and fields.unknown() == ["structured_outputs.f"]


@pytest.mark.parametrize("tag", [{"format": 5}, {"format": "x"}, {"format": [1]}, {}])
def test_a_structural_tag_that_is_no_part_of_another_one_is_named(tag: Any) -> None:
    """It was an error of the server, 500."""
    fields = Fields({"tools": TOOLS, "structured_outputs": {"structural_tag": tag}})
    format = read_wanted(fields)
    with pytest.raises(Problem, match=r"structural_tag\.format must be an object") as caught:
        read_tools(fields, Limits(), "hermes", "", format)
    found = caught.value
    assert (found.status, found.param) == (400, "structured_outputs.structural_tag")


@pytest.mark.parametrize(
    ("read", "schema", "choice"),
    [
        (openai_responses._read_tools, "parameters", {"type": "function", "name": "f", "b": 1}),
        (anthropic_messages._read_tools, "input_schema", {"type": "tool", "name": "f", "b": 1}),
    ],
)
def test_unknown_fields_of_tools_are_named_in_every_api(read: Any, schema: str, choice: Any) -> None:
    """In these two they were ignored without a word."""
    service: Any = SimpleNamespace(limits=Limits(), tool_parser="hermes", template="")
    tool = {"name": "f", schema: {"x": 1}, "a": 1, "cache_control": {"type": "ephemeral"}}
    fields = Fields({"tools": [tool], "tool_choice": choice})
    assert read(fields, service, None) is not None
    assert sorted(fields.unknown()) == ["tool_choice.b", "tools[0].a"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_clients_know_the_id_of_a_request(server: Server, path: str) -> None:
    """They read it from a header of another name."""
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "messages": MESSAGES, "extra_headers": {"x-request-id": "mine"}}
    if path == "/v1/messages":
        assert claude.messages.create(max_tokens=1, **asked)._request_id == "mine"
    else:
        assert claude.messages.count_tokens(**asked)._request_id == "mine"
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(max_tokens=1, **{**asked, "model": "other"})
    assert caught.value.request_id == "mine"


# ---- The parser

Parsed = tuple[str, dict[int, tuple[str, str]]]


def parse(kind: str, parts: list[str]) -> Parsed:
    parser = ToolParser(kind)
    texts, calls = [], {}
    for text, found in [*map(parser.put, parts), parser.finish()]:
        texts.append(text)
        for call in found:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (call.name or name, arguments + call.arguments)
    assert parser.calls == len(calls)
    return "".join(texts), calls


@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", '[TOOL_CALLS][{"name": "'),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]"),
        ("hermes", '<tool_call>{"name": "'),
        ("llama3", '{"name": "'),
        ("deepseek", "<｜tool▁call▁begin｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    ],
)
def test_a_name_that_does_not_end_is_not_read_again_with_each_token(kind: str, begin: str) -> None:
    """A pattern went over all of it, and back, for each token: an answer of 30 000 tokens, which a
    client can ask for by a grammar, held the event loop for minutes."""

    def seconds(length: int) -> float:
        parser = ToolParser(kind)
        parser.put(begin + "a" * length)
        heads = [shape.head for shape in parser._format.shapes]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20):
                assert not any(head.match(parser._held) for head in heads)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(400_000) < 20 * seconds(2_000)


D = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin")}
D |= {"call▁end": "<｜tool▁call▁end｜>", "sep": "<｜tool▁sep｜>"}
ONE = '{"name": "f", "arguments": {"a": "}</tool_call>\\""}}'


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("hermes", "no call at all < <tool", ("no call at all < <tool", {})),
        ("hermes", f"a <tool_call>{ONE}</tool_call>", ("a", {0: ("f", ONE[27:-1])})),
        (
            "hermes",
            f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>\n",
            ("", {0: ("f", ONE[27:-1]), 1: ("f", ONE[27:-1])}),
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"b": 1}, "name": "g"}</tool_call>x',
            ("x", {0: ("g", '{"b": 1}')}),
        ),
        ("hermes", "<tool_call>{oh no</tool_call>", ("<tool_call>{oh no</tool_call>", {})),
        ("hermes", '<tool_call>{"name"', ('<tool_call>{"name"', {})),
        ("hermes", f"<tool_call>{ONE[:-5]}", ("", {0: ("f", ONE[27:-5])})),
        ("llama3", "just {text}", ("just {text}", {})),
        ("llama3", "", ("", {})),
        (
            "llama3",
            '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            ("", {0: ("f", '{"a": 1}'), 1: ("g", "{}")}),
        ),
        ("llama3", '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', {})),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", {0: ("f", "{}")})),
        ("llama3", '{"json": "but no call"}', ('{"json": "but no call"}', {})),
        ("llama3", '{"parameters": {}, "name": "h"}', ("", {0: ("h", "{}")})),
        (
            "mistral",
            'So: [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]}"}}, '
            '{"name": "g", "arguments": {}, "id": "123456789"}]\n',
            ("So:", {0: ("f", '{"a": "]}"}'), 1: ("g", "{}")}),
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{}',
            ("", {0: ("f", '{"a": 1}'), 1: ("g", "{}")}),
        ),
        ("mistral", '[TOOL_CALLS]f{"a": {}} and text', (" and text", {0: ("f", '{"a": {}}')})),
        ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "h"}]', ("", {0: ("h", "{}")})),
        ("mistral", "[TOOL_CALLS] no call", ("[TOOL_CALLS] no call", {})),
        ("mistral", '[{"name": "f", "arguments": {}}]', ('[{"name": "f", "arguments": {}}]', {})),
        (
            "deepseek",
            f"Yes. {D['calls▁begin']}{D['call▁begin']}f{D['sep']}{{\"a\": 1}}{D['call▁end']}"
            f"{D['call▁begin']}g{D['sep']}{{}}{D['call▁end']}{D['calls▁end']}",
            ("Yes.", {0: ("f", '{"a": 1}'), 1: ("g", "{}")}),
        ),
        (
            "deepseek",
            f"{D['calls▁begin']}{D['call▁begin']}function{D['sep']}f\n```json\n{{\"a\": \"```\"}}\n```"
            f"{D['call▁end']}\n{D['calls▁end']}",
            ("", {0: ("f", '{"a": "```"}')}),
        ),
        (
            "deepseek",
            f"{D['call▁begin']}what?{D['call▁end']}",
            (f"{D['call▁begin']}what?{D['call▁end']}", {}),
        ),
    ],
)
def test_a_parser_does_not_depend_on_the_cuts(kind: str, text: str, expected: Parsed) -> None:
    assert parse(kind, [text]) == expected
    assert parse(kind, list(text)) == expected
    for cut in range(len(text)):
        assert parse(kind, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("kind", PARSERS)
def test_random_texts_do_not_depend_on_the_cuts(kind: str) -> None:
    """Words of all formats in any order, in random pieces."""
    words = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool_call>", "</tool_call>", *D.values()]
    words += ["f", "g1", " ", "\n", "{", "}", "[", "]", ",", ";", "<", "```json\n", '"', "text"]
    words += ['{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": [{}]}}', "{}"]
    words += ['<tool_call>{"name": "f", "arguments": {"a', '[TOOL_CALLS]f{"', '[{"name": "f", ']
    words += [f'{D["call▁begin"]}f{D["sep"]}{{"', '"arguments": {"', 'x": "', '"}', '"}}']
    random = Random(kind)
    called = 0
    for _ in range(2000):
        text = "".join(random.choices(words, k=random.randint(1, 12)))
        expected = parse(kind, [text])
        called += len(expected[1]) > 0
        cuts = sorted(random.choices(range(len(text) + 1), k=random.randint(1, 9)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert parse(kind, parts) == expected, (text, parts)
    assert called > 50


def _stream_of(view: Any, texts: list[str]) -> list[dict[str, Any]]:
    """The events of an answer that comes in these pieces."""
    deltas = [Delta(0, text) for text in texts]
    deltas[-1].finish_reason = "stop"
    parts = [part for delta in deltas for part in view.step([delta])]
    return [json.loads(part.split(b"data: ", 1)[1]) for part in parts]


def _tool_generation() -> Generation:
    return Generation([[]], {}, tool_parser="hermes")


TAIL_AND_TEXT = ['<tool_call>{"name": "f", "arguments": {"a": 1', "}}</tool_call> and text"]


def test_the_end_of_a_call_and_text_may_come_at_once() -> None:
    """As with guesses, or where the client is slower than the engine. Text came first then: the
    arguments went to an item that is no call."""
    service: Any = SimpleNamespace(facts=SimpleNamespace(names=("tiny",)))
    call = GuardedCall("id", ANYONE)
    asked = _Asked(service, _tool_generation(), [], [], store=False, echo={})
    asked.call = call
    response = _ResponseView(asked)
    found = _stream_of(response, TAIL_AND_TEXT)
    ended = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in ended] == ["function_call"]
    assert ended[0]["arguments"] == '{"a": 1}'
    last = json.loads(b"".join(response._end_item()).rsplit(b"data: ", 1)[1])["item"]
    assert last["content"][0]["text"] == " and text"

    found = _stream_of(_MessageView(service, call, _tool_generation()), TAIL_AND_TEXT)
    blocks = [event["content_block"]["type"] for event in found if "content_block" in event]
    assert blocks == ["tool_use", "text"]
    deltas = [(event["index"], event["delta"]) for event in found if "delta" in event]
    arguments = [delta["partial_json"] for index, delta in deltas if index == 0]
    assert "".join(arguments) == '{"a": 1}'
    assert deltas[-1] == (1, {"type": "text_delta", "text": " and text"})


def test_a_whole_message_has_the_blocks_of_its_stream() -> None:
    service: Any = SimpleNamespace(facts=SimpleNamespace(names=("tiny",)))
    view = _MessageView(service, GuardedCall("id", ANYONE), _tool_generation())
    text = "first " + "".join(TAIL_AND_TEXT)
    sample = quire.engine.Sample([1], text, finish_reason="length")
    whole = view.whole(quire.Result([1], [sample], quire.Usage(1, 0, 1), None))
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
    assert whole["content"][1]["input"] == {"a": 1}


def test_arguments_are_passed_on_at_once() -> None:
    parser = ToolParser("hermes")
    assert parser.put('<tool_call>{"name": "f", "arguments": {"a') == (
        "",
        [Call(0, "f", ""), Call(0, None, '{"a')],
    )
    assert parser.put('": 1') == ("", [Call(0, None, '": 1')])


def test_ids_of_calls_are_what_templates_take() -> None:
    assert re.fullmatch("[a-z0-9]{9}", call_id("mistral", "call_", "a_0_1"))
    assert call_id("hermes", "call_", "a_0_1") == "call_a_0_1"


def test_the_format_is_known_by_the_template() -> None:
    assert parser_of_template("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert parser_of_template("{{ tools }} <|python_tag|>") == "llama3"
    assert parser_of_template("{{ tools }} [TOOL_CALLS]") == "mistral"
    assert parser_of_template("{{ tools }}" + D["call▁begin"]) == "deepseek"
    assert parser_of_template("{{ messages }} <tool_call>") is None
    assert parser_of_template(None) is None
