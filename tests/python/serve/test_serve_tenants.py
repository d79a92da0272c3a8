"""Keys: which routes need one, and that no tenant meets another's KV."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import queue
import time
from pathlib import Path

import pytest
from quire import errors
from quire.serve.app import ROUTES
from quire.serve.guard import OPEN_PATHS
from quire.serve.page_routes import PAGE_FILES
from quire.serve.tenants import ANYONE, Tenant, Tenants, read_api_keys
from server_process import DEADLINE, LOADS, PATIENT, Server, events, head, read_answer, running
from test_serve_life import ENDLESS, open_stream
from tiny_model import Shape, TinyModel

ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"


def test_all_routes_but_probes_and_static_files_need_a_key(keyed: Server) -> None:
    """Walks all routes, so that one that is added later is walked, too."""
    assert OPEN_PATHS == {"/health", "/health/live", *PAGE_FILES}
    for method, path, _ in ROUTES:
        body = {} if method == "POST" else None
        status, headers, content = keyed.request(method, path, body, authorization="none")
        if path in OPEN_PATHS:
            assert status == 200, path
        else:
            assert status == 401 and headers["www-authenticate"] == "Bearer", path
            assert content["error"]["type"] == "authentication_error"
    assert keyed.request("GET", "/nothing", authorization="none")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer "},
        {"authorization": "Bearer " + ANN[:-1]},
        {"authorization": "Bearer " + ANN + "0"},
        {"authorization": "Basic " + ANN},
        {"authorization": ANN},
        {"authorization": "Bearer " + "\xff" * 20},
        {"authorization": "none", "x-api-key": "wrong"},
    ],
)
def test_wrong_keys_are_refused(keyed: Server, headers: dict[str, str]) -> None:
    assert keyed.request("GET", "/v1/models", **headers)[0] == 401


def test_both_headers_take_keys(keyed: Server) -> None:
    assert keyed.request("GET", "/v1/models", authorization=f"bearer {BOB}")[0] == 200
    assert keyed.request("GET", "/v1/models", **{"authorization": "", "x-api-key": ANN})[0] == 200


def test_a_wrong_key_is_told_before_the_body_comes(keyed: Server) -> None:
    with keyed.connect() as peer:
        peer.sendall(head("/v1/completions", 8_000_000, "authorization: Bearer wrong"))
        status, answer = read_answer(peer)
    assert status == 401 and b"invalid_api_key" in answer


def test_a_key_behind_the_body_is_none(keyed: Server) -> None:
    """A trailer is no header: what stands in front of the server has not looked at it."""
    begin = head("/v1/completions", None, "transfer-encoding: chunked", "connection: close")
    with keyed.connect() as peer:
        peer.sendall(begin + b"2\r\n{}\r\n0\r\nx-api-key: " + ANN.encode() + b"\r\n\r\n")
        status, answer = read_answer(peer)
    assert status == 401 and b"invalid_api_key" in answer


def test_an_address_may_send_a_few_wrong_keys(tiny: TinyModel, keys_file: Path) -> None:
    """All were answered alike, and each had a line in the log. A right key is answered all the
    same: other clients may have the same address."""
    options = ("--api-keys", str(keys_file), "--limit", "wrong_keys=5")
    with running(tiny.directory, *options, key=ANN) as server:

        def ask(key: str) -> tuple[int, dict[str, str], str]:
            status, headers, found = server.request("GET", "/v1/models", authorization=key)
            return status, headers, "" if status == 200 else found["error"]["code"]

        assert [ask("Bearer wrong")[0] for _ in range(5)] == [401] * 5
        count = 0
        while (status := ask("Bearer wrong")[0]) == 401:  # some are forgotten with time
            count += 1
            assert count < 1000
        status, headers, code = ask("none")
        assert (status, code, headers["connection"]) == (429, "wrong_keys", "close")
        assert 1 <= int(headers["retry-after"]) <= 12
        assert ask(f"Bearer {ANN}")[0] == ask(f"Bearer {BOB}")[0] == 200
        assert server.request("GET", "/health", authorization="Bearer wrong")[0] == 200
        while server.metrics().get('quire:http_limit_total{limit="wrong_keys"}', 0) < 50:
            ask("Bearer wrong")
        # What anybody may ask for has no lines that fill a disk, either.
        assert server.request("GET", "/page.css", authorization="none")[0] == 200
        assert server.request("POST", "/health", {}, authorization="none")[0] == 405
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "end"})
        server.wait_log(lambda line: line.get("id") == "end")
        assert {line["status"] for line in server.log if line.get("key") == "?"} == {401}
        refused = [line for line in server.log if line["event"] == "refused"]
        assert refused[0]["error"] == "wrong_keys" and refused[0]["address"] == "127.0.0.1"
        assert {line["status"] for line in refused} == {405, 429}


def _cached(server: Server, key: str, text: str, **fields: str) -> int:
    body = {"prompt": text, "max_tokens": 1, **fields}
    found = server.post("/v1/completions", body, authorization=f"Bearer {key}")
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_no_tenant_meets_the_kv_of_another(keyed: Server) -> None:
    text = "A text that only one of them knows, and that is long enough for pages. " * 2
    assert _cached(keyed, ANN, text) == 0
    assert _cached(keyed, ANN, text) > 32  # the positive control
    assert _cached(keyed, BOB, text) == 0
    assert _cached(keyed, BOB, text, cache_salt="ann") == 0
    assert _cached(keyed, BOB, text) > 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_prompt_alone_is_kept(keyed: Server, path: str) -> None:
    text = f"A prompt of {path} that is computed before anybody waits for its answer. " * 2
    prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        prompt = {"prompt": text}
    found = keyed.post(path, {**prompt, "max_tokens": 0})
    usage = found["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    again = keyed.post(path, {**prompt, "max_tokens": 1})["usage"]
    cached = again.get("cache_read_input_tokens")
    assert (cached or again["prompt_tokens_details"]["cached_tokens"]) > 32
    if path != "/v1/messages":
        data = keyed.post(path, {**prompt, "max_tokens": 0, "stream": True})
        assert '"finish_reason":"length"' in data and data.endswith("data: [DONE]\n\n")


def test_a_clients_salt_divides_its_own_kv(keyed: Server) -> None:
    text = "Another text that is long enough to have some pages of its own in here. " * 2
    assert _cached(keyed, ANN, text, cache_salt="one") == 0
    assert _cached(keyed, ANN, text, cache_salt="one") > 32
    assert _cached(keyed, ANN, text, cache_salt="two") == 0
    assert _cached(keyed, ANN, text) == 0


def test_salts_give_a_key_no_further_turns(tiny: TinyModel, keys_file: Path) -> None:
    """While one answer is in work, ann asks for five of other salts and bob, with the share 3, for
    three: bob's come in before ann's second one. No answer ends by itself: each is ended here when
    it has begun, which lets the next one in."""
    options = ["--api-keys", str(keys_file), "--page-size", "16", "--max-num-sequences", "1"]
    # All may wait for those without an end, and a client that reads slowly ends none.
    options += ["--limit", "wait_seconds=100000", *PATIENT]
    begun: queue.Queue[tuple[str, http.client.HTTPResponse]] = queue.Queue()
    with running(tiny.directory, *options, key=ANN) as server, contextlib.ExitStack() as stack:
        first = open_stream(server, "first", f"Bearer {ANN}", max_tokens=10**6)
        waiting: dict[str, http.client.HTTPConnection] = {}
        for index in range(8):
            key, id = (ANN, f"ann-{index}") if index < 5 else (BOB, f"bob-{index}")
            peer = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
            stack.callback(peer.close)
            body = {**ENDLESS, "max_tokens": 10**6, "stream": True, "cache_salt": str(index)}
            headers = {"authorization": f"Bearer {key}", "x-request-id": id}
            headers["content-type"] = "application/json"
            peer.request("POST", "/v1/completions", json.dumps(body), headers)
            waiting[id] = peer
            server.wait_metrics(lambda m: m["quire:num_requests_waiting"] == index + 1)

        def watch(id: str) -> None:
            answer = waiting[id].getresponse()
            next(events(answer))
            begun.put((id, answer))  # before it ends, which lets the next one begin

        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))
        watched = [pool.submit(watch, id) for id in waiting]
        for part in first:
            part.close()
        order: list[str] = []
        while len(order) < 8:
            id, answer = begun.get(timeout=DEADLINE)
            order.append(id)
            answer.close()
            waiting[id].close()
        for future in watched:
            future.result()
    assert set(order[:4]) == {"bob-5", "bob-6", "bob-7", "ann-0"}, order


def test_the_log_has_names_and_no_keys(keyed: Server) -> None:
    keyed.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "log-1"})
    line = keyed.wait_log(lambda line: line.get("id") == "log-1")
    assert line["key"] == "ann" and line["status"] == 200 and line["completion_tokens"] == 1
    assert "key-0123456789" not in json.dumps(keyed.log)


def test_a_key_keeps_its_share_of_the_pages(tiny: TinyModel, keys_file: Path) -> None:
    """There are 85 pages, and ann has a fourth of a half: 10. A prompt takes 8, and bob's fill all."""
    options = ("--api-keys", str(keys_file), "--page-size", "16", "--kv-bytes", "1M")
    with running(tiny.directory, *options, key=ANN) as server:

        def cached(key: str, first: int) -> int:
            prompt = [first] + [5 + i % 200 for i in range(120)]
            body = {"prompt": prompt, "max_tokens": 0}
            found = server.post("/v1/completions", body, authorization=f"Bearer {key}")
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        server.wait_log(lambda line: line["event"] == "pages")
        assert cached(ANN, 5) == 0
        for first in range(5, 40):
            cached(BOB, first)
        assert server.metrics()['quire:kv_pages{state="free"}'] < 8
        assert cached(BOB, 5) == 0  # the positive control: it was given up
        assert cached(ANN, 5) == 120


