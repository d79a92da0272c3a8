"""What every public member of every class answers on an object that is open, closed, or failed by
an internal error. A member that the tables lack fails the test."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
from program import run_source
from quire import _ffi
from quire._blend_verdict import BlendVerdict
from tiny_model import TinyModel

_Q = np.zeros((1, 2, 8), np.float32)
_KV = np.zeros((1, 1, 8), np.float32)
_LSE = np.zeros((1, 2), np.float32)
_ONE = np.zeros((1, 1), np.float32)
_IDENTITY = {"model": "m", "revision": "r"}
_NO_MAP: list[Any] = []
_MAP = quire.ReceiveMap(epoch=1, slots=(0, 1), first_position=0, count=1, kv_heads=(1,), layout=0)
_SPACE_PASSPORT = {
    "model": "m",
    "revision": "r",
    "block": 2,
    "layers": [0, 1],
    "kind": "latent",
    "dtype": "u8",
    "kv_heads": 1,
    "head_dim": 8,
}
_BLOCKS = quire.BlockMemory({("latent", 0): np.zeros((2, 16), np.uint8)})
_PASSPORT = quire.Passport("0" * 64, "m", "r", "", "", "", chunk_tokens=16)


def _rnn_state() -> quire.RNNState:
    return quire.RNNState([quire.StateSpec((1,))], max_num_sequences=2, max_tree_slots=4)


def _kv_cache() -> quire.KVCache:
    return quire.KVCache(
        num_layers=1,
        num_qo_heads=2,
        num_kv_heads=1,
        qk_head_dim=8,
        max_num_sequences=2,
        token_capacity=32,
        prefill_chunk_size=8,
        threads=1,
    )


def _recurrent_cache() -> quire.RecurrentCache:
    spec = quire.RecurrentLayerSpec("linear_attention", num_heads=1, key_dim=8, value_dim=8)
    return quire.RecurrentCache([spec], max_num_sequences=2, prefill_chunk_size=8, threads=1)


_OTHER_ENDS: list[Any] = []  # of connections that tests have


def _peer() -> quire.TransferPeer:
    """One side of a connection within this process."""
    with tempfile.TemporaryDirectory() as folder:
        listener = quire.TransferListener(f"unix:{folder}/peers", _kv_cache())
        peer = quire.TransferPeer.connect(listener.endpoint, _kv_cache())
        _OTHER_ENDS.append((listener, listener.accept(10.0)))
    return peer


class _LazyPeer:
    """An argument that is made when a call uses it."""

    @property
    def _handle(self) -> Any:
        return _peer()._handle


class _LazySpace:
    """A space of latents, which no cache of the table keeps."""

    @property
    def _handle(self) -> Any:
        return quire.ChunkStore(ram_bytes=1 << 20).space(_SPACE_PASSPORT)._handle


class _LazyFetch:
    """A fetch of nothing from such a space."""

    @property
    def _handle(self) -> Any:
        return quire.ChunkStore(ram_bytes=1 << 20).space(_SPACE_PASSPORT).fetch([1])._handle


class _FailedHandle:
    """A C++ object behind FaultLatch after an internal error: close() works, all else is
    refused."""

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def refuse(*_: object) -> None:
            raise quire.InternalError("this object refuses further use after an internal error: x")

        return refuse


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call, and how it ends: "Ok" or the code of its error, in each state."""

    arguments: tuple[Any, ...] = ()
    open: str = "Ok"
    closed: str = "Closed"
    failed: str = "Internal"


_OK = _Call()
_VERDICT = BlendVerdict("2026-11-24", 20, 0.1, 0.9)
_FIXED = _Call(closed="Ok", failed="Ok")  # what Python keeps itself

