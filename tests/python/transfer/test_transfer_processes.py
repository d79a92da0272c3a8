"""quire.TransferPeer: tokens that a cache of one process computes go on in a cache of another one.

Run as a program, this file is the other process: it makes a cache, connects or listens, and does
what it reads, one line a command.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
from program import Certificates, same_imports, use_ucx
from quire import KVCache, LayerSpec, TransferListener, TransferPeer, _ffi
from test_transfer import LAYERS, extend, make_cache

SECONDS = 60.0  # for what must come; nothing waits so long
PROMPT = list(range(1000, 1040))


class OtherProcess:
    """This file as a program. It ends with the test."""

    def __init__(self, role: str, endpoint: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, role, endpoint, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=same_imports(),
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., OtherProcess]]:
    started: list[OtherProcess] = []

    def start_one(*arguments: str) -> OtherProcess:
        started.append(OtherProcess(*arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


@pytest.fixture(params=["tcp", "unix", "ucx"])
def bind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    if request.param == "ucx":
        use_ucx(monkeypatch)
        return "ucx:127.0.0.1:0"
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/transfer.sock"


def connect(endpoint: str, cache: KVCache, **options: Any) -> TransferPeer:
    patient = {"connect_timeout": SECONDS, "dead_after": SECONDS, **options}
    return TransferPeer.connect(endpoint, cache, model="test", secret="a secret", **patient)


def listen(bind: str, cache: KVCache) -> TransferListener:
    return TransferListener(bind, cache, model="test", secret="a secret", dead_after=SECONDS)


def same_outputs(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_prompt_of_another_process_goes_on_here_bit_for_bit(
    start: Callable[..., OtherProcess], bind: str
) -> None:
    prefill = start("prefill", bind, "5")
    cache, alone = make_cache(16), make_cache(16)
    with connect(prefill.read(), cache) as peer:
        cache.receive_from(peer)
        receive = cache.disagg_prepare_recv(0, len(PROMPT))
        peer.request(receive, PROMPT, job=3, timeout=SECONDS)
        assert prefill.do("take") == [3, PROMPT]
        prefill.do("forward", 0, 25)
        cache.wait_received(receive.epoch, 25, timeout=SECONDS)
        with pytest.raises(quire.BadStateError):
            cache.disagg_commit_recv(receive.epoch, 40)
        prefill.do("forward", 25, 15)
        cache.wait_received(receive.epoch, 40, timeout=SECONDS)
        cache.disagg_commit_recv(receive.epoch, 40)
        extend(alone, 0, 40)
        assert same_outputs(extend(cache, 40, 3), extend(alone, 40, 3))
        stats = peer.stats()
        assert stats["bytes_received"] == prefill.do("stats")["bytes_sent"] > 0
        cache.check_invariants()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls_of(certificates: Certificates, own: Path) -> dict[str, Path]:
    return {
        "tls_ca_file": certificates.ca,
        "tls_cert_file": own,
        "tls_key_file": certificates.key_of(own),
    }


def test_a_prompt_comes_through_tls_bit_for_bit(
    start: Callable[..., OtherProcess], certificates: Certificates, tmp_path: Path
) -> None:
    """Certificates stand for the secret: a salt may travel. Others are refused by either side."""
    server, own = certificates.server, tls_of(certificates, certificates.client)
    files = (certificates.ca, server, certificates.key_of(server))
    prefill = start("prefill", "127.0.0.1:0", "5", *map(str, files))
    endpoint = prefill.read()
    cache, alone = make_cache(16), make_cache(16)
    others = Certificates(tmp_path)
    for wrong, why in (
        (own | {"tls_ca_file": others.ca}, "certificate is refused.*tls_ca_file"),
        (own | {"tls_server_name": "example"}, "not example's.*tls_server_name"),
        (tls_of(certificates, others.client), "the server says: "),
        ({}, None),
    ):
        with pytest.raises(quire.UnavailableError, match=why):
            TransferPeer.connect(endpoint, cache, model="test", connect_timeout=SECONDS, **wrong)
    patient = {"connect_timeout": SECONDS, "dead_after": SECONDS, "streams": 3}
    with TransferPeer.connect(endpoint, cache, model="test", **patient, **own) as peer:
        assert peer.stats()["streams"] == 3
        cache.receive_from(peer)
        receive = cache.disagg_prepare_recv(0, len(PROMPT))
        peer.request(receive, PROMPT, job=3, cache_salt="of ann", timeout=SECONDS)
        assert prefill.do("take") == [3, PROMPT]
        prefill.do("forward", 0, 40)
        cache.wait_received(receive.epoch, 40, timeout=SECONDS)
        cache.disagg_commit_recv(receive.epoch, 40)
        extend(alone, 0, 40)
        assert same_outputs(extend(cache, 40, 3), extend(alone, 40, 3))
        prefill.kill()
        with pytest.raises(quire.UnavailableError):
            peer.next_request(SECONDS)


def test_tls_needs_all_of_its_files(certificates: Certificates) -> None:
    cache = make_cache(16)
    whole = tls_of(certificates, certificates.server)
    for name in whole:
        for wrong, why in (("", f"{name} is empty"), ("/no/such/file", f"{name} .*/no/such/file")):
            options = whole | {name: Path(wrong) if wrong else ""}
            with pytest.raises(quire.BadArgumentError, match=why):
                TransferListener("0.0.0.0:0", cache, **options)
            with pytest.raises(quire.BadArgumentError, match=why):
                TransferPeer.connect("127.0.0.1:1", cache, **options)
    with TransferListener("0.0.0.0:0", cache, **whole):
        pass


def test_a_killed_prefill_process_leaves_the_cache_as_it_was(
    start: Callable[..., OtherProcess], bind: str
) -> None:
    prefill = start("prefill", bind, "16")
    cache, alone = make_cache(16), make_cache(16)
    for each in (cache, alone):
        extend(each, 0, 3)
    before, free = cache.state_digest(), cache.get_num_available_pages()
    with connect(prefill.read(), cache) as peer:
        cache.receive_from(peer)
        receive = cache.disagg_prepare_recv(0, 30)
        peer.request(receive, timeout=SECONDS)
        prefill.do("take")
        prefill.do("forward", 0, 10)
        prefill.kill()
        with pytest.raises(quire.UnavailableError):
            cache.wait_received(receive.epoch, 30, timeout=SECONDS)
        assert peer.failure
        with pytest.raises(quire.UnavailableError):
            peer.request(receive)
        cache.disagg_cancel_recv(receive.epoch)
    assert cache.state_digest() == before and cache.get_num_available_pages() == free
    assert same_outputs(extend(cache, 3, 40), extend(alone, 3, 40))


def test_a_killed_decode_process_ends_the_mark_and_no_forward(
    start: Callable[..., OtherProcess], bind: str
) -> None:
    cache, alone = make_cache(16), make_cache(16)
    with listen(bind, cache) as listener:
        decode = start("decode", listener.endpoint, "32")
        peer = listener.accept(SECONDS)
        cache.send_through(peer)
        request = peer.next_request(SECONDS)
        assert request.tokens == tuple(PROMPT) and request.job == 1
        assert request.seconds is not None and request.seconds <= SECONDS
        cache.disagg_mark_send(0, 0, request.map, peer=0)
        assert same_outputs(extend(cache, 0, 10), extend(alone, 0, 10))
        decode.kill()
        with pytest.raises(quire.UnavailableError):
            peer.next_request(SECONDS)
        assert same_outputs(extend(cache, 10, 30), extend(alone, 10, 30))
        assert "Unavailable" in cache.send_progress(0).failure
        assert cache.get_num_available_pages() == alone.get_num_available_pages()
        # Another one takes its place.
        cache.disagg_unmark_send(0)
        other = start("decode", listener.endpoint, "16")
        with listener.accept(SECONDS) as peer:
            cache.send_through(peer)
            cache.disagg_mark_send(0, 0, peer.next_request(SECONDS).map, peer=0)
            extend(cache, 40, 1)
            assert other.read() == "received"


def test_a_process_that_stands_still_is_taken_for_dead(start: Callable[..., OtherProcess]) -> None:
    prefill = start("prefill", "127.0.0.1:0", "16")
    cache = make_cache(16)
    with connect(prefill.read(), cache, heartbeat=0.05, dead_after=3.0) as peer:
        prefill.process.send_signal(signal.SIGSTOP)
        cache.receive_from(peer)
        receive = cache.disagg_prepare_recv(0, 30)
        with pytest.raises(quire.UnavailableError, match="sign of life"):
            peer.request(receive)  # unless this comes later than the end
            cache.wait_received(receive.epoch, 30, timeout=SECONDS)
        cache.disagg_cancel_recv(receive.epoch)


def pair(
    bind: str, sender: KVCache, receiver: KVCache, **options: Any
) -> tuple[TransferListener, TransferPeer, TransferPeer]:
    """Both ends in this process."""
    listener = listen(bind, sender)
    to = connect(listener.endpoint, receiver, **options)
    receiver.receive_from(to)
    of = listener.accept(SECONDS)
    sender.send_through(of)
    return listener, of, to


def test_cancel_and_refuse_and_deadlines_reach_the_other_side(bind: str) -> None:
    sender, receiver = make_cache(16), make_cache(16)
    listener, of, to = pair(bind, sender, receiver)
    with listener, of, to:
        receive = receiver.disagg_prepare_recv(0, 8)
        to.request(receive, job=1, tokens=[5], cache_salt="ann")
        request = of.next_request(SECONDS)
        assert request.salt == b"ann" and request.seconds is None
        of.refuse(request.map.epoch, "no room for job 1")
        with pytest.raises(quire.CancelledError, match="no room for job 1"):
            receiver.wait_received(receive.epoch, 8, timeout=SECONDS)
        receiver.disagg_cancel_recv(receive.epoch)

        receive = receiver.disagg_prepare_recv(0, 8)
        to.request(receive)
        sender.disagg_mark_send(0, 0, of.next_request(SECONDS).map, peer=0)
        to.cancel(receive.epoch)
        with pytest.raises(quire.NotFoundError):
            to.cancel(receive.epoch)
        receiver.disagg_cancel_recv(receive.epoch)
        # Another request is the proof that the cancel has come.
        receive = receiver.disagg_prepare_recv(0, 8)
        to.request(receive)
        of.next_request(SECONDS)
        extend(sender, 0, 2)
        assert "Cancelled" in sender.send_progress(0).failure
        to.cancel(receive.epoch)
        receiver.disagg_cancel_recv(receive.epoch)

        late = receiver.disagg_prepare_recv(0, 8)
        to.request(late, timeout=0.05)
        with pytest.raises(quire.TimeoutError, match="deadline"):
            receiver.wait_received(late.epoch, 8, timeout=SECONDS)
        receiver.disagg_cancel_recv(late.epoch)
        # The late one is given out until the sender has heard of its end, which comes before the
        # next request.
        receive = receiver.disagg_prepare_recv(0, 8)
        to.request(receive)
        while (epoch := of.next_request(SECONDS).map.epoch) != receive.epoch:
            assert epoch == late.epoch
        with pytest.raises(quire.TimeoutError):
            of.next_request(0)
        assert of.stats()["sends_open"] == 1


def test_an_aborted_forward_counts_for_nothing(bind: str) -> None:
    sender, receiver, alone = make_cache(16), make_cache(16), make_cache(16)
    listener, of, to = pair(bind, sender, receiver)
    with listener, of, to:
        receive = receiver.disagg_prepare_recv(0, 8)
        to.request(receive)
        sender.disagg_mark_send(0, 0, of.next_request(SECONDS).map, peer=0)
        sender.begin_forward([0], [5])
        wrong = np.full((5, 4 * 16 + 4 * 16), 7.0, np.float32)
        for layer in range(len(LAYERS)):
            out = np.zeros((5, 4, 16), np.float32)
            sender.attention_with_fused_qkv(layer, wrong, out)
        sender.abort_forward()
        extend(sender, 0, 8)
        receiver.wait_received(receive.epoch, 8, timeout=SECONDS)
        receiver.disagg_commit_recv(receive.epoch, 8)
        extend(alone, 0, 8)
        assert same_outputs(extend(receiver, 8, 3), extend(alone, 8, 3))


def test_more_rows_than_the_window_wait_for_it(bind: str) -> None:
    sender, receiver, alone = make_cache(16), make_cache(16), make_cache(16)
    listener, of, to = pair(bind, sender, receiver, window_bytes=9000)
    with listener, of, to:
        receive = receiver.disagg_prepare_recv(0, 200)
        to.request(receive)
        sender.disagg_mark_send(0, 0, of.next_request(SECONDS).map, peer=0)
        for begin in range(0, 200, 20):
            extend(sender, begin, 20)
        receiver.wait_received(receive.epoch, 200, timeout=SECONDS)
        receiver.disagg_commit_recv(receive.epoch, 200)
        extend(alone, 0, 200)
        assert same_outputs(extend(receiver, 200, 1), extend(alone, 200, 1))
        assert to.stats()["bytes_received"] > 9000


def head_cache(heads: int) -> KVCache:
    cache = KVCache(
        [LayerSpec(heads * 2, heads, 16)], max_num_sequences=2, token_capacity=64, rope="normal"
    )
    cache.add_sequence(0)
    return cache


def heads_forward(cache: KVCache, first_head: int, count: int) -> np.ndarray:
    """A forward of the key and value heads from `first_head` on, of 4."""
    spec = cache.layers[0]
    start = cache.get_sequence_length(0)
    rng = [np.random.default_rng(p) for p in range(start, start + count)]
    rows = np.stack([r.standard_normal((16, 16), dtype=np.float32) for r in rng])
    heads = slice(first_head, first_head + spec.num_kv_heads)
    q = rows[:, 2 * first_head : 2 * first_head + spec.num_qo_heads]
    qkv = np.concatenate([q, rows[:, 8:12][:, heads], rows[:, 12:16][:, heads]], axis=1)
    out = np.zeros((count, spec.num_qo_heads, 16), np.float32)
    with cache.forward([0], [count]):
        cache.attention_with_fused_qkv(0, qkv.reshape(count, -1).copy(), out)
    return out


def test_two_processes_of_half_the_heads_send_to_one(bind: str) -> None:
    receiver, alone = head_cache(4), head_cache(4)
    parts = [head_cache(2), head_cache(2)]
    with listen(bind, receiver) as listener:
        senders = [connect(listener.endpoint, part) for part in parts]
        peers = [listener.accept(SECONDS) for _ in parts]
        receive = receiver.disagg_prepare_recv(0, 6)
        for peer in peers:
            receiver.receive_from(peer)
            peer.request(receive)
        for rank, (part, sender) in enumerate(zip(parts, senders, strict=True)):
            channel = quire.RemoteChannel()
            channel.connect(7, sender)
            part.send_through(channel)
            part.disagg_mark_send(
                0, 0, sender.next_request(SECONDS).map, peer=7, rank=rank
            )
            heads_forward(part, 2 * rank, 6)
        receiver.wait_received(receive.epoch, 6, timeout=SECONDS)
        receiver.disagg_commit_recv(receive.epoch, 6)
        heads_forward(alone, 0, 6)
        assert np.array_equal(heads_forward(receiver, 0, 2), heads_forward(alone, 0, 2))
        for each in (*senders, *peers):
            each.close()


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("model", lambda: (make_cache(16), {"model": "another"})),
        ("tokenizer", lambda: (make_cache(16), {"tokenizer": "another"})),
        ("adapter", lambda: (make_cache(16), {"adapter": "another"})),
        ("dtype", lambda: (make_cache(16, [LayerSpec(4, 2, 16), LayerSpec(4, 2, 16)]), {})),
        (
            "head_dim",
            lambda: (make_cache(16, [LayerSpec(4, 2, 8), LayerSpec(4, 2, 8, dtype="int8")]), {}),
        ),
        (
            "rope",
            lambda: (KVCache(LAYERS, max_num_sequences=4, token_capacity=256, rope="inline"), {}),
        ),
    ],
)
def test_another_model_is_refused_with_the_field(field: str, make: Any) -> None:
    cache, identity = make()
    mine = make_cache(16)
    with TransferListener("127.0.0.1:0", mine, model="test") as listener:
        with pytest.raises(quire.IncompatibleError, match=f"{field}: .* here, .* there") as refused:
            TransferPeer.connect(
                listener.endpoint, cache, connect_timeout=SECONDS, **{"model": "test", **identity}
            )
        assert "\n" not in str(refused.value)
        with pytest.raises(quire.TimeoutError):
            listener.accept(0)
        # What differs in layout alone is no mismatch.
        other = make_cache(64)
        patient = {"model": "test", "connect_timeout": SECONDS}
        with TransferPeer.connect(listener.endpoint, other, **patient), listener.accept(SECONDS):
            end = time.monotonic() + SECONDS
            while listener.refused < 1 and time.monotonic() < end:
                pass  # the refused connection ends on a thread of its own
            assert listener.refused == 1 and f"{field}: " in listener.last_refusal


def test_secrets_addresses_and_options_are_checked() -> None:
    cache = make_cache(16)
    with pytest.raises(quire.BadArgumentError, match="secret is empty"):
        TransferListener("0.0.0.0:0", cache)
    with pytest.raises(quire.BadArgumentError, match="secret is empty"):
        TransferPeer.connect("192.0.2.1:7000", cache)
    with pytest.raises(quire.BadArgumentError, match="window_bytes"):
        TransferListener("127.0.0.1:0", cache, window_bytes=0)
    with pytest.raises(quire.BadArgumentError, match="lease"):
        TransferListener("127.0.0.1:0", cache, lease=0)
    with TransferListener("127.0.0.1:0", cache, secret="one") as listener:
        for secret in ("two", ""):
            with pytest.raises(quire.RemoteError, match="secret"):
                TransferPeer.connect(
                    listener.endpoint, cache, secret=secret, connect_timeout=SECONDS
                )
        endpoint = listener.endpoint
    with pytest.raises(quire.UnavailableError):
        TransferPeer.connect(endpoint, cache, secret="one")
    with pytest.raises(quire.ClosedError):
        listener.accept(0)


def test_without_the_library_of_ucx_its_addresses_are_refused(tmp_path: Path) -> None:
    (tmp_path / "libquire_ffi.so").symlink_to(_ffi.LIBRARY_PATH.resolve())
    code = (
        "import quire\n"
        "layers = [quire.LayerSpec(1, 1, 16)]\n"
        "cache = quire.KVCache(layers, max_num_sequences=1, token_capacity=16)\n"
        "quire.TransferListener('ucx:127.0.0.1:0', cache)\n"
    )
    environment = {**os.environ, "QUIRE_FFI_LIBRARY": str(tmp_path / "libquire_ffi.so")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    last = result.stderr.splitlines()[-1]
    assert "BadArgumentError: " in last and "libucx-dev" in last, result.stderr


def test_strangers_and_garbage_hold_up_nobody(bind: str, tmp_path: Path) -> None:
    cache, other = make_cache(16), make_cache(16)
    with listen(bind, cache) as listener:
        family = socket.AF_UNIX if bind.startswith("unix:") else socket.AF_INET
        address: Any = listener.endpoint.removeprefix("unix:").removeprefix("ucx:")
        if family == socket.AF_INET:
            address = ("127.0.0.1", int(address.rpartition(":")[2]))
        strangers = [socket.socket(family) for _ in range(3)]
        for i, stranger in enumerate(strangers):
            stranger.connect(address)
            if i > 0:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 40)
        with connect(listener.endpoint, other), listener.accept(SECONDS):
            pass
        for stranger in strangers:
            stranger.close()


def test_other_threads_run_while_a_peer_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Says no word, and ends the connection: while this process waits, only a thread of Python
        # can do that.
        stranger = threading.Thread(target=lambda: server.accept()[0].close())
        stranger.start()
        with pytest.raises(quire.UnavailableError, match="closed|reset"):
            connect("127.0.0.1:%d" % server.getsockname()[1], make_cache(1))
        stranger.join()


def test_a_peer_without_a_receiver_or_after_its_end_says_so(bind: str) -> None:
    sender, receiver = make_cache(16), make_cache(16)
    listener = listen(bind, sender)
    to = connect(listener.endpoint, receiver)
    of = listener.accept(SECONDS)
    receive = receiver.disagg_prepare_recv(0, 8)
    with pytest.raises(quire.BadStateError, match="no cache receives"):
        to.request(receive)
    receiver.receive_from(to)
    with pytest.raises(quire.BadStateError, match="one receiver"):
        make_cache(16).receive_from(to)
    with pytest.raises(quire.BadArgumentError, match="number of a job"):
        to.request(receive, [1, 2])
    to.request(receive)
    with pytest.raises(quire.BadStateError, match="requested already"):
        to.request(receive)
    # A receiving cache that is closed ends its transfers; the sender's mark learns of it.
    sender.send_through(of)
    sender.disagg_mark_send(0, 0, of.next_request(SECONDS).map, peer=0)
    receiver.close()
    to.close()
    with pytest.raises(quire.RemoteError, match="closed"):
        of.next_request(SECONDS)
    extend(sender, 0, 2)
    assert sender.send_progress(0).failure
    with pytest.raises(quire.ClosedError):
        to.stats()
    of.close()
    listener.close()


# ------------------------------------------------------------------------------ the other process


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def prefill_process(bind: str, page_size: str, *tls: str) -> None:
    """With TLS, of the three files, or with a secret."""
    cache = make_cache(int(page_size))
    names = ("tls_ca_file", "tls_cert_file", "tls_key_file") if tls else ("secret",)
    guard = dict(zip(names, tls or ("a secret",), strict=True))
    listener = TransferListener(bind, cache, model="test", dead_after=SECONDS, **guard)
    say(listener.endpoint)
    peer = listener.accept(SECONDS)
    cache.send_through(peer)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "take":
            request = peer.next_request(SECONDS)
            if request.map.first_position > 0:
                extend(cache, 0, request.map.first_position)
            cache.disagg_mark_send(0, request.map.first_position, request.map, peer=0)
            say([request.job, list(request.tokens)])
        elif command == "forward":
            extend(cache, *arguments)
            say("done")
        elif command == "stats":
            say(peer.stats())


def decode_process(endpoint: str, page_size: str) -> None:
    cache = make_cache(int(page_size))
    with connect(endpoint, cache) as peer:
        cache.receive_from(peer)
        receive = cache.disagg_prepare_recv(0, len(PROMPT) + 1)
        peer.request(receive, PROMPT, job=1, timeout=SECONDS)
        cache.wait_received(receive.epoch, len(PROMPT) + 1, timeout=SECONDS)
        cache.disagg_commit_recv(receive.epoch, len(PROMPT) + 1)
        say("received")



def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_that_a_peer_passes_are_closed(tmp_path: Path) -> None:
    """A message has room for a second one, which once stayed open."""
    with TransferListener(f"unix:{tmp_path}/peers", make_cache(16)) as listener:
        gc.collect()
        before = _open_files()
        for count in (1, 2, 2, 2):
            with socket.socket(socket.AF_UNIX) as peer, open(os.devnull) as file:
                peer.connect(f"{tmp_path}/peers")
                socket.send_fds(peer, [b"\1"], [file.fileno()] * count)
                with contextlib.suppress(ConnectionResetError):
                    while peer.recv(4096):
                        pass
        end = time.monotonic() + SECONDS
        while (listener.refused < 4 or _open_files() > before) and time.monotonic() < end:
            pass
        # What other tests left may be closed meanwhile.
        assert listener.refused == 4 and _open_files() <= before


_WITHOUT_FILES = """
import os, resource, socket, sys, time
import quire
from quire.remote_buffers import LookupBufferServer
from test_transfer import make_cache
servers = {
    "transfer": lambda: quire.TransferListener("127.0.0.1:0", make_cache(16)),
    "buffers": lambda: LookupBufferServer(1 << 16),
}
with servers[sys.argv[1]]() as server:
    port = int(server.endpoint.rpartition(":")[2])
    peer = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = []
    try:
        while True:
            files.append(open(os.devnull))
    except OSError:
        pass
    peer.connect(("127.0.0.1", port))
    begin = time.process_time()
    peer.settimeout(1)
    try:
        peer.recv(1)
    except TimeoutError:  # nobody has accepted it
        print(time.process_time() - begin)
"""


@pytest.mark.parametrize("server", ["transfer", "buffers"])
def test_a_server_without_files_left_waits(server: str) -> None:
    """It once asked again and again whether it can accept, on a whole core."""
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_FILES, server],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=same_imports(),
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 0.2  # of a second, which it once took whole


if __name__ == "__main__":
    roles = {"prefill": prefill_process, "decode": decode_process}
    roles[sys.argv[1]](*sys.argv[2:])