def test_a_key_keeps_its_share_of_the_store(tmp_path: Path, keys_file: Path) -> None:
    model = TinyModel(tmp_path / "model", Shape(positions=2048))
    options = ["--api-keys", str(keys_file), "--page-size", "16", "--no-prefix-cache"]
    options += ["--kv-dir", str(tmp_path / "kv"), "--kv-quota", "10M", *LOADS]
    with running(model.directory, *options, key=ANN) as server:

        def disk_tokens(key: str, first: int) -> int:
            prompt = [first] + [5 + i % 200 for i in range(1100)]
            body = {"prompt": prompt, "max_tokens": 0}
            found = server.post("/v1/completions", body, authorization=f"Bearer {key}")
            server.wait_metrics(written)
            return found["usage"]["prompt_tokens_details"]["disk_tokens"]

        server.wait_log(lambda line: line["event"] == "store")
        assert disk_tokens(ANN, 5) == 0
        for first in range(5, 30):  # more than twice what there is room for
            disk_tokens(BOB, first)
        assert server.metrics()['quire:kv_tier_evictions_total{tier="disk"}'] > 10
        assert disk_tokens(ANN, 5) >= 1024
        assert disk_tokens(BOB, 5) == 0  # the positive control


def written(metrics: dict[str, float]) -> bool:
    name = 'quire:kv_tier_written_bytes_total{tier="disk"}'
    return metrics[name] == metrics["quire:kv_stored_bytes_total"]


