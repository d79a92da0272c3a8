"""Clients that leave, health, metrics, and the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire
from program import process, run
from quire.serve import _streams
from quire.serve._streams import Streams
from quire.serve.admission import Admission, Cost
from quire.serve.generation import Generation
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.protocol import ConnectionBook
from quire.serve.service import Service
from quire.serve.tenants import Tenant
from server_process import DEADLINE, LOADS, PATIENT, Server, events, head, read_answer, running
from tiny_model import TinyModel

ENDLESS = {"prompt": "x", "max_tokens": 10_000_000, "window": 32, "ignore_eos": True}
USED = 'quire:kv_pages{state="used"}'


def open_stream(
    server: Server, id: str, authorization: str = "", **more: Any
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream without an end, of which the first event has come."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
    headers = {"content-type": "application/json", "x-request-id": id}
    if authorization:
        headers["authorization"] = authorization
    body = {**ENDLESS, "stream": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    return connection, answer


# ---- Clients that leave


def test_a_client_that_leaves_its_stream_frees_its_pages(server: Server) -> None:
    connection, answer = open_stream(server, "leave-stream")
    assert next(events(answer))["choices"]
    answer.close()
    connection.close()
    line = server.wait_log(lambda line: line.get("id") == "leave-stream")
    assert line["finish"] == "cancelled" and line["gone"] is True
    server.wait_metrics(lambda m: m[USED] == 0 and m["quire:num_requests_running"] == 0)


def test_a_client_that_leaves_without_a_stream_frees_its_pages(server: Server) -> None:
    data = json.dumps(ENDLESS).encode()
    with server.connect() as peer:
        peer.sendall(head("/v1/completions", len(data), "x-request-id: leave-whole") + data)
        server.wait_metrics(lambda m: m["quire:num_requests_running"] == 1)
    line = server.wait_log(lambda line: line.get("id") == "leave-whole")
    assert line["finish"] == "cancelled" and line["status"] == 499
    server.wait_metrics(lambda m: m[USED] == 0 and m["quire:num_requests_running"] == 0)


def test_disconnects_at_every_stage_leave_nothing(server: Server) -> None:
    before = server.metrics()["quire:http_connections"]  # others keep theirs open
    data = json.dumps({**ENDLESS, "stream": True}).encode()
    whole = head("/v1/completions", len(data)) + data
    for cut in (0, 1, 20, len(whole) - len(data), len(whole) - 1, len(whole)):
        with server.connect() as peer:
            peer.sendall(whole[:cut])
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST
    for length in (1, 100, 5000):
        with server.connect() as peer:
            peer.sendall(whole)
            while length > 0:
                length -= len(peer.recv(length))
    found = server.wait_metrics(
        lambda m: (
            m[USED] == m["quire:num_requests_running"] == 0
            and m["quire:http_connections"] <= before
        )
    )
    assert found["quire:num_requests_waiting"] == 0


def test_one_event_per_step_has_all_samples(server: Server, engine: quire.Engine) -> None:
    connection, answer = open_stream(
        server, "samples", n=3, max_tokens=9, window=0, temperature=1, seed=5
    )
    chunks = [event for event in events(answer) if event != "[DONE]"]
    connection.close()
    expected = engine.generate("x", max_tokens=9, n=3, temperature=1, seed=5, ignore_eos=True)
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [sample.text for sample in expected.samples]
    assert max(len(chunk["choices"]) for chunk in chunks) == 3 and len(chunks) <= 10


def test_streams_keep_nothing_of_what_was_sent(engine: quire.Engine) -> None:
    """An answer without an end does not grow in the server; one that is sent whole is kept."""

    async def results() -> list[quire.Result]:
        streams = Streams(engine, lambda *_: None, Limits(), ConnectionBook(Limits()).refuse)
        found = []
        for stream in (True, False):
            options: Any = {"max_tokens": 6, "logprobs": 1}
            asked = Generation(["A quire"], options, stream=stream)
            answer = await streams.submit(asked.prompts, options, keep=asked.keep)
            while await answer.next(DEADLINE):
                pass
            assert answer.result is not None
            found.append(answer.result)
            assert (streams.held_bytes > 0) == asked.keep
            answer.close()
            assert streams.held_bytes == 0
        await streams.close()
        return found

    sent, whole = asyncio.run(results())
    assert (sent.ids, sent.text, sent.logprobs) == ([], "", [])
    assert len(whole.ids) == len(whole.logprobs or ()) == 6 == sent.usage.completion_tokens


def test_a_defect_while_an_answer_is_taken_fails_it(
    engine: quire.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a callback of the event loop would be heard by nobody, and the client wait."""

    def broken(results: list[quire.Result]) -> quire.Result:
        raise TypeError("a defect")

    async def run() -> None:
        streams = Streams(engine, lambda *_: None, Limits(), ConnectionBook(Limits()).refuse)
        monkeypatch.setattr(_streams, "_joined", broken)
        answer = await streams.submit(["A quire"], {"max_tokens": 6})
        with pytest.raises(TypeError, match="a defect"):
            while await answer.next(DEADLINE):
                pass
        assert not streams.answers
        await streams.close()

    asyncio.run(run())


