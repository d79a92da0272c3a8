"""A transfer one of whose sides is lost at each of its stages. The receiver notices, keeps the rows
that came, computes the others, and goes on with the bits of a cache that was alone. The sender's
forwards go on, no page is held, and the next receiver gets all.

Run as a program, this file is the side that is lost: it makes a cache for each connection and does
what it reads, one line a command. Or it is the network between the two.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import quire
from program import same_imports
from quire import KVCache, TransferListener, TransferPeer
from test_transfer import LAYERS, extend, inputs, make_cache

SECONDS = 60.0  # for what must come; nothing waits so long
PROMPT, FIRST = 40, 25  # tokens, and those of the first forward

# What has been done when the sender is lost, and how many tokens are complete then.
STAGES = {
    "connected": 0,
    "requested": 0,
    "taken": 0,
    "marked": 0,
    "forward begun": 0,
    "first layer": 0,
    "all layers": 0,
    "first forward": FIRST,
    "layer of the second forward": FIRST,
    "second forward": PROMPT,
    "received": PROMPT,
    "committed": PROMPT,
}
FAULTS = ("killed", "stopped", "reset", "half closed")
# How many calls of the sender's two forwards (Forwards.CALLS) were made at a stage.
CALLS_MADE = dict(zip(STAGES, (0, 0, 0, 0, 1, 2, 3, 4, 6, 8, 8, 8), strict=True))


class Program:
    """This file as a program, in a role."""

    def __init__(self, *role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=same_imports(),
        )
        self.endpoint = str(self.read())

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def do(self, *command: Any) -> Any:
        self.tell(*command)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Forwards:
    """The prompt of a cache in two forwards, call by call."""

    CALLS: tuple[tuple[Any, ...], ...] = (
        ("begin", 0, FIRST),
        ("layer", 0),
        ("layer", 1),
        ("end",),
        ("begin", FIRST, PROMPT - FIRST),
        ("layer", 0),
        ("layer", 1),
        ("end",),
    )

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.outputs: list[list[np.ndarray]] = [[] for _ in LAYERS]  # by layer
        self._begun = (0, 0)

    def do(self, call: str, *arguments: int) -> None:
        if call == "begin":
            self._begun = (arguments[0], arguments[1])
            self.cache.begin_forward([0], [arguments[1]])
        elif call == "layer":
            layer, (start, count) = arguments[0], self._begun
            spec = LAYERS[layer]
            out = np.zeros((count, spec.num_qo_heads, spec.qk_head_dim), np.float32)
            self.cache.attention_with_fused_qkv(layer, inputs(spec, layer, start, count), out)
            self.outputs[layer].append(out)
        else:
            self.cache.end_forward()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Program]:
    sender = Program("sender")
    yield sender
    sender.close()


def run_to(stage: str, sender: Program, cache: KVCache, peer: TransferPeer) -> int:
    """Everything up to a stage. Returns the epoch; 0: nothing is reserved."""
    names = list(STAGES)
    last = names.index(stage)
    epoch = 0

    def request() -> None:
        nonlocal epoch
        receive = cache.disagg_prepare_recv(0, PROMPT)
        peer.request(receive, range(PROMPT), job=1)
        epoch = receive.epoch

    steps: list[Callable[[], Any]] = [
        lambda: sender.do("accept"),
        request,
        lambda: sender.do("take"),
        lambda: sender.do("mark"),
        lambda: sender.do("begin", 0, FIRST),
        lambda: sender.do("layer", 0),
        lambda: sender.do("layer", 1),
        lambda: (sender.do("end"), cache.wait_received(epoch, FIRST, SECONDS)),
        lambda: (sender.do("begin", FIRST, PROMPT - FIRST), sender.do("layer", 0)),
        lambda: (sender.do("layer", 1), sender.do("end")),
        lambda: cache.wait_received(epoch, PROMPT, SECONDS),
        lambda: cache.disagg_commit_recv(epoch, PROMPT),
    ]
    for step in steps[: last + 1]:
        step()
    return epoch


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_sender_costs_no_bit_and_no_page(
    fault: str, lasting: Program, record_property: Callable[[str, Any], None]
) -> None:
    record_property("losses", len(STAGES))
    for stage in STAGES:
        sender = Program("sender") if fault == "killed" else lasting
        proxy = Program("proxy", sender.endpoint)
        cache = make_cache(16)
        free = cache.get_num_available_pages()
        try:
            # Of a process that stands still nothing else tells; the others are noticed at once.
            dead_after = 4.0 if fault == "stopped" else SECONDS
            sender.tell("connect")
            with TransferPeer.connect(
                proxy.endpoint,
                cache,
                model="test",
                connect_timeout=SECONDS,
                heartbeat=0.05,
                dead_after=dead_after,
            ) as peer:
                cache.receive_from(peer)
                epoch = run_to(stage, sender, cache, peer)
                if fault == "killed":
                    sender.process.kill()
                elif fault == "stopped":
                    sender.process.send_signal(signal.SIGSTOP)
                else:
                    proxy.do(fault, "near")
                check_receiver(stage, cache, peer, epoch)
            cache.check_invariants()
            cache.remove_sequence(0)
            assert cache.get_num_available_pages() == free, stage
        finally:
            sender.process.send_signal(signal.SIGCONT)
            proxy.close()
            if fault == "killed":
                sender.close()
        if fault != "killed":
            assert sender.do("finish") == "as before", stage


def check_receiver(stage: str, cache: KVCache, peer: TransferPeer, epoch: int) -> None:
    alone = make_cache(16)
    expected = [rows[-3:] for rows in extend(alone, 0, PROMPT + 3)]
    complete = STAGES[stage]
    if epoch == 0:  # what is asked for now learns of it
        receive = cache.disagg_prepare_recv(0, PROMPT)
        try:
            peer.request(receive)
        except quire.QuireError:
            cache.disagg_cancel_recv(receive.epoch)
        else:
            epoch = receive.epoch
    if epoch != 0 and stage != "committed":
        # The last rows may come before the end does, or not.
        if stage in ("second forward", "received"):
            try:
                cache.wait_received(epoch, PROMPT, SECONDS)
            except quire.QuireError:
                pass
        else:
            with pytest.raises((quire.UnavailableError, quire.RemoteError)):
                cache.wait_received(epoch, PROMPT, SECONDS)
        progress = cache.receive_progress(epoch)
        if stage == "second forward":
            assert progress.complete in (FIRST, PROMPT)
        else:
            assert progress.complete == complete, stage
        complete = progress.complete
        cache.disagg_commit_recv(epoch, complete)
    assert cache.get_sequence_length(0) == complete
    found = [rows[-3:] for rows in extend(cache, complete, PROMPT + 3 - complete)]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), stage


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_receiver_costs_no_forward_and_no_page(
    fault: str, record_property: Callable[[str, Any], None]
) -> None:
    record_property("losses", len(STAGES))
    receiver = Program("receiver")
    for stage in STAGES:
        cache = make_cache(16)
        free = cache.get_num_available_pages()
        # As above.
        dead_after = 4.0 if fault == "stopped" else SECONDS
        options = {"model": "test", "heartbeat": 0.05, "dead_after": dead_after}
        with TransferListener("127.0.0.1:0", cache, **options) as listener:
            proxy = Program("proxy", listener.endpoint)
            try:
                peer, forwards = send_to(stage, receiver, cache, listener, proxy.endpoint)
                if fault == "killed":
                    receiver.process.kill()
                elif fault == "stopped":
                    receiver.process.send_signal(signal.SIGSTOP)
                else:
                    proxy.do(fault, "far")
                check_sender(stage, cache, peer, forwards)
                assert cache.get_num_available_pages() == free, stage
                check_next_receiver(cache, listener)
            finally:
                receiver.process.send_signal(signal.SIGCONT)
                proxy.close()
                if fault == "killed":
                    receiver.close()
                    receiver = Program("receiver")
        if fault != "killed":
            assert receiver.do("finish") == "as before", stage
    receiver.close()


def send_to(
    stage: str, receiver: Program, cache: KVCache, listener: TransferListener, endpoint: str
) -> tuple[TransferPeer, Forwards]:
    """Everything up to a stage."""
    receiver.tell("connect", endpoint)
    peer = listener.accept(SECONDS)
    cache.send_through(peer)
    assert receiver.read() == "done"
    forwards = Forwards(cache)
    made = 0
    for name in list(STAGES)[: list(STAGES).index(stage) + 1]:
        for call in Forwards.CALLS[made : CALLS_MADE[name]]:
            forwards.do(*call)
        made = CALLS_MADE[name]
        if name == "requested":
            receiver.do("request")
        elif name == "taken":
            request = peer.next_request(SECONDS)
        elif name == "marked":
            cache.disagg_mark_send(0, 0, request.map, peer=0)
        elif name in ("first forward", "received"):
            receiver.do("wait", STAGES[name])
        elif name == "committed":
            receiver.do("commit", PROMPT)
    return peer, forwards


def check_sender(stage: str, cache: KVCache, peer: TransferPeer, forwards: Forwards) -> None:
    with pytest.raises((quire.UnavailableError, quire.RemoteError)):
        while True:  # what was asked for before is given first
            peer.next_request(SECONDS)
    alone = make_cache(5)
    expected = [*extend(alone, 0, PROMPT), *extend(alone, PROMPT, 3)]
    left = Forwards.CALLS[CALLS_MADE[stage] :]
    for call in left:
        forwards.do(*call)
    found = [*map(np.concatenate, forwards.outputs), *extend(cache, PROMPT, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), stage
    was_marked = list(STAGES).index(stage) >= list(STAGES).index("marked")
    if was_marked and left:
        progress = cache.send_progress(0)
        assert progress.failure and not progress.active, stage
    peer.close()
    cache.check_invariants()
    cache.remove_sequence(0)


def check_next_receiver(cache: KVCache, listener: TransferListener) -> None:
    cache.add_sequence(0)
    other, alone = make_cache(5), make_cache(16)
    patient = {"connect_timeout": SECONDS, "dead_after": SECONDS}
    with TransferPeer.connect(listener.endpoint, other, model="test", **patient) as to:
        other.receive_from(to)
        with listener.accept(SECONDS) as of:
            cache.send_through(of)
            receive = other.disagg_prepare_recv(0, PROMPT)
            to.request(receive)
            cache.disagg_mark_send(0, 0, of.next_request(SECONDS).map, peer=0)
            extend(cache, 0, PROMPT)
            other.wait_received(receive.epoch, PROMPT, SECONDS)
            other.disagg_commit_recv(receive.epoch, PROMPT)
            cache.remove_sequence(0)
            cache.send_through(None)
    extend(alone, 0, PROMPT)
    found, expected = extend(other, PROMPT, 3), extend(alone, PROMPT, 3)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------ the other process


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def run_proxy(endpoint: str) -> None:
    """Carries one connection, until a line says how it breaks. A process of its own: connecting
    holds Python's lock."""
    listener = socket.create_server(("127.0.0.1", 0))
    say(f"127.0.0.1:{listener.getsockname()[1]}")
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    other: dict[Any, Any] = {near: far, far: near}
    while True:
        ready, _, _ = select.select([sys.stdin, *other], [], [])
        if sys.stdin in ready:
            fault, whose = json.loads(sys.stdin.readline())
            if fault == "half closed":
                side = near if whose == "near" else far
                del other[other[side]]
                side.shutdown(socket.SHUT_WR)  # it reads an end, and may go on writing
                say("done")
                continue
            for each in (near, far):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()
            return say("done")
        for each in [s for s in ready if s in other]:
            data = each.recv(1 << 16)
            if not data:
                return
            (far if each is near else near).sendall(data)


