"""Prompts that another process computes: `quire prefill`, and --prefill-from of the other commands.
Every process here is one of its own, but for engines that the test itself has."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import quire
from program import Certificates, process, run, use_ucx
from quire import _options, _prefill, _ranges
from tiny_model import Shape, TinyModel

sys.path.insert(0, str(Path(__file__).parent / "serve"))

from server_process import Server, running  # noqa: E402

SECONDS = 120.0  # for what must come; nothing waits so long
IDS = [3 + i % 90 for i in range(400)]
LONG = [3 + (i * i + i) % 900 for i in range(1200)]
SECRET = b"what both sides have"


class Prefill:
    """`quire prefill` as a process. Its errors are read line by line."""

    def __init__(self, model: Path | str, listen: str, *options: str) -> None:
        self.process = process("prefill", str(model), "--listen", listen, *options)
        assert self.process.stdout is not None and self.process.stderr is not None
        ready = self.process.stdout.readline().decode()
        found = re.search(r"^quire: (\S+) computes prompts at (\S+)\n$", ready)
        if found is None:
            self.kill()
        assert found, (ready, self.process.stderr.read())
        self.name, self.address = found[1], found[2]

    def refusal(self) -> str:
        """The next line about a connection that was refused."""
        assert self.process.stderr is not None
        while True:
            line = self.process.stderr.readline().decode()
            assert line, "it has ended"
            if line.startswith("quire: refused: "):
                return line

    def await_refusal(self, why: str) -> None:
        """Reads until one is told for this cause. Others before it are told again now and then."""
        while why not in self.refusal():
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, bytes]:
        """Its exit code, and what else it has said."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, rest


Start = Callable[..., Prefill]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Prefill] = []

    def start_one(model: Path | str, listen: str = "127.0.0.1:0", *options: str) -> Prefill:
        patient = ("--peer-dead-after", str(SECONDS))
        started.append(Prefill(model, listen, "--threads", "1", *patient, *options))
        return started[-1]

    yield start_one
    for each in started:
        each.kill()
        for stream in (each.process.stdout, each.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("roomy"), Shape(positions=4096))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_flags(certificates: Certificates, own: Path) -> list[str]:
    files = ("ca", certificates.ca), ("cert", own), ("key", certificates.key_of(own))
    return [word for name, file in files for word in (f"--peer-tls-{name}-file", str(file))]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return str(path)


def ids_text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


def generate(*options: str, ids: list[int] = IDS) -> subprocess.Popen[bytes]:
    """`quire generate --json` as a process, of the embedded model."""
    words = ["generate", "--prompt-ids", ids_text(ids), "--json", "--threads", "1"]
    return process(*words, "--greedy", "--max-tokens", "8", *options)


def answer_of(started: subprocess.Popen[bytes]) -> tuple[dict[str, Any], str]:
    out, err = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, err
    return json.loads(out), err.decode()


def engine_from(model: TinyModel | str, address: str, **options: Any) -> quire.Engine:
    fixed: dict[str, Any] = {"threads": 1, "prefill_from": [address], "prefill_remote": "always"}
    fixed["peer_dead_after"] = SECONDS  # a process that stands still is the matter of one test
    folder = model if isinstance(model, str) else model.directory
    return quire.Engine(folder, **{**fixed, **options})


def await_connected(engine: quire.Engine) -> None:
    """Connecting has two seconds, and is tried again."""
    end = time.monotonic() + SECONDS
    while not (peer := engine.prefill_peers()[0]).connected:
        assert time.monotonic() < end, peer


def same_answers(a: quire.Result, b: quire.Result) -> bool:
    """Tokens and log-probabilities, bit for bit."""
    return a.samples == b.samples


# ---- The program, two processes


