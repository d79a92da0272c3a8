"""Buffers between processes: the tests of those within a process once more, then what only a remote
pair has to stand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_buffers
import torch
import wire_peer
from legacy_pipe import LegacyPipeAdapter
from test_buffers import ids, ones
from wire_peer import Peer

from quire import errors
from quire.buffers import BufferClosed, StoreUnavailable
from quire.remote_buffers import (
    LookupBufferServer,
    RemoteLookupBuffer,
    RemoteStoreBuffer,
    StoreBufferServer,
)


class LookupPair:
    """Producers on the server, consumers behind the socket."""

    def __init__(self, capacity: int, **options: Any) -> None:
        self.server = LookupBufferServer(capacity, **options)
        self.client = RemoteLookupBuffer(self.server.endpoint, connect_timeout=60)
        self.insert = self.server.insert
        self.insert_bundle = self.server.insert_bundle
        self.drop_select = self.client.drop_select
        self.drop_select_bundle = self.client.drop_select_bundle

    @property
    def buffer_size(self) -> int:
        return self.client.buffer_size

    @property
    def capacity(self) -> int:
        return self.client.capacity

    @property
    def waiting(self) -> int:
        return self.client.waiting

    def __len__(self) -> int:
        return len(self.client)

    def close(self) -> None:
        self.server.close()
        self.client.close()


class StorePair(RemoteStoreBuffer):
    def __init__(self, capacity: int, *, strict: bool = False) -> None:
        self.server = StoreBufferServer(capacity)
        super().__init__(self.server.endpoint, strict=strict, connect_timeout=60)


_LOOKUP_TESTS: list[Callable[[], None]] = [
    lambda: test_buffers.test_the_entry_comes_back_as_it_was("numpy"),
    lambda: test_buffers.test_the_entry_comes_back_as_it_was("torch"),
    test_buffers.test_matching_goes_both_ways_and_by_exact_ids,
    test_buffers.test_order_is_that_of_insertion_or_of_length,
    test_buffers.test_none_stands_for_anything,
    test_buffers.test_missing_tensors_come_back_as_none,
    test_buffers.test_bundles_have_names_of_their_own,
    test_buffers.test_a_consumer_waits_without_holding_python_up,
    test_buffers.test_limits_are_errors_by_name,
    test_buffers.test_closing_wakes_a_waiting_consumer,
]
_STORE_TESTS = [
    test_buffers.test_a_store_makes_strided_arrays_dense,
    test_buffers.test_a_store_replaces_and_deletes,
    test_buffers.test_a_full_store_drops_and_counts_unless_it_is_strict,
]


@pytest.mark.parametrize("test", _LOOKUP_TESTS + _STORE_TESTS)
def test_a_remote_pair_is_as_a_buffer_of_this_process(
    test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_buffers, "LookupBuffer", LookupPair)
    monkeypatch.setattr(test_buffers, "StoreBuffer", StorePair)
    test()


@pytest.mark.parametrize("dtype", test_buffers._TORCH_TYPES, ids=str)
def test_a_remote_store_gives_back_every_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_buffers, "StoreBuffer", StorePair)
    for shape in ((), (0, 3), (2, 0), (3, 4)):
        test_buffers.test_a_store_gives_back_every_bit(dtype, shape)


def test_each_side_has_its_role() -> None:
    server = LookupBufferServer(1000)
    client = RemoteLookupBuffer(server.endpoint)
    with pytest.raises(errors.WrongRoleError):
        client.insert(ids(1), ones(1), None, None, None)
    with pytest.raises(errors.WrongRoleError):
        server.drop_select(ids(1), ones(1))
    assert server.connections == 1


_CONSUMER = """
import sys
import numpy as np
from quire.remote_buffers import RemoteLookupBuffer
buffer = RemoteLookupBuffer(sys.argv[1], connect_timeout=60)
total = 0
for _ in range(int(sys.argv[2])):
    tokens, roi, key, value, hidden = buffer.drop_select(None, None, timeout=120)
    assert (key == tokens[0]).all() and value.dtype == np.float16 and hidden is None
    total += int(tokens[0])