# ---- Health and metrics


def test_health_makes_a_token(tiny: TinyModel) -> None:
    with running(tiny.directory, "--no-prefix-cache") as server:
        assert server.metrics()["quire:generation_tokens_total"] == 0
        assert server.request("GET", "/health/live")[0] == 200
        assert server.metrics()["quire:generation_tokens_total"] == 0
        assert server.request("GET", "/health")[0] == 200
        found = server.metrics()
        assert found["quire:generation_tokens_total"] == 1
        assert found["quire:time_to_first_token_seconds_count"] == 0  # no client's
        assert server.request("GET", "/health")[0] == 200  # the same token
        assert server.metrics()["quire:generation_tokens_total"] == 1


def test_health_tells_that_the_engine_has_failed() -> None:
    """The task that watches the engine once died with the first error, and nobody saw it."""

    async def reasons() -> list[str | None]:
        service = Service.__new__(Service)
        service.draining, service._last_progress = False, -math.inf
        service._computed, service._fault = 0, None
        found: list[str | None] = []
        calls = 0

        def stats() -> dict[str, int]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise quire.InternalError("a check failed")
            return {"computed_tokens": calls}

        async def health_of_each_turn(_: float) -> None:
            found.append(await service.health())
            if len(found) == 3:
                raise asyncio.CancelledError

        service.stats = stats  # type: ignore[method-assign]
        service.streams = SimpleNamespace(last_token=-math.inf, answers=[])  # type: ignore
        with pytest.raises(asyncio.CancelledError):
            await service.watch_progress(health_of_each_turn)
        return found

    assert asyncio.run(reasons()) == [None, "the engine has failed: a check failed", None]


@pytest.mark.parametrize(("seconds", "alive"), [(1.0, True), (11.0, False)])
def test_health_after_a_long_rest(seconds: float, alive: bool) -> None:
    """The last token is long ago: what counts is how long the oldest answer has had."""

    async def reason() -> str | None:
        service = Service.__new__(Service)
        service.draining, service._last_progress, service._fault = False, -math.inf, None
        submitted = asyncio.get_running_loop().time() - seconds
        answers = [SimpleNamespace(submitted=submitted)]
        service.streams = SimpleNamespace(last_token=-math.inf, answers=answers)  # type: ignore
        return await service.health()

    assert (asyncio.run(reason()) is None) == alive


def test_metrics_count_what_happened(server: Server) -> None:
    before = server.metrics()
    server.post("/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": 3, "ignore_eos": True})
    found = server.metrics()
    grown = {name: value - before.get(name, 0) for name, value in found.items()}
    assert grown["quire:prompt_tokens_total"] == 4 == grown["quire:prefix_cache_queries_total"]
    assert grown["quire:generation_tokens_total"] == 3
    assert grown['quire:request_success_total{finished_reason="length"}'] == 1
    assert grown["quire:time_to_first_token_seconds_count"] == 1
    assert grown["quire:inter_token_latency_seconds_count"] == 2
    assert grown["quire:e2e_request_latency_seconds_count"] == 1
    for part in ("queue", "prefill", "decode"):
        assert grown[f"quire:request_{part}_time_seconds_count"] == 1
    assert 0 < grown["quire:request_prefill_time_seconds_sum"] < 60
    assert grown["quire:request_prompt_tokens_sum"] == 4
    assert grown['quire:http_requests_total{route="/v1/completions",status="200"}'] == 1
    assert found[USED] == 0 < found['quire:kv_pages{state="free"}']
    assert 0 == found["quire:kv_cache_usage_perc"]