@pytest.mark.parametrize("kind", ["tcp", "tls", "unix", "ucx"])
def test_a_prompt_of_another_process_has_the_answer_of_one(
    start: Start,
    embedded_model: str,
    tmp_path: Path,
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen, guard, other_guard = "127.0.0.1:0", [], []
    if kind == "unix":
        listen = f"unix:{tmp_path}/prefill.sock"
    elif kind == "ucx":
        use_ucx(monkeypatch)
        listen = "ucx:127.0.0.1:0"
    elif kind == "tcp":
        guard = other_guard = ["--peer-secret-file", request.getfixturevalue("secret")]
    else:
        certificates = request.getfixturevalue("certificates")
        guard = tls_flags(certificates, certificates.client)
        other_guard = tls_flags(certificates, certificates.server)
    prefill = start(embedded_model, listen, *other_guard)
    assert prefill.address.startswith(listen.removesuffix(":0"))
    alone, _ = answer_of(generate())
    found, err = answer_of(
        generate("--prefill-from", prefill.address, "--prefill-remote", "always", *guard)
    )
    usage = found.pop("usage")
    assert usage["remote_tokens"] == len(IDS) - 1 and usage["remote_seconds"] > 0
    assert "remote_tokens" not in alone.pop("usage")
    assert found == alone
    assert f"({len(IDS) - 1} of {len(IDS)} prompt tokens computed by another process in " in err
    code, rest = prefill.terminate()
    assert code == 0 and b"quire: " not in rest  # a slow machine says that it reads the weights


def test_a_process_that_is_killed_in_a_long_prompt_changes_no_answer(embedded_model: str) -> None:
    """The prefill side is a server, whose metrics tell when it is in the middle of the prompt."""
    alone, _ = answer_of(generate(ids=LONG))
    options = ("--prefill-listen", "127.0.0.1:0", "--prefill-chunk", "16", "--dtype", "bfloat16")
    prefill = Server(Path(embedded_model), *options)
    try:
        address = prefill.wait_log(lambda line: line["event"] == "prefill")["endpoint"]
        started = generate(
            "--prefill-from", address, "--prefill-remote", "always", ids=LONG
        )
        prefill.wait_metrics(
            lambda m: m["quire:engine_steps_total"] >= 8 and m["quire:prefill_served_waiting"] == 1
        )
        prefill.process.kill()
        found, err = answer_of(started)
    finally:
        prefill.process.kill()
        prefill.process.wait(SECONDS)
    usage = found.pop("usage")
    assert 0 < usage["remote_tokens"] < len(LONG) - 1
    alone.pop("usage")
    assert found == alone
    assert f"({address}: Unavailable" in err


def test_a_process_that_is_killed_fails_the_answer_if_that_is_asked_for(
    embedded_model: str,
) -> None:
    options = ("--prefill-listen", "127.0.0.1:0", "--prefill-chunk", "16", "--dtype", "bfloat16")
    prefill = Server(Path(embedded_model), *options)
    try:
        address = prefill.wait_log(lambda line: line["event"] == "prefill")["endpoint"]
        how = ("--prefill-remote", "always", "--on-peer-loss", "fail")
        started = generate("--prefill-from", address, *how, ids=LONG)
        prefill.wait_metrics(lambda m: m["quire:prefill_served_waiting"] == 1)
        prefill.process.kill()
        out, err = started.communicate(timeout=SECONDS)
    finally:
        prefill.process.kill()
        prefill.process.wait(SECONDS)
    assert started.returncode == 1 and out == b""
    assert b"a peer did not finish the prompt" in err and err.count(b"quire: error: ") == 1


def test_another_model_is_refused_with_the_field_and_both_values(
    start: Start, roomy: TinyModel, embedded_model: str, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path}/prefill.sock"
    with quire.Engine(roomy.directory, threads=1) as engine:
        alone = engine.generate(IDS, max_tokens=4, greedy=True)
    first = start(roomy.directory, listen)
    with engine_from(roomy, listen) as engine:
        await_connected(engine)
        assert engine.generate(IDS, max_tokens=4, greedy=True).usage.remote_tokens > 0
        first.kill()
        second = start(embedded_model, listen)
        # The process of before connects again by itself, and is refused.
        line = second.refusal()
        assert re.fullmatch(
            r"quire: refused: .*the two sides hold other KV: \w+: .+ here, .+ there\n", line
        ), line
        result = engine.generate(IDS[1:], max_tokens=4, greedy=True)
        assert result.usage.remote_tokens == 0
        assert engine.generate(IDS, max_tokens=4, greedy=True).ids == alone.ids
        (peer,) = engine.prefill_peers()
        assert not peer.connected and peer.address == listen
    # A new one does not begin.
    words = ["generate", str(roomy.directory), "--prompt-ids", "3,4", "--prefill-from", listen]
    refused = process(*words, "--threads", "1")
    out, err = refused.communicate(timeout=SECONDS)
    assert refused.returncode == 1 and out == b""
    text = err.decode().splitlines()[-1]
    assert re.search(r"^quire: error: .*the two sides hold other KV: \w+: .+ here, .+ there$", text)
    # Both were refused for one cause, which is told once; the 10th time is not reached at once.
    code, rest = second.terminate()
    assert code == 0 and line.encode() not in rest


def test_a_server_answers_with_the_prompts_of_another_process(
    start: Start, embedded_model: str
) -> None:
    prefill = start(embedded_model, "127.0.0.1:0", "--dtype", "float32")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Count from one to ten. " * 12}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answers = []
    for options in ((), ("--prefill-from", prefill.address, "--prefill-remote", "always")):
        server = Server(Path(embedded_model), *options)
        try:
            answers.append(server.post("/v1/chat/completions", body))
            metrics = server.metrics()
        finally:
            assert server.stop() == 0
    alone, found = answers
    assert found["choices"] == alone["choices"]
    details = found["usage"]["prompt_tokens_details"]
    assert details["remote_tokens"] == found["usage"]["prompt_tokens"] - 1
    assert alone["usage"]["prompt_tokens_details"]["remote_tokens"] == 0
    tokens = f'quire:prefill_peer_tokens_total{{peer="{prefill.address}"}}'
    assert metrics[tokens] == details["remote_tokens"]
    assert metrics[tokens.replace("tokens", "bytes")] > 0
    assert metrics["quire:num_requests_remote"] == metrics["quire:prefill_staging_bytes"] == 0


# ---- Engines, with a process of `quire prefill`


def test_several_requests_at_once_and_samples_of_one(start: Start, roomy: TinyModel) -> None:
    prompts = [IDS[i : i + 150 + 20 * i] for i in range(6)]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.8, "seed": 5, "n": 2}
    with quire.Engine(roomy.directory, threads=1) as engine:
        alone = engine.generate(prompts, **options)
    prefill = start(roomy.directory)
    with engine_from(roomy, prefill.address, staging_bytes=10_000, prefill_streams=3) as engine:
        await_connected(engine)
        found = engine.generate(prompts, **options)
        assert all(map(same_answers, found, alone))
        stats = engine.stats()
        assert stats["staging_bytes"] == 0
        assert 0 < stats["staging_bytes_largest"] <= 10_000 < stats["remote_bytes"]
        assert stats["remote_tokens"] == sum(result.usage.remote_tokens for result in found) > 0
        (peer,) = engine.prefill_peers()
        assert peer.connected and peer.error == "" and peer.losses == 0 and peer.streams == 3
        assert peer.tokens == stats["remote_tokens"] and peer.bytes == stats["remote_bytes"] > 0
        assert stats["remote_waiting"] == stats["remote_losses"] == 0


