"""Several servers over one Redis: a conversation outlives the server that began it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from balancers import front_of, vllm_router
from program import ROOT, free_port
from server_process import DEADLINE, LOADS, Server, running
from tiny_model import Shape, TinyModel

PAGE = (ROOT / "docs" / "fleet.md").read_text()


@pytest.fixture(scope="module")
def fleet_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """With room for a conversation of several turns."""
    return TinyModel(tmp_path_factory.mktemp("fleet"), Shape(positions=4096))


PROMPTS = "quire:prompt_tokens_total"  # also those of probes, which have one token


def ask(server: Server, messages: list[dict[str, str]], prefix: str | None = None) -> Any:
    headers = {} if prefix is None else {"x-quire-prefix": prefix}
    body = {"messages": messages, "max_tokens": 24, "ignore_eos": True}
    status, found, content = server.request("POST", "/v1/chat/completions", body, **headers)
    assert status == 200, content
    return content, found["x-quire-prefix"]


def test_another_server_goes_on_with_the_kv(redis: str, fleet_model: TinyModel) -> None:
    """One is killed under load; the other one has computed nothing of its conversations."""
    options = ("--kv-redis", redis, "--page-size", "16", *LOADS)
    with running(fleet_model.directory, *options) as one:
        with running(fleet_model.directory, *options) as two:
            chats: list[list[dict[str, str]]] = [
                [{"role": "user", "content": f"Chat {i}. " + "What is a quire of paper? " * 80}]
                for i in range(4)
            ]
            for messages in chats:
                content, _ = ask(one, messages)
                messages.append(content["choices"][0]["message"])
                messages.append({"role": "user", "content": "And a ream?"})
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                body = {"prompt": "x", "max_tokens": 10**6, "window": 32, "ignore_eos": True}
                load = [pool.submit(one.request, "POST", "/v1/completions", body) for _ in chats]
                one.wait_metrics(lambda m: m["quire:num_requests_running"] == 4)
                written = 'quire:kv_tier_written_bytes_total{tier="redis"}'
                one.wait_metrics(
                    lambda m: (
                        m["quire:kv_stored_chunks_total"] >= 8  # a chunk has 1 024 tokens here
                        and m[written] == m["quire:kv_stored_bytes_total"]
                    )
                )
                one.process.kill()
                for request in load:  # never an answer that looks whole
                    with pytest.raises((http.client.HTTPException, OSError)):
                        request.result()
            for index, messages in enumerate(chats):
                content, _ = ask(two, messages)
                details = content["usage"]["prompt_tokens_details"]
                assert details["redis_tokens"] >= 1024, str(details)
                plain = {"messages": messages, "max_tokens": 24, "ignore_eos": True}
                again = two.post("/v1/chat/completions", {**plain, "cache_salt": f"own {index}"})
                assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                assert again["choices"][0]["message"] == content["choices"][0]["message"]


@contextlib.contextmanager
def router(folder: Path, servers: list[Server]) -> Iterator[Server]:
    urls = [server.url for server in servers]
    with vllm_router(folder, "--policy", "cache_aware", "--worker-urls", *urls) as front:
        yield front


HAPROXY = re.search(r"\*\*HAProxy\*\*[^\n]*\n\n((?:    .*\n|\n)+)", PAGE)


@contextlib.contextmanager
def haproxy(folder: Path, servers: list[Server]) -> Iterator[Server]:
    """HAProxy with the configuration of docs/fleet.md, but for addresses."""
    program = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed")
    port = free_port()
    assert HAPROXY is not None
    text = textwrap.dedent(HAPROXY[1])
    for address, real in [
        ("bind :8000", f"bind 127.0.0.1:{port}"),
        ("10.0.0.1:8000", f"{servers[0].host}:{servers[0].port}"),
        ("10.0.0.2:8000", f"{servers[1].host}:{servers[1].port}"),
    ]:
        assert address in text
        text = text.replace(address, real)
    (folder / "haproxy.cfg").write_text(text)
    command = [program, "-db", "-f", str(folder / "haproxy.cfg")]
    with front_of(command, port, folder, servers[0].key) as front:
        yield front


@pytest.mark.parametrize("balancer", [router, haproxy])
def test_a_balancer_goes_on_without_a_server(
    redis: str, fleet_model: TinyModel, keys_file: Path, tmp_path: Path, balancer: Any
) -> None:
    """The server that has the conversation is killed under load, and the other one goes on with the
    KV that is in Redis."""
    options = ["--kv-redis", redis, "--page-size", "16", *LOADS]
    key = None
    if balancer is haproxy:  # its probes name no host, which a server without keys refuses
        options += ["--api-keys", str(keys_file)]
        key = "ann-key-0123456789"
    with (
        running(fleet_model.directory, *options, key=key) as one,
        running(fleet_model.directory, *options, key=key) as two,
        balancer(tmp_path, [one, two]) as front,
    ):
        text = f"By {balancer.__name__}. " + "What is a quire of paper? " * 80
        messages = [{"role": "user", "content": text}]
        content, prefix = ask(front, messages)
        messages += [content["choices"][0]["message"], {"role": "user", "content": "And a ream?"}]
        # Only now does the client know the prefix; from here on it names the server.
        content, again = ask(front, messages, prefix)
        assert again == prefix
        messages += [content["choices"][0]["message"], {"role": "user", "content": "Why?"}]
        counts = [server.metrics()[PROMPTS] for server in (one, two)]
        holder, other = (one, two) if counts[0] > counts[1] else (two, one)
        written = 'quire:kv_tier_written_bytes_total{tier="redis"}'
        holder.wait_metrics(lambda m: 0 < m[written] == m["quire:kv_stored_bytes_total"])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            endless = {"prompt": "x", "max_tokens": 10**6, "window": 32, "ignore_eos": True}
            load = [
                pool.submit(holder.request, "POST", "/v1/completions", endless) for _ in range(4)
            ]
            holder.wait_metrics(lambda m: m["quire:num_requests_running"] == 4)
            holder.process.kill()
            for request in load:  # never an answer that looks whole
                with pytest.raises((http.client.HTTPException, OSError)):
                    request.result()
        before = other.metrics()[PROMPTS]
        body = {"messages": messages, "max_tokens": 24, "ignore_eos": True}
        end = time.monotonic() + DEADLINE
        status = 0
        while status != 200 and time.monotonic() < end:  # until the balancer has noticed
            status, _, content = front.request(
                "POST", "/v1/chat/completions", body, **{"x-quire-prefix": prefix}
            )
        assert status == 200, content
        details = content["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= 1024, str(details)
        assert other.metrics()[PROMPTS] - before > 1000


def test_a_conversation_keeps_one_prefix(keyed: Server) -> None:
    messages = [{"role": "user", "content": "What is a quire?"}]
    _, first = ask(keyed, messages)
    assert ask(keyed, messages)[1] == first
    longer = [*messages, {"role": "assistant", "content": "Paper."}, *messages]
    assert ask(keyed, longer)[1] != first and ask(keyed, longer, first)[1] == first
    assert ask(keyed, longer, "not a prefix")[1] == ask(keyed, longer)[1]
    body = {"messages": messages, "max_tokens": 1}
    bob = {"authorization": "Bearer bob-key-0123456789"}
    _, headers, _ = keyed.request("POST", "/v1/chat/completions", body, **bob)
    assert headers["x-quire-prefix"] != first  # it tells nobody what another one asks


def test_the_page_of_the_fleet_names_what_there_is() -> None:
    for word in ("x-quire-prefix", "--kv-redis", "/health/live", "vllm-router"):
        assert word in PAGE


def test_the_pod_of_the_page_gets_no_variables_of_services() -> None:
    """Beside a Service named quire it ended at its start: QUIRE_PORT was an address."""
    example = PAGE.split("## Kubernetes")[1]
    found = re.search(r"(?:^    .*\n)+", example, re.MULTILINE)
    assert found is not None
    pod = yaml.safe_load(textwrap.dedent(found[0]))
    assert pod["containers"][0]["name"] == "quire" and pod["enableServiceLinks"] is False
