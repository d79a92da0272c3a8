"""`Engine.describe`: what holds which KV, between two steps, however often it is asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import quire
from quire.engine import Description
from tiny_model import TinyModel


@pytest.fixture
def keeping(tiny: TinyModel) -> Iterator[quire.Engine]:
    """With a prefix cache."""
    with quire.Engine(tiny.directory, dtype="float32", threads=1, page_size=16) as engine:
        yield engine


def description_of(engine: quire.Engine, holds: Callable[[Description], bool]) -> Description:
    """The first one of which it holds: one is made for a call at most twice a second."""
    until = time.monotonic() + 60
    while not holds(found := engine.describe(wait=True)):
        assert time.monotonic() < until, found
    return found


def test_kept_kv_and_what_it_is_kept_for(keeping: quire.Engine) -> None:
    begin = list(range(5, 45))
    keeping.generate([*begin, 50, 51, 52], max_tokens=4, ignore_eos=True)
    keeping.generate([*begin, 60, 61], max_tokens=4, ignore_eos=True)
    keeping.generate([*begin, 70], max_tokens=4, ignore_eos=True, cache_salt=b"secret")
    found = description_of(keeping, lambda d: len(d.sequences) == 3)
    salted, *plain = found.sequences
    assert salted.salt_digest == found.salt_digest(b"secret") != found.salt_digest(b"other")
    assert all(sequence.holder == "kept" and sequence.request_id is None for sequence in plain)
    assert [sequence.salt_digest for sequence in plain] == ["", found.salt_digest(b"")]
    shared = [block for block in found.blocks if block.sequences == 2]
    assert [(block.parent, block.begin, block.end) for block in shared] == [(None, 0, 40)]
    ends = [found.blocks[sequence.block] for sequence in plain if sequence.block is not None]
    assert {block.end for block in ends} == {43 + 3, 42 + 3}  # the last token is not computed
    page_bytes = 16 * found.stats["kv_bytes_per_token"]
    assert sum(block.bytes for block in found.blocks) == found.stats["pages_in_use"] * page_bytes
    assert b"secret" not in repr(found).encode() and repr(found.salt_key) not in repr(found)
    assert not found.cut


def test_requests_and_their_samples(keeping: quire.Engine) -> None:
    # Longer than any machine needs until the next description is made.
    endless: dict[str, Any] = {"max_tokens": 1_000_000, "window": 64, "ignore_eos": True, "n": 2}
    with keeping.stream([5, 6, 7], **endless) as stream:
        next(stream)
        found = description_of(keeping, lambda d: len(d.sequences) == 2)
        assert {sequence.sample for sequence in found.sequences} == {0, 1}
        assert {sequence.holder for sequence in found.sequences} == {"request"}
        assert len({sequence.request_id for sequence in found.sequences}) == 1
    description_of(keeping, lambda d: not d.sequences)


def test_threads_that_ask_all_get_whole_ones(keeping: quire.Engine) -> None:
    wrong: list[Description] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            found = keeping.describe()
            if any((s.block or 0) >= len(found.blocks) for s in found.sequences):
                wrong.append(found)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(done.set)
        for first in range(20):
            keeping.generate([first + 5, 6, 7], max_tokens=8, ignore_eos=True)
    for thread in threads:
        thread.join()
    assert not wrong