# ---- The file


def test_a_key_file(keys_file: Path) -> None:
    tenants = read_api_keys(keys_file)
    ann, bob = tenants.find({"x-api-key": ANN}), tenants.find({"x-api-key": BOB})
    assert (ann.name, ann.share, bob.name, bob.share) == ("ann", 1, "bob", 3)
    assert tenants.share_total == 4 and ANN not in repr(ann)
    assert tenants.find({}) is None and Tenants().find({}) is ANYONE


def test_a_key_is_found_among_thousands_in_no_longer_time(tmp_path: Path) -> None:
    """Each request was compared with every key: 2 ms of the event loop where there are 10 000, also
    for those without one. The file took the square of their number."""
    path = tmp_path / "keys"
    path.write_text("".join(f"n{i} key-{i:020}\n" for i in range(10_000)))
    begin = time.process_time()
    tenants = read_api_keys(path)
    assert time.process_time() - begin < 1  # 0.05 s
    assert sum(1 for _ in tenants) == 10_000
    begin = time.process_time()
    for i in range(0, 10_000, 10):
        found = tenants.find({"x-api-key": f"key-{i:020}"})
        assert found is not None and found.name == f"n{i}"
        assert tenants.find({"x-api-key": f"yek-{i:020}"}) is None
    assert time.process_time() - begin < 0.5  # 0.01 s; 4 s with a comparison for each key


def test_salts_come_from_keys() -> None:
    ann, bob = Tenant("x", 1, b"a" * 16), Tenant("x", 1, b"b" * 16)
    salts = {t.salt(c) for t in (ann, bob) for c in (None, "one", "two")}
    assert len(salts) == 6 and ANYONE.salt(None) is None and ANYONE.salt("s") == b"s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 keys"),
        ("ann", "line 1: must be"),
        ("ann short", "line 1: the key must have 16"),
        (f"a/b {ANN}", "line 1: the name"),
        (f"ann {ANN} 0", "line 1: the share"),
        (f"ann {ANN} 1 2", "line 1: must be"),
        (f"ann {ANN}\n\nbob {ANN}", "line 3: the name or the key"),
        (f"ann {ANN}\nann {BOB}", "line 2: the name or the key"),
    ],
)
def test_wrong_key_files_name_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(errors.BadArgumentError, match=words) as caught:
        read_api_keys(path)
    assert ANN not in str(caught.value)
