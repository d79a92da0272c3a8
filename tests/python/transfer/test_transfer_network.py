"""A transfer between two network namespaces whose network is slow, gone for a while, or gone in one
direction. Rows that came are kept, the receiver computes the others with the bits of a cache that
was alone, and once the network is back the next transfer brings all.

tools/soak runs it, as root: it makes namespaces. As a program, this file is one of the two sides
and does what it reads, one line a command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import quire
from quire import TransferListener, TransferPeer
from test_transfer import extend, make_cache

IN_SOAK = pytest.mark.skipif(
    "QUIRE_SOAK_ROUND" not in os.environ, reason="tools/soak makes network namespaces, as root"
)
SECONDS = 60.0  # for what must come; nothing waits so long
DEAD_AFTER = 3.0  # without a sign of life
PROMPT, FIRST = 40, 25  # tokens, and those of the first forward
# Of the receiver and the sender; a network that only documents use.
NEAR, FAR = "198.51.100.1", "198.51.100.2"
NOBODY = "02:00:00:00:00:99"  # an address on the wire that no device has


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Side:
    """This file as a program in a namespace of its own."""

    def __init__(self, role: str, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, __file__, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> None:
        run("ip", "netns", "exec", self.name, *command)

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, *command: Any) -> Any:
        self.tell(*command)
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Network:
    """Two namespaces with a cable between them: `near` receives, `far` sends."""

    def __init__(self, near: Side, far: Side) -> None:
        self.near, self.far = near, far
        self.endpoint = far.do("listen")

    def cut(self) -> None:
        self.near.run("ip", "link", "set", "cable", "down")

    def heal(self) -> None:
        self.near.run("ip", "link", "set", "cable", "up")

    @contextmanager
    def lost(self, side: Side, to: str) -> Iterator[None]:
        """What this side sends reaches nobody; what the other one sends does."""
        neighbour = ("ip", "neigh", "replace", to, "dev", "cable", "lladdr")
        side.run(*neighbour, NOBODY, "nud", "permanent")
        yield
        side.run("ip", "neigh", "del", to, "dev", "cable")

    @contextmanager
    def slow(self) -> Iterator[None]:
        for side in (self.near, self.far):
            limit = ("rate", "1mbit", "burst", "16kb", "latency", "400ms")
            side.run("tc", "qdisc", "add", "dev", "cable", "root", "tbf", *limit)
        yield
        for side in (self.near, self.far):
            side.run("tc", "qdisc", "del", "dev", "cable", "root")

    def begin(self) -> None:
        """A transfer whose first forward has come."""
        self.near.tell("connect", self.endpoint)
        assert self.far.do("accept") == "done"
        assert self.near.read() == "done"
        assert self.near.do("request") == "done"
        assert self.far.do("mark") == "done"
        assert self.far.do("forward", 0, FIRST) == "done"
        assert self.near.do("wait", FIRST) == "done"

    def finish(self, waited: str, kept: int) -> None:
        """The second forward; what the receiver's wait says, and with how many tokens it goes on."""
        assert self.far.do("forward", FIRST, PROMPT - FIRST) == "done"
        assert self.near.do("wait", PROMPT) == waited
        assert self.near.do("finish") == [kept, True, True]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is not installed: apt-get install iproute2")
    names = [f"quire-{os.getpid()}-{which}" for which in ("near", "far")]
    for name in names:
        run("ip", "netns", "add", name)
    try:
        run("ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable",
            "netns", names[1])  # fmt: skip
        for name, address in zip(names, (NEAR, FAR), strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
        sides = Side("receiver", names[0]), Side("sender", names[1])
        try:
            yield Network(*sides)
        finally:
            for side in sides:
                side.close()
    finally:
        for name in names:
            run("ip", "netns", "del", name)


@IN_SOAK
def test_no_network_costs_a_bit_or_a_page(
    network: Network, record_property: Callable[[str, Any], None]
) -> None:
    with network.slow():
        network.begin()
        network.finish("done", PROMPT)
    network.begin()  # a cut that is shorter than the patience of both sides
    network.cut()
    assert network.far.do("forward", FIRST, 1) == "done"
    network.heal()
    assert network.near.do("wait", FIRST + 1) == "done"
    assert network.far.do("forward", FIRST + 1, PROMPT - FIRST - 1) == "done"
    assert network.near.do("wait", PROMPT) == "done"
    assert network.near.do("finish") == [PROMPT, True, True]
    for loss in ("both", "rows", "answers"):
        network.begin()
        if loss == "both":
            network.cut()
            network.finish("UnavailableError", FIRST)
            network.heal()
        elif loss == "rows":
            with network.lost(network.far, NEAR):
                network.finish("UnavailableError", FIRST)
        else:  # rows need no answer, as long as the window has room
            with network.lost(network.near, FAR):
                network.finish("done", PROMPT)
        network.begin()  # at once when it is back
        network.finish("done", PROMPT)
    record_property("faults", 5)


# ------------------------------------------------------------------------------ the two sides


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def run_sender() -> None:
    listener: TransferListener | None = None
    peer: TransferPeer | None = None
    cache = make_cache(5)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "listen":
            listener = TransferListener(
                f"{FAR}:0", cache, model="test", secret="a secret", dead_after=DEAD_AFTER
            )
            say(listener.endpoint)
            continue
        if command == "accept" and listener is not None:
            cache = make_cache(5)
            peer = listener.accept(SECONDS)
            cache.send_through(peer)
        elif command == "mark" and peer is not None:
            cache.disagg_mark_send(0, 0, peer.next_request(SECONDS).map, peer=0)
        elif command == "forward":
            extend(cache, *arguments)
        say("done")


def run_receiver() -> None:
    cache, alone = make_cache(16), make_cache(16)
    free = 0
    peer: TransferPeer | None = None
    epoch = 0
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "connect":
            cache, alone = make_cache(16), make_cache(16)
            free = cache.get_num_available_pages()
            peer = TransferPeer.connect(
                arguments[0],
                cache,
                model="test",
                secret="a secret",
                connect_timeout=SECONDS,
                dead_after=DEAD_AFTER,
                heartbeat=0.1,
            )
            cache.receive_from(peer)
        elif command == "request" and peer is not None:
            receive = cache.disagg_prepare_recv(0, PROMPT)
            epoch = receive.epoch
            peer.request(receive, range(PROMPT), job=1)
        elif command == "wait":
            try:
                cache.wait_received(epoch, arguments[0], SECONDS)
            except quire.QuireError as error:
                say(type(error).__name__)
                continue
        elif command == "finish" and peer is not None:
            kept = cache.receive_progress(epoch).complete
            cache.disagg_commit_recv(epoch, kept)
            peer.close()
            expected = [rows[-3:] for rows in extend(alone, 0, PROMPT + 3)]
            found = [rows[-3:] for rows in extend(cache, kept, PROMPT + 3 - kept)]
            is_exact = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
            cache.check_invariants()
            cache.remove_sequence(0)
            say([kept, is_exact, cache.get_num_available_pages() == free])
            continue
        say("done")


if __name__ == "__main__":
    {"sender": run_sender, "receiver": run_receiver}[sys.argv[1]]()