_STATE = {
    "abort_forward": _Call(open="BadState"),
    "add_sequence": _Call((0,)),
    "begin_forward": _Call(([0], [1]), open="UnknownSequence"),
    "check_invariants": _OK,
    "clear": _OK,
    "close": _FIXED,
    "commit_accepted_token_tree_nodes": _Call(([0], [0]), open="UnknownSequence"),
    "end_forward": _Call(open="BadState"),
    "fork_sequence": _Call((0, 1), open="UnknownSequence"),
    "forward": _Call(([0], [1]), open="UnknownSequence"),
    "get_sequence_length": _Call((0,), open="UnknownSequence"),
    "get_tree_size": _Call((0,), open="UnknownSequence"),
    "has_sequence": _Call((0,)),
    "pop_n": _Call((0, 0), open="UnknownSequence"),
    "remove_sequence": _Call((0,), open="UnknownSequence"),
    "sequence_count": _OK,
    "set_retained": _Call((0, True), open="UnknownSequence"),
    "state_digest": _OK,
}
_TRANSFER = {
    "connect_channel": _Call((quire.LocalChannel(), 0)),
    "disagg_cancel_recv": _Call((1,), open="NotFound"),
    "disagg_commit_recv": _Call((1, 1), open="NotFound"),
    "disagg_detach_send": _Call((0,), open="UnknownSequence"),
    "disagg_flush_send": _Call((0,), open="UnknownSequence"),
    "disagg_mark_send": _Call((0, 0, _NO_MAP, 0), open="UnknownSequence"),
    "disagg_prepare_recv": _Call((0, 1), open="UnknownSequence"),
    "disagg_unmark_send": _Call((0,), open="UnknownSequence"),
    "disconnect_channel": _Call((quire.LocalChannel(), 0), open="NotFound"),
    "receive_from": _Call((_LazyPeer(),)),
    "receive_progress": _Call((1,), open="NotFound"),
    "send_progress": _Call((0,), open="UnknownSequence"),
    "send_through": _Call((None,)),
    "set_staging_limit": _Call((1 << 20,)),
    "staging": _OK,
    "wait_received": _Call((1, 1, 0.0), open="Cancelled"),
}
_RECURRENT = {
    "export_chunk": _Call((0, [1]), open="UnknownSequence"),
    "import_chunks": _Call((0, [1], []), open="BadArgument"),
    "replay_start": _Call((0, 0), open="UnknownSequence"),
    "retained_sequence_count": _OK,
    "slot_counts": _OK,
    "storage_bytes": _OK,
}
_BUFFER = {"buffer_size": _OK, "capacity": _OK, "close": _FIXED}
_OPTIONS: dict[str, dict[str, Any]] = {
    "export_chunk": {"identity": _IDENTITY},
    "import_chunks": {"identity": _IDENTITY},
    "drop_select_bundle": {"timeout": 0.0},
    "chat": {"max_tokens": 1},
    "generate": {"max_tokens": 1},
    "stream": {"max_tokens": 1},
    "stream_chat": {"max_tokens": 1},
}

