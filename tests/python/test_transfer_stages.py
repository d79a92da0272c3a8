"""A transfer whose sender is lost at each of its stages: the receiver notices, keeps the rows that
came, computes the others, and goes on with the bits of a cache that was alone.

Run as a program, this file is the sender: it makes a cache for each connection and does what it
reads, one line a command. Or it is the network between the two.
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
from quire import KVCache, TransferListener, TransferPeer
from test_transfer import LAYERS, extend, make_cache

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


class Program:
    """This file as a program, in a role."""

    def __init__(self, *role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
def test_a_lost_sender_costs_no_bit_and_no_page(fault: str, lasting: Program) -> None:
    for stage in STAGES:
        sender = Program("sender") if fault == "killed" else lasting
        proxy = Program("proxy", sender.endpoint)
        cache = make_cache(16)
        free = cache.get_num_available_pages()
        try:
            # Of a process that stands still nothing else tells; the others are noticed at once.
            dead_after = 2.0 if fault == "stopped" else SECONDS
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
                    proxy.do(fault)
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


# ------------------------------------------------------------------------------ the other process


def inputs(layer: int, start: int, count: int) -> np.ndarray:
    """As of test_transfer.extend."""
    width = (LAYERS[layer].num_qo_heads + 2 * LAYERS[layer].num_kv_heads) * LAYERS[0].qk_head_dim
    return np.stack(
        [
            np.random.default_rng((layer, p)).standard_normal(width, dtype=np.float32)
            for p in range(start, start + count)
        ]
    )


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
            if json.loads(sys.stdin.readline()) == ["half closed"]:
                near.shutdown(socket.SHUT_WR)  # the receiver reads an end, and may go on writing
                del other[far]
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
    cache, peer, request, begun = make_cache(5), None, None, (0, 0)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "connect":
            cache = make_cache(5)
            continue
        if command == "accept":
            peer = listener.accept(SECONDS)
            cache.send_through(peer)
        elif command == "take" and peer is not None:
            request = peer.next_request(SECONDS)
        elif command == "mark" and request is not None:
            cache.disagg_mark_send(0, 0, request.map, peer=0)
        elif command == "begin":
            begun = (arguments[0], arguments[1])
            cache.begin_forward([0], [begun[1]])
        elif command == "layer":
            layer = arguments[0]
            out = np.zeros((begun[1], LAYERS[layer].num_qo_heads, 16), np.float32)
            cache.attention_with_fused_qkv(layer, inputs(layer, *begun), out)
        elif command == "end":
            cache.end_forward()
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


if __name__ == "__main__":
    if sys.argv[1] == "proxy":
        run_proxy(sys.argv[2])
    else:
        run_sender()
