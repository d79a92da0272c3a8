"""Clients as users have them, against a process: LangChain, curl, a long conversation with a restart
of the server in it, and Ctrl-C on either side of a stream."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
import quire
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scripted_model import ScriptedModel
from server_process import DEADLINE, LOADS, Server, running
from test_serve_grammar import SCRIPTS
from tiny_model import Shape, TinyModel

_, _, PIECES = SCRIPTS["hermes"]
ENDLESS = {"prompt": "x", "max_tokens": 10_000_000, "window": 32, "ignore_eos": True, "stream": True}


class City(pydantic.BaseModel):
    """A city."""

    city: Literal["Bergen", "Oslo"]


@tool
def weather(city: Literal["Bergen", "Oslo"]) -> str:
    """The weather of a city."""
    raise AssertionError(f"the model's calls are not made, also not with {city}")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = ScriptedModel(tmp_path_factory.mktemp("scripted"), PIECES)
    with running(model.directory) as server:
        yield server


# ---- LangChain


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_chats_and_calls(scripted: Server, responses: bool) -> None:
    model = ChatOpenAI(
        base_url=scripted.url + "/v1",
        api_key="none",
        model="tiny",
        max_retries=0,
        max_tokens=300,
        use_responses_api=responses,
    )
    whole = model.invoke("What is the weather?")
    assert whole.text == "".join(PIECES) and whole.usage_metadata["output_tokens"] == len(PIECES)
    assert "".join(chunk.text for chunk in model.stream("What is the weather?")) == whole.text
    called = model.bind_tools([weather]).invoke("What is the weather?")
    assert called.text == "Well." and {call["name"] for call in called.tool_calls} == {"weather"}
    assert [call["args"] for call in called.tool_calls] == [{"city": "Rome"}, {"a": 1}]
    results: Any = [
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        for call in called.tool_calls
    ]
    asked = [("user", "What is the weather?"), called, *results]
    assert model.bind_tools([weather]).invoke(asked).tool_calls
    strict = model.bind_tools([weather], strict=True, parallel_tool_calls=False)
    (call,) = strict.invoke("What is the weather?").tool_calls
    assert call["args"]["city"] in ("Bergen", "Oslo")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_reads_structured_answers(scripted: Server, method: Any) -> None:
    model = ChatOpenAI(
        base_url=scripted.url + "/v1", api_key="none", model="tiny", max_retries=0, max_tokens=300
    )
    found = model.with_structured_output(City, method=method).invoke("Which city?")
    assert isinstance(found, City)


# ---- curl


def test_curl_has_the_answer_of_the_engine(server: Server, engine: quire.Engine) -> None:
    messages: Any = [{"role": "user", "content": "What is a quire of paper?"}]
    body = json.dumps({"messages": messages, "max_tokens": 9})
    command = ["curl", "--silent", "--show-error", "--fail", "-d", body]
    command += ["-H", "content-type: application/json", server.url + "/v1/chat/completions"]
    found = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE)
    text = json.loads(found.stdout)["choices"][0]["message"]["content"]
    assert text == engine.chat(messages, max_tokens=9).text


# ---- A conversation


def test_a_conversation_of_50_turns_with_a_restart(tmp_path: Path) -> None:
    """Its answers are those of an engine that was never interrupted. Only what is new of a turn is
    computed; behind the restart also what is no whole chunk."""
    model = TinyModel(tmp_path / "model", Shape(positions=4096))
    options = ("--kv-dir", str(tmp_path / "kv"), "--page-size", "16", *LOADS)
    messages: list[Any] = []
    with quire.Engine(model.directory, dtype="float32", threads=1, page_size=16) as engine:
        for first in (0, 25):
            with running(model.directory, *options) as server:
                client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
                for turn in range(first, first + 25):
                    messages.append({"role": "user", "content": f"Question {turn}: and then?"})
                    found = client.chat.completions.create(
                        model="tiny", messages=messages, max_tokens=8
                    )
                    text = found.choices[0].message.content
                    assert text == engine.chat(messages, max_tokens=8).text
                    messages.append({"role": "assistant", "content": text})
                    details: Any = found.usage.prompt_tokens_details
                    computed = found.usage.prompt_tokens - details.cached_tokens
                    assert computed <= 120 or turn in (0, 25), (turn, found.usage)
                    assert (details.disk_tokens >= 1024) == (turn == 25)  # a chunk of a small model
                assert server.stop() == 0


# ---- Ctrl-C


def test_ctrl_c_in_a_client(server: Server) -> None:
    code = (
        "import openai\n"
        f"client = openai.OpenAI(base_url={server.url + '/v1'!r}, api_key='none')\n"
        f"more = {ENDLESS!r}\n"
        "stream = client.completions.create(model='tiny', prompt=more.pop('prompt'),\n"
        "    stream=more.pop('stream'), max_tokens=more.pop('max_tokens'), extra_body=more,\n"
        "    extra_headers={'x-request-id': 'ctrl-c'})\n"
        "for chunk in stream:\n"
        "    print('.', end='', flush=True)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert client.stdout is not None and client.stdout.read(1) == b"."
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=DEADLINE)
    assert b"KeyboardInterrupt" in err
    line = server.wait_log(lambda line: line.get("id") == "ctrl-c")
    assert line["finish"] == "cancelled" and line["gone"] is True
    server.wait_metrics(lambda m: m['quire:kv_pages{state="used"}'] == 0)


def test_ctrl_c_in_the_server(tiny: TinyModel) -> None:
    """Its stream ends with an error event, and the program in order."""
    with running(tiny.directory, "--page-size", "16", "--drain-timeout", "0.2") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        more = {name: value for name, value in ENDLESS.items() if name not in ("prompt", "stream")}
        stream = client.completions.create(model="tiny", prompt="x", stream=True, extra_body=more)
        assert next(iter(stream)).choices
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is ending"):
            for _ in stream:
                pass
        assert server.process.wait(DEADLINE) == 0
