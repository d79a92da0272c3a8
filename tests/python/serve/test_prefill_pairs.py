"""A prefill and a decode server behind a router: `kv_transfer_params` in NIXL's and Mooncake's form,
by hand as vllm-router 0.1.17 sends them, and by the router itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from balancers import vllm_router
from server_process import Server, running
from tiny_model import Shape, TinyModel

TEXT = "A quire is a stack of folded pages. " * 30
# As recorded: what the router asks the prefill server for, beside the client's own fields.
OF_PREFILL = {"max_tokens": 1, "min_tokens": 1, "stream": False}
NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
MOONCAKE = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}


class Pair(NamedTuple):
    prefill: Server
    decode: Server
    alone: Server
    address: str  # where the prefill server computes for others


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """--prefill-remote auto: the router's word sends a prompt away, and the prediction that it is
    faster elsewhere."""
    model = TinyModel(tmp_path_factory.mktemp("pair"), Shape(positions=4096)).directory
    patient = ("--peer-dead-after", "600")
    with running(model, "--prefill-listen", "127.0.0.1:0", *patient) as prefill:
        address = prefill.wait_log(lambda line: line["event"] == "prefill")["endpoint"]
        decoding = running(model, "--prefill-from", address, *patient)
        with decoding as decode, running(model) as alone:
            connected = f'quire:prefill_peer_connected{{peer="{address}"}}'
            decode.wait_metrics(lambda m: m[connected] == 1)
            yield Pair(prefill, decode, alone, address)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": True}


def remote_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["remote_tokens"])


def came_from_the_peer(answer: dict[str, Any]) -> bool:
    """The whole prompt but its last token, and its beginning, which other prompts have as well."""
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    remote = remote_tokens(answer)
    return remote > 400 and remote + int(cached) == answer["usage"]["prompt_tokens"] - 1


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a["choices"][0].get(k) == b["choices"][0].get(k) for k in ("message", "text"))


def test_the_prefill_server_tells_where_the_kv_is(pair: Pair) -> None:
    asked = chat("NIXL. " + TEXT)
    alone = pair.alone.post("/v1/chat/completions", asked)
    first = pair.prefill.post(
        "/v1/chat/completions", {**asked, **OF_PREFILL, "kv_transfer_params": NIXL}
    )
    told = first["kv_transfer_params"]
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pair.address,
    }
    before = pair.prefill.metrics()
    answer = pair.decode.post("/v1/chat/completions", {**asked, "kv_transfer_params": told})
    assert same(answer, alone) and "kv_transfer_params" not in answer
    assert came_from_the_peer(answer), json.dumps(answer["usage"])
    served = "quire:prefill_served_prompts_total"
    after = pair.prefill.wait_metrics(lambda m: m[served] > before[served])
    assert after[served] == before[served] + 1
    hits = "quire:prefix_cache_hits_total"
    assert after[hits] >= before[hits] + remote_tokens(answer) - 1, "its KV was in the prefix cache"
    # On a machine so slow that the lease was over before, that ended it.
    ended = ("quire:prefill_held_used_total", "quire:prefill_held_overdue_total")
    pair.prefill.wait_metrics(lambda m: sum(m[name] - before[name] for name in ended) >= 1)


def test_both_servers_are_asked_at_once(pair: Pair) -> None:
    """Mooncake's form: the decode server need not wait for the prefill server's answer."""
    status, _, ranks = pair.prefill.request("GET", "/query")
    assert status == 200 and ranks == {"0": {"engine_id": pair.address}}
    asked = chat("Mooncake. " + TEXT)
    told = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_bootstrap_addr": pair.prefill.url,
        "remote_engine_id": ranks["0"]["engine_id"],
    }
    answer = pair.decode.post("/v1/chat/completions", {**asked, "kv_transfer_params": told})
    assert came_from_the_peer(answer), json.dumps(answer["usage"])
    first = pair.prefill.post(
        "/v1/chat/completions", {**asked, **OF_PREFILL, "kv_transfer_params": MOONCAKE}
    )
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert same(answer, pair.alone.post("/v1/chat/completions", asked))


def test_an_ordinary_request_is_computed_here(pair: Pair) -> None:
    # So few tokens go nowhere by themselves, whatever is predicted.
    body = {"prompt": [5, 6, 7, 8, 9, 10, 11, 12], "max_tokens": 4}
    nothing = {"do_remote_decode": False, "do_remote_prefill": False, "remote_engine_id": None}
    for more in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": nothing}):
        answer = pair.decode.post("/v1/completions", {**body, **more, "cache_salt": str(more)})
        assert remote_tokens(answer) == 0 and "kv_transfer_params" not in answer


@pytest.mark.parametrize(
    ("server", "body", "param", "words"),
    [
        ("decode", {"do_remote_decode": True}, "", "begin it with --prefill-listen"),
        (
            "decode",
            {"do_remote_prefill": True, "remote_engine_id": "10.0.0.9:1"},
            ".remote_engine_id",
            "'10.0.0.9:1', which is none of the addresses of --prefill-from of this server",
        ),
        (
            "alone",
            {"do_remote_prefill": True, "remote_engine_id": "10.0.0.9:1"},
            ".remote_engine_id",
            "none of the addresses of --prefill-from",
        ),
        (
            "decode",
            {"do_remote_prefill": True},
            ".remote_engine_id",
            "must be the engine id that the prefill server has told",
        ),
        (
            "decode",
            {"do_remote_prefill": True, "remote_engine_id": "x" * 513},
            ".remote_engine_id",
            "a text of at most 512 bytes",
        ),
        (
            "prefill",
            {"do_remote_prefill": True, "do_remote_decode": True},
            ".do_remote_decode",
            "false where do_remote_prefill is true",
        ),
        ("prefill", {"do_remote_decode": 1}, ".do_remote_decode", "true or false"),
        ("prefill", ["do_remote_decode"], "", "an object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    pair: Pair, server: str, body: Any, param: str, words: str
) -> None:
    whole = {"prompt": TEXT, "max_tokens": 1, "kv_transfer_params": body}
    status, _, content = getattr(pair, server).request("POST", "/v1/completions", whole)
    assert status == 400, content
    assert content["error"]["param"] == f"kv_transfer_params{param}"
    assert words in content["error"]["message"]


def test_a_stream_keeps_nothing_for_another_server(pair: Pair) -> None:
    body = {"prompt": TEXT, "max_tokens": 1, "stream": True, "kv_transfer_params": NIXL}
    status, _, content = pair.prefill.request("POST", "/v1/completions", body)
    assert status == 400 and "where stream is true" in content["error"]["message"]
    # Somebody reads the answer of this one, whose first token may be the end.
    status, _, content = pair.prefill.request(
        "POST", "/v1/completions", {"prompt": TEXT, "min_tokens": 1}
    )
    assert status == 400 and content["error"]["param"] == "min_tokens"
    status, _, content = pair.alone.request("GET", "/query")
    assert status == 400 and "--prefill-listen" in content["error"]["message"]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_router_drives_the_pair(pair: Pair, tmp_path: Path, connector: str) -> None:
    tokens = f'quire:prefill_peer_tokens_total{{peer="{pair.address}"}}'
    prompts = f'quire:prefill_peer_prompts_total{{peer="{pair.address}"}}'
    bootstrap = [str(pair.prefill.port)] if connector == "mooncake" else []
    options = ["--vllm-pd-disaggregation", "--kv-connector", connector]
    options += ["--prefill", pair.prefill.url, *bootstrap, "--decode", pair.decode.url]
    with vllm_router(tmp_path, *options) as front:
        before = pair.decode.metrics()
        asked = chat(f"Routed by {connector}. " + TEXT)
        answer = front.post("/v1/chat/completions", asked)
        assert same(answer, pair.alone.post("/v1/chat/completions", asked))
        # The router shows prompt_tokens_details of the prefill server, so usage does not tell.
        after = pair.decode.metrics()
        assert after[prompts] == before[prompts] + 1 and after[tokens] > before[tokens] + 400
        body = {"prompt": f"Streamed by {connector}. " + TEXT, "max_tokens": 6, "ignore_eos": True}
        status, _, stream = front.request("POST", "/v1/completions", {**body, "stream": True})
        assert status == 200, stream
        events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert text == pair.alone.post("/v1/completions", body)["choices"][0]["text"]
        assert pair.decode.metrics()[prompts] == before[prompts] + 2
