"""Lookup and store buffers: the worked examples of the interface, on NumPy and torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire import errors
from quire.buffers import (
    BufferClosed,
    BufferFull,
    EntryTooLarge,
    KVCacheBufferBase,
    KVLookupBufferBase,
    KVStoreBufferBase,
    LookupBuffer,
    StoreBuffer,
    StoreClosed,
)
from quire.remote_buffers import RemoteLookupBuffer


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=bool)


def insert(buffer: LookupBuffer, *tokens: int, **options: Any) -> None:
    buffer.insert(ids(*tokens), ones(len(tokens)), None, None, None, **options)


def select(buffer: LookupBuffer, *tokens: int) -> list[int] | None:
    found = buffer.drop_select(ids(*tokens) if tokens else None, None, block=False)
    return None if found[0] is None else found[0].tolist()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_entry_comes_back_as_it_was(library: str) -> None:
    make: Callable[[Any], Any] = torch.from_numpy if library == "torch" else lambda array: array
    buffer = LookupBuffer(1000)
    key, value = np.full((5, 6), 2, np.float32), np.full((5, 6), 3, np.float32)
    buffer.insert(make(ids(1, 2, 3)), make(ones(3)), make(key), make(value), make(ids(1)))
    key[:] = 0
    value[:] = 0
    assert (buffer.buffer_size, len(buffer), buffer.capacity) == (275, 1, 1000)
    found = buffer.drop_select(make(ids(1, 2, 3)), make(ones(3)))
    assert [tuple(array.shape) for array in found] == [(3,), (3,), (5, 6), (5, 6), (1,)]
    kind = torch.Tensor if library == "torch" else np.ndarray
    assert all(isinstance(array, kind) for array in found)
    assert found[1].dtype == (torch.bool if library == "torch" else np.bool_)
    assert (np.asarray(found[2]) == 2).all()
    assert (np.asarray(found[3]) == 3).all()
    found[2][0, 0] = 7  # the consumer's own
    assert (buffer.buffer_size, len(buffer)) == (0, 0)


def test_matching_goes_both_ways_and_by_exact_ids() -> None:
    buffer = LookupBuffer(1000)
    insert(buffer, 5, 6, 7, 8)
    assert select(buffer, 5, 6) == [5, 6, 7, 8]
    insert(buffer, 5, 6)
    assert select(buffer, 5, 6, 7, 8) == [5, 6]
    insert(buffer, 100000)
    assert select(buffer, 100001) is None
    narrow = buffer.drop_select(np.array([100000], np.int32), ones(1), block=False)
    assert narrow[0].tolist() == [100000]


def test_order_is_that_of_insertion_or_of_length() -> None:
    buffer = LookupBuffer(1000)
    for token in (1, 2, 3):
        insert(buffer, token)
    assert select(buffer, 2) == [2]
    assert [select(buffer), select(buffer), select(buffer)] == [[1], [3], None]
    longest = LookupBuffer(1000, prefer="longest")
    insert(longest, 9)
    insert(longest, 9, 10)
    assert select(longest, 9, 10) == [9, 10]


def test_none_stands_for_anything() -> None:
    buffer = LookupBuffer(1000)
    insert(buffer, 4)
    insert(buffer, 5)
    assert buffer.drop_select(None, None)[0].tolist() == [4]
    assert buffer.drop_select(None, ones(1))[0].tolist() == [5]
    assert buffer.drop_select(None, None, timeout=0.001) == [None] * 5


def test_missing_tensors_come_back_as_none() -> None:
    buffer = LookupBuffer(1000)
    buffer.insert(ids(1), ones(1), np.ones(2, np.float32), [], None)
    found = buffer.drop_select(ids(1), ones(1))
    assert found[2].tolist() == [1, 1]
    assert found[3:] == [None, None]


def test_bundles_have_names_of_their_own() -> None:
    buffer = LookupBuffer(10000)
    layers = {f"layer {i}": np.full(3, i, np.float16) for i in range(4)}
    buffer.insert_bundle(ids(1, 2), ones(2), layers, owned=True)
    tokens, roi, found = buffer.drop_select_bundle(ids(1, 2)) or pytest.fail("nothing was found")
    assert tokens.tolist() == [1, 2]
    assert roi.tolist() == [True, True]
    assert list(found) == list(layers)
    assert all((found[name] == layers[name]).all() for name in layers)
    assert buffer.drop_select_bundle(block=False) is None


def test_a_consumer_waits_without_holding_python_up() -> None:
    buffer = LookupBuffer(1000)
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.append(buffer.drop_select(ids(7), ones(1))))
    consumer.start()
    while buffer.waiting == 0:
        pass
    insert(buffer, 8)
    assert not found
    insert(buffer, 7)
    consumer.join()
    assert found[0][0].tolist() == [7]
    assert select(buffer) == [8]


def test_a_consumer_that_waits_gets_arrays_of_its_own_library() -> None:
    """Once they were those of the producer, whose insert came after the query."""
    buffer = LookupBuffer(1000)
    found: list[Any] = []
    tokens = torch.tensor([7])
    consumer = threading.Thread(target=lambda: found.append(buffer.drop_select(tokens)))
    consumer.start()
    while buffer.waiting == 0:
        pass
    insert(buffer, 7)
    consumer.join()
    assert isinstance(found[0][0], torch.Tensor) and found[0][0].tolist() == [7]


def test_limits_are_errors_by_name() -> None:
    buffer = LookupBuffer(30)
    with pytest.raises(EntryTooLarge, match="36 bytes"):
        insert(buffer, 1, 2, 3, 4)
    insert(buffer, 1, 2, 3)
    with pytest.raises(BufferFull):
        insert(buffer, 1, timeout=0)
    with pytest.raises(ValueError, match="roi has 2 elements and tokens 1"):
        buffer.insert(ids(1), ones(2), None, None, None)
    with pytest.raises(ValueError, match="timeout"):
        buffer.drop_select(ids(1), None, timeout=-1)
    with pytest.raises(errors.BadArgumentError, match="timeout must be a number, not str"):
        buffer.drop_select(ids(1), None, timeout="1")  # type: ignore[arg-type]
    with pytest.raises(errors.BadArgumentError, match="connect_timeout must be a number, not str"):
        RemoteLookupBuffer("127.0.0.1:1", connect_timeout="1")  # type: ignore[arg-type]
    assert (buffer.buffer_size, len(buffer)) == (27, 1)
    buffer.close()
    buffer.close()
    with pytest.raises(BufferClosed):
        buffer.drop_select(ids(1), None)
    with pytest.raises(errors.BadArgumentError):
        LookupBuffer(0)


def test_closing_wakes_a_waiting_consumer() -> None:
    buffer = LookupBuffer(1000)
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            buffer.drop_select(ids(1), None)
        except BufferClosed as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    while buffer.waiting == 0:
        pass
    buffer.close()
    consumer.join()
    assert len(raised) == 1


_TORCH_TYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", _TORCH_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0), (3, 4)], ids=str)
def test_a_store_gives_back_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    store = StoreBuffer(10000)
    size = int(np.prod(shape)) * dtype.itemsize
    pattern = bytes(
        (0xC1 - 66 * i) % 2 if dtype == torch.bool else (0xC1 - 66 * i) % 256 for i in range(size)
    )
    value = (
        torch.frombuffer(bytearray(pattern), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    )
    value = value.reshape(shape)
    store.put("k", value)
    got = store.get("k")
    assert got is not None and (got.dtype, got.shape) == (dtype, value.shape)
    assert got.reshape(-1).view(torch.uint8).tolist() == list(pattern)


def test_a_store_makes_strided_arrays_dense() -> None:
    store = StoreBuffer(10000)
    array = np.arange(12).reshape(3, 4)
    store.put("k", array.T[1:])
    got = store.get("k")
    assert got is not None and got.tolist() == array.T[1:].tolist()
    got[:] = 0
    assert store.get("k").tolist() == array.T[1:].tolist()  # type: ignore[union-attr]


def test_a_store_replaces_and_deletes() -> None:
    store = StoreBuffer(1000)
    store.put("k", ids(1))
    store.put("k", ids(2))
    assert store.get("k").tolist() == [2]  # type: ignore[union-attr]
    store.put("k", None)
    store.put("k", None)
    assert store.get("k") is None
    assert store.get("never there") is None
    store.mput({"a": ids(1), "b": ids(2)})
    assert store.mexists(["a", "x", "b"]) == [True, False, True]
    assert store.prefix_hits(["a", "b", "x"]) == 2
    assert [None if v is None else v.tolist() for v in store.mget(["b", "x"])] == [[2], None]
    assert store.put_async("c", ids(3)).result() is None
    assert store.delete("c") and not store.delete("c")


def test_a_full_store_drops_and_counts_unless_it_is_strict() -> None:
    store = StoreBuffer(20)
    store.put("a", ids(1))
    store.put("b", ids(1, 2))
    assert (store.get("b"), store.dropped, store.buffer_size) == (None, 1, 9)
    strict = StoreBuffer(20, strict=True)
    strict.put("a", ids(1))
    with pytest.raises(BufferFull):
        strict.put("b", ids(1, 2))
    with pytest.raises(EntryTooLarge):
        strict.put_async("b", ids(1, 2, 3)).result()
    with pytest.raises(ValueError, match="512"):
        strict.put("k" * 513, ids(1))
    strict.close()
    strict.close()
    with pytest.raises(StoreClosed):
        strict.get("a")


def test_a_buffer_is_closed_behind_a_with() -> None:
    for buffer in (LookupBuffer(100), StoreBuffer(100)):
        with buffer:
            assert len(buffer) == 0
        with pytest.raises(BufferClosed, match=type(buffer).__name__):
            len(buffer)
        buffer.close()


def test_the_base_classes_have_the_names_and_parameters_of_the_interface() -> None:
    lookup, store = KVLookupBufferBase(), KVStoreBufferBase()
    for call in (
        lambda: lookup.insert(input_tokens=0, roi=0, key=0, value=0, hidden=0),
        lambda: lookup.drop_select(input_tokens=None, roi=None),
        lambda: lookup.close(),
        lambda: store.put(key="", value=None),
        lambda: store.get(key=""),
        lambda: store.close(),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert issubclass(LookupBuffer, KVCacheBufferBase)
    assert issubclass(StoreBuffer, KVCacheBufferBase)


def test_neither_torch_nor_vllm_is_needed() -> None:
    program = """
import sys
sys.modules["torch"] = None
sys.modules["vllm"] = None
import numpy as np
from quire.buffers import LookupBuffer
buffer = LookupBuffer(100)
buffer.insert(np.array([1]), np.ones(1, bool), np.ones(3, np.float32), None, None)
assert buffer.drop_select(np.array([1]), None)[2].tolist() == [1, 1, 1]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