def asking_its_peer(engine: quire.Engine) -> tuple[threading.Thread, list[quire.Result]]:
    """A thread that asks for LONG, whose prompt the peer has in work, and where its answer will be.
    The model has to be the embedded one: a tiny model ends the prompt before this can look."""
    found: list[quire.Result] = []
    await_connected(engine)
    asking = threading.Thread(
        target=lambda: found.append(engine.generate(LONG, max_tokens=6, greedy=True))
    )
    asking.start()
    end = time.monotonic() + SECONDS
    while engine.prefill_peers()[0].queued_tokens == 0:
        assert time.monotonic() < end and asking.is_alive(), "it was too fast"
    return asking, found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_ends_finishes_the_prompts_in_work(
    start: Start, embedded_model: str, number: signal.Signals
) -> None:
    with quire.Engine(embedded_model, threads=1) as engine:
        alone = engine.generate(LONG, max_tokens=6, greedy=True)
    how = ("--prefill-chunk", "16", "--drain-timeout", "600")
    prefill = start(embedded_model, "127.0.0.1:0", *how)
    with engine_from(embedded_model, prefill.address) as engine:
        asking, found = asking_its_peer(engine)
        code, rest = prefill.terminate(number)
        assert code == 0 and b"not finished" not in rest
        asking.join(SECONDS)
        assert same_answers(found[0], alone) and found[0].usage.remote_tokens == len(LONG) - 1
        stats = engine.stats()
        assert stats["remote_losses"] == 0 and stats["remote_tokens"] == len(LONG) - 1