TABLES: dict[str, dict[str, _Call]] = {
    "KVCache": _STATE
    | _TRANSFER
    | {
        "append": _Call((0, _KV, _KV), open="BadState"),
        "append_mla_kv": _Call((0, _KV), open="BadState"),
        "attend": _Call((0, _Q), open="BadState"),
        "attention_with_fused_qkv": _Call((0, np.zeros((1, 32), np.float32)), open="BadState"),
        "attention_with_mla": _Call((0, _Q, _KV), open="BadState"),
        "attention_with_shared_kv": _Call((0, _Q), open="BadState"),
        "chunk_passport": _Call((_IDENTITY,)),
        "cross_attention": _Call((0, _Q, _Q, _LSE), open="BadState"),
        "debug_get_kv": _Call((0,), open="UnknownSequence"),
        "debug_get_kv_mla": _Call((0,), open="UnknownSequence"),
        "debug_plan": _Call(open="BadState"),
        "debug_set_kv": _Call((0, 0, _KV, _KV), open="UnknownSequence"),
        "debug_set_kv_mla": _Call((0, 0, _KV), open="UnknownSequence"),
        "disable_sliding_window_for_seq": _Call((0,), open="UnknownSequence"),
        "empty": _OK,
        "enable_sliding_window_for_seq": _Call((0, 4), open="UnknownSequence"),
        "get_distinct_token_count": _OK,
        "get_num_available_pages": _OK,
        "get_query_positions": _Call(open="BadState"),
        "get_total_sequence_length": _OK,
        "held_tokens": _Call((0,), open="UnknownSequence"),
        "layers": _FIXED,
        "merge_attn_output_inplace": _Call((_Q, _LSE, _Q.copy(), _LSE.copy())),
        "pages_allocated": _OK,
        "pages_in_use": _OK,
        "pages_needed": _Call(([0], [1]), open="UnknownSequence"),
        "put_chunks": _Call((0, [1, 2], _LazySpace()), open="Incompatible"),
        "select_long_rope": _Call((0, True), open="UnknownSequence"),
        "self_attention": _Call((0, _Q, _KV, _KV, _Q, _LSE), open="BadState"),
        "slid_range": _Call((0,), open="UnknownSequence"),
        "take_chunks": _Call((0, _LazyFetch(), 0), open="Incompatible"),
    },
    "RNNState": _STATE
    | _RECURRENT
    | {
        "debug_get": _Call((0, 0, 0), open="UnknownSequence"),
        "get": _Call((0, 0), open="BadState"),
        "get_at": _Call((0, 0, [0]), open="BadState"),
        "get_before": _Call((0, 0, [0]), open="BadState"),
        "set": _Call((0, 0, _ONE), open="BadState"),
        "set_at": _Call((0, 0, [0], _ONE), open="BadState"),
    },
    "RecurrentCache": _STATE
    | _RECURRENT
    | {
        "convolution": _Call((0, _ONE, _ONE), open="BadState"),
        "debug_get": _Call((0, 0), open="UnknownSequence"),
        "gated_delta": _Call((0, _KV, _KV, _KV, _ONE, _ONE), open="BadState"),
        "linear_attention": _Call((0, _KV, _KV, _KV, _ONE), open="BadState"),
        "state_space": _Call((0, _KV, _ONE, _ONE, _KV, _KV), open="BadState"),
    },
    "CompositeState": _STATE
    | _TRANSFER
    | {
        "attention": _FIXED,
        "attention_caches": _FIXED,
        "recurrent": _FIXED,
        "replay_start": _Call((0, 0), open="UnknownSequence"),
    },
    "LookupBuffer": _BUFFER
    | {
        "drop_select": _Call((None, None, 0.0)),
        "drop_select_bundle": _OK,
        "insert": _Call((np.arange(3), np.ones(3, bool), _KV, _KV, _KV)),
        "insert_bundle": _Call((np.arange(3), np.ones(3, bool), {"key": _KV})),
        "waiting": _OK,
    },
    "StoreBuffer": _BUFFER
    | {
        "delete": _Call(("k",)),
        "dropped": _FIXED,
        "exists": _Call(("k",)),
        "get": _Call(("k",)),
        "mexists": _Call((["k"],)),
        "mget": _Call((["k"],)),
        "mput": _Call(({"k": _KV},)),
        "prefix_hits": _Call((["k"],)),
        "put": _Call(("k", _KV)),
        "put_async": _Call(("k", _KV)),
    },
    "ChunkStore": {
        "clear": _Call((_PASSPORT,)),
        "close": _FIXED,
        "flush": _Call((1.0,)),
        "gc": _Call(("disk",)),
        "get": _Call(("disk", "0" * 64), open="NotFound"),
        "known_prefix": _Call((_PASSPORT, [1, 2])),
        "list": _Call(("disk",)),
        "passports": _OK,
        "pin": _Call((["0" * 64],)),
        "prefetch": _Call((_PASSPORT, [1, 2]), open="BadArgument"),
        "remove": _Call((["0" * 64],)),
        "set_priority": _Call((["0" * 64], 100)),
        "set_quota": _Call((_PASSPORT,)),
        "set_ttl": _Call((["0" * 64], 1.0)),
        "space": _Call((_SPACE_PASSPORT,)),
        "statistics": _OK,
        "take_events": _OK,
        "tiers": _OK,
        "touch": _Call((["0" * 64],)),
        "unpin": _Call((["0" * 64],)),
        "verify": _Call(("disk",)),
    },
    "ChunkSpace": {
        "close": _FIXED,
        "fetch": _Call(([1, 2],)),
        "keys": _Call(([1, 2],)),
        "known_prefix": _Call(([1, 2],)),
        "put": _Call((0, [1, 2], {("latent", 0): np.zeros((2, 8), np.uint8)})),
        "wanted": _Call(([1, 2],)),
    },
    "ChunkFetch": {
        "cancel": _OK,
        "chunk_count": _OK,
        "close": _FIXED,
        "done": _OK,
        "found": _OK,
        "located": _OK,
        "miss": _OK,
        "ready": _OK,
        "scatter": _Call((0, _BLOCKS, [0, 1]), open="BadArgument"),
        "section": _Call((0, "latent", 0), open="BadArgument"),
        "tier": _Call((0,), open="BadArgument"),
        "wait": _Call((1.0,)),
        "wait_layer": _Call((0, 1.0)),
    },
    "TransferListener": {
        "accept": _Call((0.0,), open="Timeout"),
        "close": _FIXED,
        "endpoint": _OK,
        "last_refusal": _OK,
        "refused": _OK,
    },
    "TransferPeer": {
        "cancel": _Call((1,), open="NotFound"),
        "close": _FIXED,
        "connect": _Call(("nowhere", _kv_cache()), *["BadArgument"] * 3),
        "endpoint": _OK,
        "failure": _OK,
        "next_request": _Call((0.0,), open="Timeout"),
        "refuse": _Call((1, "busy"), open="NotFound"),
        "request": _Call((_MAP,), open="BadState"),
        "stats": _OK,
    },
    "Engine": {
        "blend_verdict": _FIXED,
        "chat": _Call(([{"role": "user", "content": "a"}],)),
        "check": _Call(([1, 2],)),
        "close": _FIXED,
        "compile_grammar": _Call(({"regex": "a+"},), failed="Ok"),
        "describe": _OK,
        "document_ranges": _Call(([1, 2],), closed="Ok", failed="Ok"),
        "flush_store": _Call(failed="Ok"),
        "generate": _Call(([1, 2],)),
        "generate_each": _Call(([([1, 2], {"max_tokens": 1})],)),
        "has_tokenizer": _FIXED,
        "info": _FIXED,
        "keep_blend_verdict": _Call((_VERDICT,), closed="Ok", failed="Ok"),
        "logits": _Call(([1, 2],)),
        "max_num_sequences": _FIXED,
        "model_sampling": _FIXED,
        "on_step": _FIXED,
        "step_times": _OK,
        "plan_memory": _FIXED,
        "prefill_peers": _OK,
        "end_prefill": _OK,
        "prefill_refusals": _Call(failed="Ok"),
        "prepare": _Call((["a"],)),
        "resolve_sampling": _FIXED,
        "serve_prefill": _OK,
        "set_kept_part": _Call((b"a", 2)),
        "stats": _OK,
        "store": _FIXED,
        "stream": _Call(([1, 2],)),
        "stream_chat": _Call(([{"role": "user", "content": "a"}],)),
        "tokenizer": _FIXED,
        "uses_store": _FIXED,
        "wait_for_store": _Call(failed="Ok"),
    },
}