def test_metrics_have_the_times_of_steps(server: Server) -> None:
    before = server.metrics()
    server.post("/v1/completions", {**ENDLESS, "max_tokens": 9})
    after = server.metrics()
    name = "quire:engine_step_seconds"
    steps = after["quire:engine_steps_total"] - before["quire:engine_steps_total"]
    assert after[f"{name}_count"] - before[f"{name}_count"] == steps >= 9
    assert after[f'{name}_bucket{{le="30.0"}}'] <= after[f"{name}_count"]
    assert after[f"{name}_sum"] > before[f"{name}_sum"]


def test_pages_that_the_prefix_cache_keeps_are_not_in_use(keyed: Server) -> None:
    keyed.post("/v1/completions", {"prompt": list(range(5, 85)), "max_tokens": 3})
    found = keyed.wait_metrics(lambda m: m[USED] == 0)
    assert found['quire:kv_pages{state="kept"}'] >= 5 and found["quire:kv_cache_usage_perc"] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_the_metrics(server: Server) -> None:
    _, _, page = server.request("GET", "/metrics")
    command = ["promtool", "check", "metrics"]
    found = subprocess.run(command, input=page, text=True, capture_output=True, check=False)
    remarks = [line.split(" ", 1)[1] for line in found.stderr.splitlines()]
    assert set(remarks) == {"metric names should not contain ':'"}, found.stderr


def test_no_label_comes_from_a_client(server: Server) -> None:
    server.request("GET", '/x"y\\z{evil}')
    server.request("POST", "/v1/completions", {"prompt": "x", "model": "evil"})
    _, _, page = server.request("GET", "/metrics")
    assert "evil" not in page and 'route="other",status="404"' in page
    server.request("GET", "/v1/models/evil")
    _, _, page = server.request("GET", "/metrics")
    assert "evil" not in page and 'route="/v1/models/NAME",status="404"' in page


# ---- Admission


def test_admission_by_share_and_time() -> None:
    limits = Limits(queue=10, queue_per_key=4, wait_seconds=20)
    ann, bob = Tenant("ann", 1, b"a"), Tenant("bob", 3, b"b")
    admission = Admission(limits, running_max=8, share_total=4)
    for _ in range(6):  # its share is 2, and 4 may wait
        place = admission.enter(ann, Cost(1), 0)
    with pytest.raises(Problem) as caught:
        admission.enter(ann, Cost(1), 0)
    assert caught.value.status == 429 and caught.value.retry_after == 1
    admission.enter(bob, Cost(6), 0)
    for now in (0.0, 5.0):  # while others wait an answer ends every 5 s
        admission.leave(place, now)
        place = admission.enter(ann, Cost(1), 0)
    with pytest.raises(Problem) as caught:
        admission.enter(bob, Cost(2), 0)
    assert (caught.value.status, caught.value.code) == (503, "would_wait")
    assert caught.value.retry_after == 30
    with pytest.raises(Problem) as caught:
        admission.enter(bob, Cost(1), 11)
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    assert admission.samples == 12


def test_admission_by_the_cost_of_prompts_ahead() -> None:
    """From the first request on: no answer has ended yet."""
    ann, bob = Tenant("ann", 1, b"a"), Tenant("bob", 1, b"b")
    admission = Admission(Limits(wait_seconds=20), running_max=64, share_total=2)
    first = admission.enter(ann, Cost(1, prompt_seconds=15), 0)
    admission.enter(ann, Cost(1, prompt_seconds=9), 0)
    with pytest.raises(Problem, match="about 24 s; the limit is 20 s") as caught:
        admission.enter(bob, Cost(1), 0)
    assert (caught.value.status, caught.value.retry_after) == (503, 24)
    admission.note_begun(first)
    admission.enter(bob, Cost(1), 0)
    # A key of whose prompts a tenth has to be computed asks others to wait for a tenth.
    for _ in range(30):
        admission.note_usage(bob, quire.Usage(100, 90, 5), 1)
    admission.enter(bob, Cost(1, prompt_seconds=90), 0)
    admission.enter(ann, Cost(1), 0)  # behind 9 and 9 seconds