def test_a_server_that_computes_for_others_finishes_their_prompts(embedded_model: str) -> None:
    listen = ("--prefill-listen", "127.0.0.1:0", "--prefill-chunk", "16")
    with running(Path(embedded_model), *listen, "--drain-timeout", "600") as server:
        address = server.wait_log(lambda line: line["event"] == "prefill")["endpoint"]
        with engine_from(embedded_model, address, dtype="float32") as engine:
            asking, found = asking_its_peer(engine)
            assert server.stop() == 0
            asking.join(SECONDS)
            assert found[0].usage.remote_tokens == len(LONG) - 1
            assert engine.stats()["remote_losses"] == 0


def test_a_server_whose_prompt_does_not_come_ends_in_its_time(
    start: Start, embedded_model: str
) -> None:
    prefill = start(embedded_model, "127.0.0.1:0", "--dtype", "float32")
    how = ("--prefill-remote", "always", "--peer-dead-after", "600", "--drain-timeout", "0.5")
    with running(Path(embedded_model), "--prefill-from", prefill.address, *how) as server:
        prefill.process.send_signal(signal.SIGSTOP)
        told: list[int] = []
        body = {"model": "tiny", "prompt": "Count from one to ten. " * 12, "max_tokens": 8}
        asking = threading.Thread(
            target=lambda: told.append(server.request("POST", "/v1/completions", body)[0])
        )
        asking.start()
        server.wait_metrics(lambda m: m["quire:num_requests_remote"] == 1)
        assert server.stop() == 0
        asking.join(SECONDS)
        assert told == [503]


def test_a_process_that_stands_still_is_left_behind(start: Start, roomy: TinyModel) -> None:
    with quire.Engine(roomy.directory, threads=1) as engine:
        alone = engine.generate(IDS, max_tokens=6, greedy=True)
    prefill = start(roomy.directory)
    with engine_from(roomy, prefill.address, peer_dead_after=4.0) as engine:
        await_connected(engine)
        prefill.process.send_signal(signal.SIGSTOP)
        found = engine.generate(IDS, max_tokens=6, greedy=True)
        assert same_answers(found, alone) and found.usage.remote_tokens == 0
        stats = engine.stats()
        assert stats["remote_losses"] == 1 and stats["remote_timeouts"] == 0
        (peer,) = engine.prefill_peers()
        assert peer.losses == 1 and not peer.connected
        # Some seconds later the error is that of connecting again.
        assert "sign of life" in peer.error or "connect_timeout" in peer.error