print(total)
"""


def test_several_processes_share_the_entries() -> None:
    count, processes = 60, 3
    server = LookupBufferServer(300_000)
    consumers = [
        subprocess.Popen(
            [sys.executable, "-c", _CONSUMER, server.endpoint, str(count // processes)],
            stdout=subprocess.PIPE,
        )
        for _ in range(processes)
    ]
    for i in range(count):
        # More than the capacity in all: inserts wait for the consumers.
        key = np.full((8, 1000), i, np.float32)
        server.insert(ids(i, 1), ones(2), key, np.zeros(3, np.float16), None, timeout=120)
        assert server.buffer_size <= 300_000
    totals = [int(consumer.communicate(timeout=120)[0]) for consumer in consumers]
    assert sum(totals) == sum(range(count))
    assert (server.buffer_size, len(server)) == (0, 0)


# It gives signs of life until it is killed.
_HALF_CONSUMER = """
import itertools, select, sys
sys.path.insert(0, sys.argv[2])
from wire_peer import PING, TAKE, Peer
peer = Peer(sys.argv[1])
peer.hello(1)
peer.send(TAKE, 1, (-1).to_bytes(8, "little", signed=True))
peer.read_bytes(int(sys.argv[3]))
print("in the middle", flush=True)
for number in itertools.count(2):
    if select.select([sys.stdin], [], [], 0.5)[0]:
        break
    peer.send(PING, number)