class _Objects:
    """One new object of a class."""

    def __init__(self, tiny: TinyModel, folder: Path) -> None:
        self._tiny = tiny
        self._folder = folder

    def _space(self) -> quire.ChunkSpace:
        return quire.ChunkStore(ram_bytes=1 << 20).space(_SPACE_PASSPORT)

    def make(self, name: str) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "KVCache": _kv_cache,
            "RNNState": _rnn_state,
            "RecurrentCache": _recurrent_cache,
            "CompositeState": lambda: quire.CompositeState(
                attention=_kv_cache(), recurrent=[_rnn_state()]
            ),
            "LookupBuffer": lambda: quire.LookupBuffer(1 << 16),
            "StoreBuffer": lambda: quire.StoreBuffer(1 << 16),
            "ChunkStore": lambda: quire.ChunkStore(self._folder),
            "ChunkSpace": lambda: self._space(),
            "ChunkFetch": lambda: self._space().fetch([1, 2]),
            "TransferListener": lambda: quire.TransferListener("127.0.0.1:0", _kv_cache()),
            "TransferPeer": _peer,
            "Engine": lambda: quire.Engine(self._tiny.directory, threads=1),
        }
        return makers[name]()


@pytest.fixture(scope="module")
def objects(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Objects]:
    yield _Objects(tiny, tmp_path_factory.mktemp("store"))