def test_a_prompt_has_a_deadline(start: Start, roomy: TinyModel) -> None:
    prefill = start(roomy.directory)
    with engine_from(
        roomy, prefill.address, on_peer_loss="fail", prefill_timeout=0.2
    ) as engine:
        await_connected(engine)
        prefill.process.send_signal(signal.SIGSTOP)
        with pytest.raises(quire.QuireError, match="0 of 399 tokens came within 200 ms"):
            engine.generate(IDS, max_tokens=6, greedy=True)
        stats = engine.stats()
        assert stats["remote_timeouts"] == stats["remote_losses"] == 1
        prefill.process.send_signal(signal.SIGCONT)


def test_a_process_of_another_secret_is_refused(
    start: Start, roomy: TinyModel, secret: str, tmp_path: Path
) -> None:
    prefill = start(roomy.directory, "127.0.0.1:0", "--peer-secret-file", secret)
    other = tmp_path / "other"
    other.write_bytes(SECRET[::-1])
    with engine_from(roomy, prefill.address, peer_secret_file=other) as engine:
        prefill.await_refusal("secret")
        assert engine.generate(IDS, max_tokens=2).usage.remote_tokens == 0
        (peer,) = engine.prefill_peers()
        assert not peer.connected and "secret" in peer.error
    with engine_from(roomy, prefill.address, peer_secret_file=secret) as engine:
        await_connected(engine)
        salted = engine.generate(IDS, max_tokens=2, cache_salt="ann")
        assert salted.usage.remote_tokens > 0


def test_a_process_of_another_authority_is_refused(
    start: Start, roomy: TinyModel, certificates: Certificates, tmp_path: Path
) -> None:
    own = certificates.client
    flags = tls_flags(certificates, certificates.server)
    prefill = start(roomy.directory, "127.0.0.1:0", *flags)
    whole = {
        "peer_tls_ca_file": certificates.ca,
        "peer_tls_cert_file": own,
        "peer_tls_key_file": certificates.key_of(own),
    }
    other = Certificates(tmp_path)
    theirs = {"peer_tls_cert_file": other.client, "peer_tls_key_file": other.key_of(other.client)}
    for wrong, refusal in (
        ({"peer_tls_ca_file": other.ca}, "the client says: "),
        ({"peer_tls_server_name": "example"}, "the client says: "),
        (theirs, "the client's certificate is refused: "),
    ):
        with engine_from(roomy, prefill.address, **(whole | wrong)) as engine:
            prefill.await_refusal(refusal)
            assert engine.generate(IDS, max_tokens=2).usage.remote_tokens == 0
            (peer,) = engine.prefill_peers()
            assert not peer.connected and "TLS: " in peer.error
    with engine_from(roomy, prefill.address, **whole) as engine:
        await_connected(engine)
        salted = engine.generate(IDS, max_tokens=2, cache_salt="ann")
        assert salted.usage.remote_tokens > 0