def test_admission_knows_how_long_answers_are_before_one_has_ended() -> None:
    ann = Tenant("ann", 1, b"a")
    admission = Admission(Limits(wait_seconds=20), running_max=2, share_total=1)
    cost = Cost(1, token_seconds=0.1, max_tokens=100)  # 10 s each, two at a time
    for _ in range(6):  # of which four wait
        place = admission.enter(ann, cost, 0)
    with pytest.raises(Problem, match="about 25 s"):
        admission.enter(ann, cost, 0)
    admission.leave(place, 0.0)
    # Answers have 20 tokens, 2 s: a request with n = 16 once counted as one of 320.
    admission.note_usage(ann, quire.Usage(10, 0, 320), 16)
    for _ in range(10):
        admission.enter(ann, cost, 0)


def test_the_queue_of_a_key_keeps_no_other_out() -> None:
    """A key with a minute of prompts had the others told that they would wait for it: the engine
    takes them by turns, so they would not."""
    ann, bob = Tenant("ann", 2, b"a"), Tenant("bob", 1, b"b")
    admission = Admission(Limits(wait_seconds=20), running_max=8, share_total=3)
    for _ in range(7):
        admission.enter(ann, Cost(1, prompt_seconds=3), 0)
    with pytest.raises(Problem, match="about 21 s"):
        admission.enter(ann, Cost(1), 0)
    admission.enter(bob, Cost(1, prompt_seconds=4), 0)  # behind one in work, and two of a turn: 9 s
    admission.enter(bob, Cost(1, prompt_seconds=4), 0)  # 4 more of its own, and two of a turn: 19 s
    with pytest.raises(Problem, match="about 29 s"):
        admission.enter(bob, Cost(1), 0)

    admission = Admission(Limits(wait_seconds=20), running_max=2, share_total=3)
    places = [admission.enter(ann, Cost(1), 0) for _ in range(5)]
    for now in (0.0, 5.0):  # while others wait an answer ends every 5 s
        admission.leave(places.pop(), now)
    places += [admission.enter(ann, Cost(1), 0) for _ in range(3)]
    with pytest.raises(Problem, match="about 25 s"):
        admission.enter(ann, Cost(1), 0)
    admission.enter(bob, Cost(1), 0)  # its turn comes after two of the others and itself: 15 s


def test_admission_refuses_for_ever_what_never_fits() -> None:
    """64 prompts with n = 16 once got 429 with retry-after, each time that they came back."""
    ann = Tenant("ann", 1, b"a")
    admission = Admission(Limits(queue_per_key=4, queue=100), running_max=8, share_total=4)
    with pytest.raises(Problem, match="asks for 7 answers, n of each prompt; at most 6") as caught:
        admission.enter(ann, Cost(7), 0)
    assert (caught.value.status, caught.value.param, caught.value.retry_after) == (413, "n", None)
    admission = Admission(Limits(queue=1), running_max=2, share_total=1)
    with pytest.raises(Problem, match="at most 3 fit"):
        admission.enter(ann, Cost(4), 0)
    admission.enter(ann, Cost(3), 0)


def test_admission_is_told_what_a_prompt_takes() -> None:
    """Tools were a part of no cost: those behind megabytes of them waited without being told."""
    ann = Tenant("ann", 1, b"a")
    admission = Admission(Limits(wait_seconds=20), running_max=8, share_total=1)
    place = admission.enter(ann, Cost(1, prompt_seconds=0.1), 0)
    admission.note_prompt(place, 60.0)
    with pytest.raises(Problem, match="about 60 s"):
        admission.enter(ann, Cost(1), 0)


def test_admission_forgets_a_slow_time_once_nobody_waits() -> None:
    """Two ends 70 s apart, and whatever would have waited was refused until a restart: nothing
    that waited could end, and so nothing could correct the mean."""
    ann = Tenant("ann", 1, b"a")
    admission = Admission(Limits(wait_seconds=60), running_max=2, share_total=1)
    first, *places = [admission.enter(ann, Cost(1), 0) for _ in range(5)]
    admission.leave(first, 0.0)
    admission.leave(places.pop(), 70.0)
    with pytest.raises(Problem) as caught:
        admission.enter(ann, Cost(1), 0)
    assert caught.value.code == "would_wait"
    admission.leave(places.pop(), 140.0)  # nobody waits now
    for second in range(5):
        places.append(admission.enter(ann, Cost(1), 0))
        admission.leave(places.pop(0), 141.0 + second)

    admission = Admission(Limits(wait_seconds=60), running_max=2, share_total=1)
    for now in (0.0, 1000.0, 1001.0):  # what lies between was no time of a sample
        admission.leave(admission.enter(ann, Cost(3), 0), now)