def run_sender() -> None:
    listener = TransferListener("127.0.0.1:0", make_cache(5), model="test", dead_after=SECONDS)
    say(listener.endpoint)
    peer, request = None, None
    forwards = Forwards(cache := make_cache(5))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "connect":
            forwards = Forwards(cache := make_cache(5))
            continue
        if command == "accept":
            peer = listener.accept(SECONDS)
            cache.send_through(peer)
        elif command == "take" and peer is not None:
            request = peer.next_request(SECONDS)
        elif command == "mark" and request is not None:
            cache.disagg_mark_send(0, 0, request.map, peer=0)
        elif command in ("begin", "layer", "end"):
            forwards.do(command, *arguments)
        elif command == "finish":
            if peer is not None:
                peer.close()
            cache.clear()
            cache.check_invariants()
            free, all_of_it = cache.get_num_available_pages(), make_cache(5)
            all_of_it.remove_sequence(0)
            peer = request = None
            say("as before" if free == all_of_it.get_num_available_pages() else "pages are lost")
            continue
        say("done")


def run_receiver() -> None:
    say("ready")
    cache, peer, receive = make_cache(5), None, None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "connect":
            cache = make_cache(5)
            peer = TransferPeer.connect(
                arguments[0], cache, model="test", connect_timeout=SECONDS, dead_after=SECONDS
            )
            cache.receive_from(peer)
        elif command == "request" and peer is not None:
            receive = cache.disagg_prepare_recv(0, PROMPT)
            peer.request(receive, range(PROMPT), job=1)
        elif command == "wait" and receive is not None:
            cache.wait_received(receive.epoch, arguments[0], SECONDS)
        elif command == "commit" and receive is not None:
            cache.disagg_commit_recv(receive.epoch, arguments[0])
            receive = None
        elif command == "finish" and peer is not None:
            if receive is not None:
                try:
                    cache.wait_received(receive.epoch, PROMPT, SECONDS)
                except (quire.UnavailableError, quire.RemoteError):  # the sender has given it up
                    pass
                cache.disagg_cancel_recv(receive.epoch)
            peer.close()
            cache.check_invariants()
            cache.remove_sequence(0)
            all_of_it = make_cache(5).get_num_available_pages()
            peer = receive = None
            say("as before" if cache.get_num_available_pages() == all_of_it else "pages are lost")
            continue
        say("done")


if __name__ == "__main__":
    if sys.argv[1] == "proxy":
        run_proxy(sys.argv[2])
    elif sys.argv[1] == "sender":
        run_sender()
    else:
        run_receiver()