def test_a_secret_is_read_once(tmp_path: Path) -> None:
    """What was checked is what is used; a pipe can be read once."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    checked = _ranges.secret_file(str(path))
    path.write_bytes(b"short")
    options = {
        **_options.of_part("connection", _options.whole_engine({})),
        "peer_secret_file": checked,
    }
    assert _prefill.connection_fields(options)["secret"] == SECRET
    assert checked == str(path) and SECRET.decode() not in repr(checked)
    with pytest.raises(quire.BadArgumentError, match="at least 16"):
        _prefill.connection_fields(options | {"peer_secret_file": path})


def test_a_cause_of_refusals_is_told_once_and_then_counted() -> None:
    told: list[str] = []
    tell = _prefill.OncePerCause(told.append)
    for _ in range(1000):
        tell("another model")
    tell("another tokenizer")
    assert told == [
        "another model",
        *[f"another model ({count} times)" for count in (10, 100, 1000)],
        "another tokenizer",
    ]


def test_strangers_with_a_new_cause_each_time_fill_no_log() -> None:
    told: list[str] = []
    now = 0.0
    tell = _prefill.OncePerCause(told.append, lambda: now)
    # The causes that are kept are limited, too: what came last stays.
    for number in range(300):
        tell(str(number))
    assert told == [str(number) for number in range(60)]
    told.clear()
    now = 59.9
    tell("another model")
    now = 60.0
    tell("299")
    assert told == []
    tell("0")
    tell("another tokenizer")
    assert told == ["0 (241 others were not told)", "another tokenizer"]


def test_one_process_computes_for_others_and_has_others_compute(
    start: Start, roomy: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    prefill = start(roomy.directory)
    with quire.Engine(roomy.directory, threads=1) as engine:
        alone = engine.generate([IDS, IDS[5:]], max_tokens=4, greedy=True)
    refused: list[str] = []
    told = threading.Event()

    def note(why: str) -> None:
        refused.append(why)
        told.set()
        raise SystemExit  # which ended the thread, and with it the counts

    with engine_from(roomy, prefill.address) as both:
        await_connected(both)
        endpoint = both.serve_prefill(on_refused=note)
        with pytest.raises(quire.BadStateError):
            both.serve_prefill()
        with engine_from(roomy, endpoint) as decode:
            await_connected(decode)
            theirs = decode.generate(IDS, max_tokens=4, greedy=True)
            mine = both.generate(IDS[5:], max_tokens=4, greedy=True)
        assert same_answers(theirs, alone[0]) and same_answers(mine, alone[1])
        assert theirs.usage.remote_tokens == len(IDS) - 1
        assert mine.usage.remote_tokens > 0
        stats = both.stats()
        assert stats["served_prompts"] == 1 and stats["served_tokens"] == len(IDS) - 1
        assert both.prefill_refusals() == {}
        with pytest.raises(quire.IncompatibleError, match="dtype: .* here, .* there"):
            engine_from(roomy, endpoint, kv_dtype="int8")
        assert told.wait(SECONDS)
        assert len(refused) == 1 and "dtype: " in refused[0]
        assert both.prefill_refusals() == {"dtype": 1}
        told.clear()
        with pytest.raises(quire.IncompatibleError):
            engine_from(roomy, endpoint, kv_dtype="int8")
        assert told.wait(SECONDS) and both.prefill_refusals() == {"dtype": 2}
    with pytest.raises(quire.ClosedError):
        both.prefill_peers()


def test_auto_computes_short_prompts_here(start: Start, roomy: TinyModel) -> None:
    prefill = start(roomy.directory)
    with engine_from(roomy, prefill.address, prefill_remote="auto") as engine:
        assert engine.generate(IDS[:3], max_tokens=2).usage.remote_tokens == 0
    with engine_from(roomy, prefill.address, prefill_remote="never") as engine:
        assert engine.generate(IDS, max_tokens=2).usage.remote_tokens == 0
        await_connected(engine)


# ---- What is refused before anything begins


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prefill"], "--listen says where"),
        (["prefill", "--listen", "0.0.0.0:0"], "--peer-secret-file FILE"),
        (["prefill", "--listen", "7000"], "no address"),
        (["prefill", "--listen", "unix:"], "unix:PATH"),
        (["prefill", "--listen", "ucx:7000"], "no address"),
        (["prefill", "--listen", "ucx:0.0.0.0:0"], "the same content on both sides\n"),
        (
            ["prefill", "--listen", "ucx:127.0.0.1:0", "--peer-tls-cert-file", "SHORT"],
            "there is no TLS over UCX",
        ),
        (["prefill", "--listen", "127.0.0.1:0", "--peer-secret-file", "SHORT"], "at least 16"),
        (["serve", "--prefill-listen", "192.0.2.1:7000"], "--peer-secret-file FILE"),
        (["prefill", "--listen", "0.0.0.0:0"], "or TLS with --peer-tls-ca-file, "),
        (["prefill", "--listen", "0.0.0.0:0", "--peer-tls-cert-file", "/no/such"], "No such file"),
        (
            ["prefill", "--listen", "0.0.0.0:0", "--peer-tls-cert-file", "SHORT"],
            "go together, and --peer-tls-ca-file is not given",
        ),
        (
            ["prefill", "--listen", "127.0.0.1:0", "--peer-tls-server-name", "example"],
            "--peer-tls-server-name is 'example', and --peer-tls-ca-file, ",
        ),
        (["generate", "x", "--peer-tls-ca-file", "SHORT"], "no effect without --prefill-from"),
        (["generate", "x", "--prefill-from", "a:1,,b:2"], "no address"),
        (["generate", "x", "--prefill-remote", "always"], "no effect without --prefill-from"),
        (["generate", "x", "--on-peer-loss", "fail"], "no effect without --prefill-from"),
        (["generate", "x", "--prefill-streams", "2"], "no effect without --prefill-from"),
        (["generate", "x", "--prefill-from", "a:1", "--prefill-streams", "17"], "from 1 to 16"),
        (["chat", "--peer-dead-after", "2"], "no effect without --prefill-from"),
        (["serve", "--peer-dead-after", "2"], "without --prefill-from or --prefill-listen"),
        (["generate", "x", "--prefill-from", "a:1", "--peer-dead-after", "0.5"], "at least 1"),
    ],
)
def test_options_are_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], expected: str
) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    code, out, err = run(capsys, *[str(short) if word == "SHORT" else word for word in words])
    assert code == 2 and out == "" and expected in err and err.count("\n") == 1, err


def test_options_of_engines_are_checked(roomy: TinyModel, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"too short")
    for options, expected in (
        ({"prefill_from": ["a:1", "a:1"]}, "given twice"),
        ({"prefill_from": [f"a:{i}" for i in range(1, 66)]}, "65 addresses"),
        ({"prefill_from": ["127.0.0.1:1"], "prefill_remote": "sometimes"}, "sometimes"),
        ({"prefill_from": ["127.0.0.1:1"], "on_peer_loss": "ignore"}, "ignore"),
        ({"prefill_from": ["192.0.2.1:7000"]}, "secret"),
        ({"prefill_from": ["127.0.0.1:1"], "staging_bytes": 3}, "staging_bytes is 3"),
        ({"prefill_from": ["127.0.0.1:1"], "prefill_streams": 17}, "prefill_streams is 17"),
        ({"prefill_from": ["127.0.0.1:1"], "prefill_streams": 0}, "prefill_streams is 0"),
        ({"peer_secret_file": short}, "at least 16"),
        ({"peer_dead_after": 0.1}, "peer_dead_after"),
        ({"peer_tls_ca_file": short, "peer_tls_key_file": short}, "peer_tls_cert_file is not"),
        (
            {f"peer_tls_{name}_file": short for name in ("ca", "cert", "key")}
            | {"prefill_from": "127.0.0.1:1"},
            "tls_ca_file .*short. is of no use",
        ),
    ):
        with pytest.raises(quire.BadArgumentError, match=expected):
            quire.Engine(roomy.directory, threads=1, **options)  # type: ignore[arg-type]
    # A process that is not there hid it.
    for addresses in ("127.0.0.1:1, 127.0.0.1:2", "127.0.0.1:1,"):
        with pytest.raises(quire.BadArgumentError, match='endpoint "'):
            quire.Engine(roomy.directory, threads=1, prefill_from=addresses)
    with quire.Engine(roomy.directory, threads=1, prefill_from="127.0.0.1:1") as engine:
        (peer,) = engine.prefill_peers()
        assert not peer.connected and peer.error and peer.streams == 0
        with pytest.raises(quire.BadArgumentError, match="secret"):
            engine.serve_prefill("0.0.0.0:0")
        assert engine.generate(IDS, max_tokens=1).usage.remote_tokens == 0