def test_requests_that_never_ran_are_no_ends_of_samples() -> None:
    """A hundred that were cancelled while they waited made answers of 10 s ones of 0.1 s."""
    ann = Tenant("ann", 1, b"a")
    admission = Admission(Limits(wait_seconds=35), running_max=2, share_total=1)
    places = [admission.enter(ann, Cost(1), 0) for _ in range(6)]
    admission.leave(places.pop(), 0.0)
    for number in range(100):
        admission.leave(admission.enter(ann, Cost(1), 0), 0.05 * number, ran=False)
    admission.leave(places.pop(), 10.0)
    admission.enter(ann, Cost(1), 0)
    with pytest.raises(Problem, match="about 40 s"):
        admission.enter(ann, Cost(1), 0)


@pytest.mark.parametrize(("first_token", "ran"), [(None, False), (1.0, True)])
def test_what_is_cancelled_before_its_first_token_never_ran(
    first_token: float | None, ran: bool
) -> None:
    class Cancelled:
        result = None

        def close(self) -> None:
            pass

    async def finished() -> list[bool]:
        found: list[bool] = []
        answer: Any = Cancelled()
        answer.first_token = first_token
        service: Any = Service.__new__(Service)
        service.admission = SimpleNamespace(leave=lambda *_, ran: found.append(ran))
        service.metrics = SimpleNamespace(note_finished=lambda reason: None)
        service._last_tokens, service._places = {}, {answer: None}
        service.finish(answer, Generation([], {}), Tenant("ann"), "cancelled")
        return found

    assert asyncio.run(finished()) == [ran]