"""


@pytest.mark.parametrize("read", [0, 100, 1 << 20], ids=["request", "header", "frame"])
def test_an_entry_goes_back_when_its_consumer_is_killed(read: int) -> None:
    server = LookupBufferServer(1 << 24)
    key = np.arange(3 << 20, dtype=np.uint8)
    server.insert(ids(1, 2), ones(2), key, None, None)
    server.insert(ids(1, 3), ones(2), None, None, None)
    used = server.buffer_size
    folder = str(Path(wire_peer.__file__).parent)
    consumer = subprocess.Popen(
        [sys.executable, "-c", _HALF_CONSUMER, server.endpoint, folder, str(read)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"in the middle\n"
    while len(server) != 1:
        pass
    assert server.buffer_size == used, "the bytes count until somebody has them"
    os.kill(consumer.pid, signal.SIGKILL)
    consumer.communicate()
    other = RemoteLookupBuffer(server.endpoint)
    while len(server) != 2:
        pass
    found = other.drop_select(ids(1), None, timeout=60)
    assert found[0].tolist() == [1, 2], "at its old place"
    assert (found[2] == key).all()


def test_malformed_requests_are_answered_and_the_next_one_works() -> None:
    server = LookupBufferServer(1000)
    server.insert(ids(7), ones(1), None, None, None)
    peer = Peer(server.endpoint)
    hello = peer.hello(1)
    assert (hello.status, hello.flags, len(hello.fields)) == (0, wire_peer.REPLY, 64)
    for opcode, fields, parts in (
        (99, b"", {}),
        (wire_peer.TAKE, b"abc", {}),
        (wire_peer.GET, b"no store is here", {}),
        (
            wire_peer.TAKE,
            bytes(8),
            {
                "headers": wire_peer.tensor_header("tokens", 0, 64, (1 << 40, 1 << 40)),
                "tensors": 1,
            },
        ),
    ):
        peer.send(opcode, 5, fields, **parts)
        answer = peer.read()
        assert (answer.request, answer.status) == (5, wire_peer.REMOTE)
        assert b"malformed" in answer.fields
    peer.send(wire_peer.TAKE, 6, struct.pack("<q", 0))
    found = peer.read()
    assert (found.status, found.tensors, found.data) == (0, 2, struct.pack("<q?", 7, True))
    peer.send(wire_peer.ACKNOWLEDGE, 6)
    assert peer.read().status == 0
    assert server.buffer_size == 0
    peer.socket.sendall(b"GET / HTTP/1.1\r\n" + bytes(64))
    goodbye = peer.read()
    assert (goodbye.opcode, goodbye.status) == (wire_peer.GOODBYE, wire_peer.REMOTE) or (
        goodbye.opcode == wire_peer.GOODBYE and b"QWIR" in goodbye.fields
    )
    client = RemoteLookupBuffer(server.endpoint)
    assert client.drop_select(ids(1), None, block=False) == [None] * 5


def test_the_client_says_what_the_server_said_and_goes_on() -> None:
    server = LookupBufferServer(1000)
    client = RemoteLookupBuffer(server.endpoint)
    with pytest.raises(ValueError, match="roi has 2 elements"):
        client.drop_select(ids(1), ones(2))
    server.insert(ids(3), ones(1), None, None, None)
    assert client.drop_select(np.array([3], np.int32), None)[0].tolist() == [3]


def test_a_dead_server_is_an_error_and_a_new_one_is_found(tmp_path: Path) -> None:
    bind = f"unix:{tmp_path}/buffer"
    program = (
        "import sys; from quire.remote_buffers import LookupBufferServer as S; import time\n"
        "server = S(1000, bind=sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, bind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    client = RemoteLookupBuffer(bind)
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            client.drop_select(ids(1), None)
        except StoreUnavailable as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    while client.waiting == 0:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    consumer.join()
    assert len(raised) == 1
    with pytest.raises(StoreUnavailable):
        client.drop_select(ids(1), None, block=False)
    server = LookupBufferServer(1000, bind=bind)  # over the file that the killed one left
    server.insert(ids(1), ones(1), None, None, None)
    assert client.drop_select(ids(1), None, timeout=120)[0].tolist() == [1]


def test_a_store_takes_an_outage_for_a_miss() -> None:
    server = StoreBufferServer(1000)
    server.put("k", ids(1))
    client = RemoteStoreBuffer(server.endpoint)
    strict = RemoteStoreBuffer(server.endpoint, strict=True)
    assert client.get("k").tolist() == [1]  # type: ignore[union-attr]
    client.put("other", ids(2))
    assert server.get("other").tolist() == [2]  # type: ignore[union-attr]
    endpoint = server.endpoint
    server.close()
    # What the server still said is Closed; then there is nobody.
    for call in (lambda: strict.get("k"), lambda: strict.get("k")):
        with pytest.raises((StoreUnavailable, BufferClosed)):
            call()
    while True:
        try:
            if client.get("k") is None:
                break
        except BufferClosed:
            pass
    client.put("k", ids(1))
    assert (client.dropped, client.exists("k"), client.prefix_hits(["k"])) == (1, False, 0)
    with pytest.raises(StoreUnavailable):
        RemoteStoreBuffer(endpoint)


def test_a_secret_is_needed_beyond_this_machine_and_checked() -> None:
    with pytest.raises(errors.BadArgumentError, match="secret"):
        LookupBufferServer(1000, bind="0.0.0.0:0")
    server = LookupBufferServer(1000, bind="0.0.0.0:0", secret="abc")
    endpoint = "127.0.0.1:" + server.endpoint.rsplit(":", 1)[1]
    for secret in ("", "abd"):
        with pytest.raises(errors.RemoteError, match="secret"):
            RemoteLookupBuffer(endpoint, secret=secret)
    client = RemoteLookupBuffer(endpoint, secret="abc")
    server.insert(ids(1), ones(1), None, None, None)
    assert client.drop_select(ids(1), None)[0].tolist() == [1]
    without = LookupBufferServer(1000)
    with pytest.raises(errors.RemoteError, match="asks for none"):
        RemoteLookupBuffer(without.endpoint, secret="abc")
    peer = Peer(endpoint)
    assert peer.hello(1).status == 0
    peer.send(wire_peer.TAKE, 1, bytes(8))
    assert peer.read().opcode == wire_peer.GOODBYE


@pytest.mark.parametrize(
    "endpoint", ["", "nowhere", "localhost:x", "localhost:70000", "example.org:1", "unix:"]
)
def test_endpoints_are_checked(endpoint: str) -> None:
    with pytest.raises(errors.BadArgumentError, match="endpoint"):
        RemoteLookupBuffer(endpoint)


@pytest.mark.parametrize("buffer", [RemoteLookupBuffer, RemoteStoreBuffer])
def test_other_threads_run_while_a_buffer_connects(buffer: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Says no word, and ends each connection: while this process waits, only a thread of Python
        # can do that.
        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        stranger = threading.Thread(target=turn_away)
        stranger.start()
        with pytest.raises(errors.UnavailableError, match="closed|reset"):
            buffer("127.0.0.1:%d" % server.getsockname()[1], connect_timeout=60)
        server.shutdown(socket.SHUT_RDWR)
        stranger.join()


def test_the_pipes_of_the_original_carry_what_they_did() -> None:
    pair = LookupPair(1000)
    key, value = np.full((5, 6), 2, np.float32), np.full((5, 6), 3, np.float32)
    pair.insert(ids(1, 2, 3), ones(3), key, value, ids(1))
    adapter = LegacyPipeAdapter(pair)
    producer = threading.Thread(target=adapter.serve)
    producer.start()
    found = adapter.drop_select(ids(1, 2, 3), ones(3))
    adapter.end()
    producer.join()
    assert adapter.signal.transcript == ["i64[1]"]
    assert adapter.query.transcript == ["i64[3]", "f32[3]"]
    assert adapter.reply.transcript == ["i64[3]", "f32[3]", "f32[5,6]", "f32[5,6]", "i64[1]"]
    assert [array.tolist() for array in found[:2]] == [[1, 2, 3], [True] * 3]