def _members(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def _end(owner: Any, name: str, call: _Call) -> str:
    """ "Ok" or the code of the error. Any other exception is the test's failure."""
    try:
        if isinstance(inspect.getattr_static(type(owner), name), property):
            getattr(owner, name)
            return "Ok"
        result = getattr(owner, name)(*call.arguments, **_OPTIONS.get(name, {}))
        if name == "forward":
            with result:
                pass
        elif name == "put_async":
            result.result(timeout=60)
        elif name == "generate_each":
            for _, answer in result:
                if isinstance(answer, quire.QuireError):
                    raise answer
        elif name in ("stream", "stream_chat"):
            list(result)
        return "Ok"
    except quire.QuireError as error:
        return type(error).code


def test_every_class_and_member_is_in_the_tables() -> None:
    owners = {
        name
        for name in quire.__all__
        if inspect.isclass(value := getattr(quire, name)) and issubclass(value, _ffi.Owner)
    }
    remote = {name for name in owners if "Server" in name or "Client" in name}
    assert owners - remote == TABLES.keys()
    for name, table in TABLES.items():
        assert _members(getattr(quire, name)) == table.keys(), name


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("state", ["open", "closed", "failed"])
def test_every_member_ends_as_the_table_says(objects: _Objects, name: str, state: str) -> None:
    ends = {}
    expected = {}
    owner = None
    for member, call in TABLES[name].items():
        if owner is None or member in ("close", "connect_channel", "add_sequence"):
            owner = objects.make(name)
            if state == "closed":
                owner.close()
            elif state == "failed":
                kept = owner._open_handle
                owner._open_handle = _FailedHandle()
        ends[member] = _end(owner, member, call)
        expected[member] = getattr(call, state)
        if member in ("close", "connect_channel", "add_sequence"):
            owner.close()
            owner = None
    if state == "failed":
        del kept
    assert {k: (v, ends[k]) for k, v in expected.items() if v != ends[k]} == {}


_FORKED = """
import os, sys, time
import quire
from quire import blend
from quire.remote_buffers import RemoteStoreBuffer, StoreBufferServer

def cache(threads=1):
    return quire.KVCache(num_layers=1, num_qo_heads=2, num_kv_heads=1, qk_head_dim=8,
                         max_num_sequences=2, token_capacity=32, threads=threads)

folder = sys.argv[1]
passport = {"model": "m", "revision": "r", "block": 2, "layers": [0, 1], "kind": "latent",
            "dtype": "u8", "kv_heads": 1, "head_dim": 8}
store = quire.ChunkStore(folder, ram_bytes=1 << 20)
space = store.space(passport)
fetch = space.fetch([1, 2])
with quire.ChunkStore(folder + "/closed") as closed:  # its lanes to the disk end with it
    left = closed.space(passport)
computes = cache(threads=4)
computes.add_sequence(0)
listener = quire.TransferListener(f"unix:{folder}/peers", cache())
peer = quire.TransferPeer.connect(listener.endpoint, cache())
server = StoreBufferServer(1 << 16)
remote = RemoteStoreBuffer(server.endpoint)
retriever = blend.BlendRetriever(blend.SegmentMemory(2))
calls = [store.statistics, lambda: fetch.ready, lambda: space.keys([1, 2]),
         lambda: listener.endpoint, peer.stats, lambda: server.buffer_size,
         lambda: remote.buffer_size, lambda: retriever.new_request([], [])]
for call in calls:
    call()
child = os.fork()
for call in calls:
    try:
        call()
        assert child > 0, call
    except quire.ClosedError:
        assert child == 0, call
if child == 0:
    for owner in (store, listener, peer, server, remote, retriever):
        owner.close()
    begin = time.monotonic()
    del store, space, fetch, listener, peer, server, remote, retriever, left, closed
    assert time.monotonic() - begin < 30, "a lane to the disk was waited for"
    assert computes.get_sequence_length(0) == 0
    del computes
    for _ in range(4):
        cache(threads=4).close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_the_child_of_a_fork_has_closed_objects(tmp_path: Path) -> None:
    """Their threads are the parent's: a child once crashed or waited when it ended."""
    run_source(_FORKED, str(tmp_path))