def test_a_full_server_says_when_to_come_back(tiny: TinyModel) -> None:
    limits = ("--limit", "queue=1", "--max-num-sequences", "1", *PATIENT)
    with running(tiny.directory, "--no-prefix-cache", "--page-size", "16", *limits) as server:
        first, answer = open_stream(server, "first")
        next(events(answer))
        second = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE)
        body = json.dumps({**ENDLESS, "max_tokens": 2})
        headers = {"content-type": "application/json"}
        second.request("POST", "/v1/completions", body, headers)
        server.wait_metrics(lambda m: m["quire:num_requests_waiting"] == 1)
        status, headers, found = server.request("POST", "/v1/completions", json.loads(body))
        assert status == 503 and found["error"]["code"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
        answer.close()
        first.close()
        assert second.getresponse().status == 200  # accepted, so it is answered
        second.close()


# ---- The end


def test_sigterm_lets_streams_end_and_refuses_newcomers(tiny: TinyModel) -> None:
    options = ("--page-size", "16", "--drain-timeout", "600", *PATIENT)
    with running(tiny.directory, *options) as server:
        holding = open_stream(server, "holds")  # the server is there until its client leaves
        connection, answer = open_stream(server, "last", max_tokens=3000)
        stream = events(answer)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log(lambda line: line["event"] == "draining")
        status, headers, found = server.request("POST", "/v1/completions", ENDLESS)
        assert status == 503 and found["error"]["code"] == "shutting_down"
        assert headers["retry-after"] == "1"
        assert server.request("GET", "/health")[0] == 503
        for part in reversed(holding):
            part.close()
        rest = list(stream)
        assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "length"
        connection.close()
        assert server.process.wait(DEADLINE) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_what_does_not_end_in_time_gets_an_error(tiny: TinyModel, signals: int) -> None:
    """After the time, or at the second signal."""
    timeout = "0.2" if signals == 1 else "1000"
    options = ("--page-size", "16", "--drain-timeout", timeout, *PATIENT)
    with running(tiny.directory, *options) as server:
        connection, answer = open_stream(server, "cut")
        stream = events(answer)
        next(stream)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            server.wait_log(lambda line: line["event"] == "draining") if not server.log else None
        rest = list(stream)
        assert rest[-1]["error"]["code"] == "shutting_down" and "[DONE]" not in rest
        connection.close()
        assert server.process.wait(DEADLINE) == 0


def test_a_terminal_that_goes_ends_the_server_in_order(tiny: TinyModel) -> None:
    """SIGHUP once killed it: what it had computed was not written."""
    with running(tiny.directory, "--page-size", "16") as server:
        server.process.send_signal(signal.SIGHUP)
        server.wait_log(lambda line: line["event"] == "draining")
        assert server.process.wait(DEADLINE) == 0


def test_what_begins_after_the_time_to_end_gets_an_error(tiny: TinyModel) -> None:
    """A request that was let in before SIGTERM and whose body came after the drain once ran on
    until its connection was cut, without an error event."""
    options = ("--no-prefix-cache", "--page-size", "16", "--drain-timeout", "0")
    options += ("--limit", "body_grace_seconds=600")
    with running(tiny.directory, *options) as server:
        body = json.dumps({**ENDLESS, "stream": True}).encode()
        with server.connect() as peer:
            peer.sendall(head("/v1/completions", len(body)) + body[:5])
            server.wait_metrics(lambda m: m["quire:http_connections"] >= 2)
            server.process.send_signal(signal.SIGTERM)
            server.wait_log(lambda line: line["event"] == "draining")
            peer.sendall(body[5:])
            _, answer = read_answer(peer)
        assert b'"code":"shutting_down"' in answer
        assert server.stop() == 0


def test_a_restart_finds_the_kv_of_the_first_run(tiny: TinyModel, tmp_path: Path) -> None:
    body = {"prompt": "A text that is long enough for some pages. " * 3, "max_tokens": 2}
    texts = []
    for expected in (0, 32):
        options = ("--kv-dir", str(tmp_path / "kv"), "--page-size", "16", *LOADS)
        with running(tiny.directory, *options) as server:
            found = server.post("/v1/completions", {**body, "logprobs": 0})
            details = found["usage"]["prompt_tokens_details"]
            assert details["disk_tokens"] >= expected
            assert expected or details["miss"] == "not stored"
            texts.append(found["choices"])
            assert 'quire:kv_tier_hits_total{tier="disk"}' in server.metrics()
            assert server.stop() == 0
    assert texts[0] == texts[1]


# ---- The command


def test_other_hosts_need_keys(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, keys_file: Path
) -> None:
    arguments = ("serve", str(tiny.directory), "--host", "0.0.0.0")
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "--api-keys FILE" in err
    for more in (["--insecure-no-auth"], ["--api-keys", str(keys_file)]):
        assert run(capsys, *arguments, "--dry-run", *more)[0] == 0


def test_dry_run_prints_what_is_in_effect(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PORT", "8001")
    monkeypatch.setenv("QUIRE_STRICT", "1")
    monkeypatch.setenv("QUIRE_DRAIN_TIMEOUT", "7")
    code, out, _ = run(
        capsys,
        "serve",
        str(tiny.directory),
        "--dry-run",
        "--drain-timeout",
        "8",
        "--limit",
        "queue=3",
    )
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and (rows["port"], rows["strict"]) == ("8001", "True")
    assert rows["drain-timeout"] == "8.0" and "queue=3 " in rows["limit"]
    assert "body_bytes=8388608 " in rows["limit"] and "body_seconds=60 " in rows["limit"]
    assert (rows["max-num-sequences"], rows["dtype"], rows["threads"]) == (
        "64",
        "bfloat16",
        "default",
    )
    assert (rows["no-prefix-cache"], rows["kv-read-only"], rows["exact"]) == ("False",) * 3
    assert "total" in rows
    _, out, _ = run(capsys, "serve", str(tiny.directory), "--dry-run", "--no-prefix-cache")
    assert ["no-prefix-cache", "True"] in map(str.split, out.splitlines())


def test_the_log_begins_with_what_is_in_effect(tiny: TinyModel) -> None:
    with running(tiny.directory, "--kv-redis", "redis://ann:secret@127.0.0.1:1/") as server:
        line = server.wait_log(lambda line: line["event"] == "started")
    assert line["options"]["port"] == "0" and line["options"]["drain-timeout"] == "30.0"
    assert line["options"]["kv-redis"] == "redis://ann:***@127.0.0.1:1/"
    assert line["version"] == quire.__version__


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    capsys: pytest.CaptureFixture[str],
    tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"model: {tiny.directory}\nport: 1\nkv-bytes: 3M\nstrict: true\nno-prefix-cache: false\n"
        "drain-timeout: 2.5\ncors: [https://a.example, https://b.example]\n"
        "limit: {queue: 3, prompts: 4}\nthreads: 2\n"
    )
    monkeypatch.setenv("QUIRE_CONFIG", str(path))
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_THREADS", "3")
    code, out, err = run(capsys, "serve", "--dry-run", "--threads", "4")
    assert code == 0, err
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (rows["port"], rows["threads"], rows["kv-bytes"]) == ("2", "4", str(3 << 20))
    assert (rows["strict"], rows["drain-timeout"]) == ("True", "2.5")
    assert rows["cors"] == "https://a.example, https://b.example"
    assert "queue=3 " in rows["limit"] and "prompts=4 " in rows["limit"]
    assert rows["model"] == str(tiny.directory) and rows["config"] == str(path)
    other = tmp_path / "other.yaml"
    other.write_text("")
    monkeypatch.setenv("QUIRE_MODEL", str(tiny.directory))
    code, out, err = run(capsys, "serve", "--dry-run", "--config", str(other))
    assert code == 0 and str(tiny.directory) in out, err


@pytest.mark.parametrize(("value", "strict"), [(None, "True"), ("0", "False"), ("1", "True")])
def test_a_switch_of_the_environment_wins_over_the_file(
    capsys: pytest.CaptureFixture[str],
    tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    strict: str,
) -> None:
    """One that was off there did not: it has no word of the command line."""
    path = tmp_path / "serve.yaml"
    path.write_text("strict: true")
    if value is not None:
        monkeypatch.setenv("QUIRE_STRICT", value)
    code, out, err = run(capsys, "serve", str(tiny.directory), "--dry-run", "--config", str(path))
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, rows["strict"]) == (0, strict), err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "there is no option 'prot'; did you mean port?"),
        ("config: x", "there is no option 'config'"),
        ("help: true", "there is no option 'help'"),
        ("port: x", "port: 'x' is not an integer"),
        ("port: true", "port is True; it must be a text or a number"),
        ("port: [1, 2]", "port is [1, 2]"),
        ("port:", "port is None"),
        ("strict: 1", "strict is 1; it must be true or false"),
        ("log-format: xml", "log-format is 'xml'; it must be one of text, json"),
        ("limit: {qeue: 1}", "did you mean queue?"),
        ("port: 1\nhost: a\nport: 2", "port is given twice"),
        ('kv-dir: "a\\0b"', "kv-dir: 'a\\x00b' has a NUL"),
        ('kv-key-file: "a\\0b"', "kv-key-file: 'a\\x00b' has a NUL"),
        ("- port", "must have lines such as"),
        ("model: 3", "model must be a folder"),
        ("a: [", "is no YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_wrong_files_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    code, _, err = run(capsys, "serve", "--dry-run", "--port", "3", "--config", str(path))
    assert code == 2 and words in err and str(path) in err


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("QUIRE_PORT", "x", "QUIRE_PORT: 'x' is not an integer from 0 to 65535"),
        ("QUIRE_LOG_FORMAT", "xml", "QUIRE_LOG_FORMAT is 'xml'; it must be one of text, json"),
        ("QUIRE_STRICT", "yes", "QUIRE_STRICT is 'yes'; it must be 0 or 1"),
        ("QUIRE_LIMIT", "qeue=1", "did you mean queue?"),
    ],
)
def test_wrong_variables_are_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    code, _, err = run(capsys, "serve", "--dry-run")
    assert code == 2 and words in err


def test_a_port_that_is_taken(tmp_path: Path, server: Server) -> None:
    """It is told before the model is read."""
    (tmp_path / "config.json").write_text("no JSON")
    other = process("serve", str(tmp_path), "--port", str(server.port))
    _, err = other.communicate(timeout=DEADLINE)
    assert other.returncode == 1 and b"Address already in use" in err


def test_tls_and_cors(tiny: TinyModel, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--cors", "https://a.example")
    with running(tiny.directory, *options) as server:
        context = ssl.create_default_context(cafile=str(cert))
        peer = http.client.HTTPSConnection(
            server.host, server.port, timeout=DEADLINE, context=context
        )
        peer.request("GET", "/v1/models", headers={"origin": "https://a.example"})
        answer = peer.getresponse()
        assert answer.status == 200 and answer.read()
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        headers = {"origin": "https://b.example", "access-control-request-method": "POST"}
        peer.request("OPTIONS", "/v1/completions", headers=headers)
        answer = peer.getresponse()
        assert answer.status == 400 and "access-control-allow-origin" not in answer.headers
        peer.close()
        assert server.stop() == 0
