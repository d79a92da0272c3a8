"""quire.CompositeState: attention and recurrent parts change together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quire
from quire import snapshot

WIDTH = 4  # of each of q, k, v; one head


def attention(**changes: Any) -> quire.KVCache:
    options: dict[str, Any] = dict(
        max_num_sequences=6, token_capacity=400, prefill_chunk_size=100, page_size=4, threads=1
    )
    shape = dict(num_layers=1, num_qo_heads=1, qk_head_dim=WIDTH)
    return quire.KVCache(**shape, **(options | changes), poison_freed_pages=True)


def recurrence(**changes: Any) -> quire.RecurrentCache:
    options: dict[str, Any] = dict(
        max_num_sequences=6, prefill_chunk_size=100, threads=1, max_tree_slots=16
    )
    spec = quire.RecurrentLayerSpec("linear_attention", num_heads=1, key_dim=WIDTH, value_dim=WIDTH)
    return quire.RecurrentCache([spec], **(options | changes), poison_freed_slots=True)


def sums(**changes: Any) -> quire.RNNState:
    """A state whose update is the caller's: the sum of all tokens."""
    options: dict[str, Any] = dict(max_num_sequences=6, max_history=4, max_tree_slots=16)
    spec = quire.StateSpec((WIDTH,))
    return quire.RNNState([spec], **(options | changes), poison_freed_slots=True)


class Hybrid:
    """Three parts, alone or as one state, and a model over them: rows are [n, 3 * WIDTH]."""

    def __init__(
        self,
        cache: quire.KVCache | None = None,
        recurrent: quire.RecurrentCache | None = None,
        state: quire.RNNState | None = None,
        composed: bool = True,
    ) -> None:
        self.cache, self.recurrent = cache or attention(), recurrent or recurrence()
        self.state = state or sums()
        self.parts: list[Any] = [self.cache, self.recurrent, self.state]
        self.all: list[Any] = self.parts
        if composed:
            self.whole = quire.CompositeState(
                attention=self.cache, recurrent=[self.recurrent, self.state]
            )
            self.all = [self.whole]

    def call(self, name: str, *arguments: Any) -> None:
        for state in self.all:
            getattr(state, name)(*arguments)

    def run(self, lengths: list[int], rows: np.ndarray) -> list[np.ndarray]:
        q, k, v = (np.ascontiguousarray(x) for x in np.split(rows[:, None], 3, axis=-1))
        outputs = [self.cache.attention_with_fused_qkv(0, np.concatenate([q, k, v], axis=1))]
        decay = np.full((len(rows), 1), 0.9, np.float32)
        outputs.append(self.recurrent.linear_attention(0, q, k, v, decay))
        new = np.split(rows[:, :WIDTH], np.cumsum(lengths)[:-1])
        outputs.append(self.state.get(0, 0) + np.stack([part.sum(axis=0) for part in new]))
        self.state.set(0, 0, outputs[-1])
        return outputs

    def forward(self, ids: list[int], lengths: list[int], rows: np.ndarray) -> list[np.ndarray]:
        self.call("begin_forward", ids, lengths)
        outputs = self.run(lengths, rows)
        self.call("end_forward")
        return outputs

    def lengths(self, seq: int) -> set[int]:
        return {part.get_sequence_length(seq) for part in [*self.parts, *self.all]}

    def digests(self) -> list[int]:
        for state in [*self.parts, *self.all]:
            state.check_invariants()
        return [state.state_digest() for state in [*self.parts, *self.all]]


def draw(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).uniform(-1, 1, (count, 3 * WIDTH))
    return rows.astype(np.float32)


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_it_is_what_its_parts_are_alone() -> None:
    """Random calls on a composite state, and the same on parts of nobody."""
    done: dict[str, int] = {}
    for seed in range(4):
        random = np.random.default_rng(seed)
        one, alone = Hybrid(), Hybrid(composed=False)
        live: list[int] = []
        for step in range(80):
            name = str(random.choice(["add", "remove", "fork", "pop", "retain", *["forward"] * 5]))
            seq = int(random.choice(live)) if live else -1
            if name == "add" and len(live) < 6:
                for hybrid in (one, alone):
                    hybrid.call("add_sequence", step)
                live.append(step)
            elif name == "remove" and len(live) > 2:
                for hybrid in (one, alone):
                    hybrid.call("remove_sequence", seq)
                live.remove(seq)
            elif name in ("fork", "pop") and live and len(live) < 6:
                length = one.whole.get_sequence_length(seq)
                position = int(random.integers(0, length + 1))
                digests = one.digests()
                call = (
                    ("fork_sequence", seq, step, position)
                    if name == "fork"
                    else ("pop_n", seq, length - position)
                )
                if one.whole.replay_start(seq, position) != position:
                    with pytest.raises(quire.NeedsReplayError):
                        one.call(*call)
                    assert one.digests() == digests
                    name = "refused"
                else:
                    for hybrid in (one, alone):
                        hybrid.call(*call)
                    live += [step] if name == "fork" else []
            elif name == "retain" and live and one.whole.get_sequence_length(seq):
                with pytest.raises(quire.OutOfPagesError):  # no part has slots for such
                    one.call("set_retained", seq, True)
            elif name == "forward" and live:
                batch = [int(s) for s in random.permutation(live)[: 1 + random.integers(0, 3)]]
                lengths = [int(random.integers(1, 7)) for _ in batch]
                rows = draw(sum(lengths), 1000 * seed + step)
                assert same(*(hybrid.forward(batch, lengths, rows) for hybrid in (one, alone)))
            else:
                continue
            done[name] = done.get(name, 0) + 1
            assert one.digests()[:3] == alone.digests()[:3]
            for s in live:
                assert len(one.lengths(s)) == 1
    assert {name: done[name] > 5 for name in done} == dict.fromkeys(done, True)
    assert set(done) == {"add", "remove", "fork", "pop", "refused", "retain", "forward"}


REFUSALS: list[tuple[str, dict[str, Any], Callable[[Any], Any], type[quire.QuireError]]] = [
    ("cache", dict(token_capacity=8), lambda w: w.begin_forward([0, 1], [5, 9]), quire.OutOfPagesError),
    ("cache", dict(max_num_sequences=2), lambda w: w.add_sequence(2), quire.TooLargeError),
    ("cache", dict(max_num_sequences=2), lambda w: w.fork_sequence(0, 2, 0), quire.TooLargeError),
    ("cache", dict(max_tree_size=2), lambda w: w.begin_forward([0], [3], [-1, 0, 0]), quire.TooLargeError),
    ("recurrent", dict(prefill_chunk_size=9), lambda w: w.begin_forward([0], [10]), quire.TooLargeError),
    ("recurrent", dict(max_tree_slots=2), lambda w: w.begin_forward([1], [3], [-1, 0, 0]), quire.OutOfPagesError),
    ("recurrent", dict(max_num_sequences=2), lambda w: w.fork_sequence(0, 2), quire.TooLargeError),
    ("state", dict(max_history=1), lambda w: w.pop_n(0, 1), quire.NeedsReplayError),
    ("state", dict(max_num_sequences=2), lambda w: w.add_sequence(2), quire.TooLargeError),
    ("state", {}, lambda w: w.fork_sequence(0, 2, 2), quire.NeedsReplayError),
    ("state", {}, lambda w: w.set_retained(0, True), quire.OutOfPagesError),
]


@pytest.mark.parametrize("part, options, call, error", REFUSALS)
def test_what_one_part_refuses_changes_none(
    part: str, options: dict[str, Any], call: Callable[[Any], Any], error: type[quire.QuireError]
) -> None:
    make = {"cache": attention, "recurrent": recurrence, "state": sums}
    hybrid = Hybrid(**{part: make[part](**options)})
    for seq in (0, 1):
        hybrid.call("add_sequence", seq)
    hybrid.forward([0], [4], draw(4))
    before = hybrid.digests()
    with pytest.raises(error):
        call(hybrid.whole)
    assert hybrid.digests() == before
    assert hybrid.lengths(0) == {4} and hybrid.lengths(1) == {0}
    hybrid.forward([1, 0], [1, 1], draw(2))
    assert hybrid.lengths(0) == {5} and hybrid.lengths(1) == {1}


def test_a_forward_ends_in_all_parts_or_in_none() -> None:
    hybrid = Hybrid()
    hybrid.call("add_sequence", 0)
    hybrid.forward([0], [3], draw(3))
    before = hybrid.digests()
    rows = draw(2, 1)
    for missing in range(3):
        hybrid.call("begin_forward", [0], [2])
        assert hybrid.lengths(0) == {5}
        q, k, v = (np.ascontiguousarray(x) for x in np.split(rows[:, None], 3, axis=-1))
        if missing != 0:
            hybrid.cache.attention_with_fused_qkv(0, np.concatenate([q, k, v], axis=1))
        if missing != 1:
            hybrid.recurrent.linear_attention(0, q, k, v, np.ones((2, 1), np.float32))
        if missing != 2:
            hybrid.state.set(0, 0, np.ones((1, WIDTH), np.float32))
        with pytest.raises(quire.BadStateError):
            hybrid.call("end_forward")
        with pytest.raises(quire.BadStateError):  # all are in the forward still
            hybrid.call("begin_forward", [0], [1])
        hybrid.call("abort_forward")
        assert hybrid.digests() == before
    with pytest.raises(ZeroDivisionError), hybrid.whole.forward([0], [2]):
        hybrid.run([2], rows)
        raise ZeroDivisionError
    assert hybrid.digests() == before
    with hybrid.whole.forward([0], [2]) as whole:
        assert whole is hybrid.whole
        hybrid.run([2], rows)
    assert hybrid.lengths(0) == {5}


def test_layers_of_attention_may_be_skipped_and_recurrent_ones_not() -> None:
    hybrid = Hybrid(cache=attention(allow_skipped_layers=True))
    hybrid.call("add_sequence", 0)
    rows = draw(2, 3)
    q, k, v = (np.ascontiguousarray(x) for x in np.split(rows[:, None], 3, axis=-1))
    hybrid.call("begin_forward", [0], [2])
    hybrid.state.set(0, 0, np.ones((1, WIDTH), np.float32))
    with pytest.raises(quire.BadStateError):
        hybrid.call("end_forward")
    hybrid.recurrent.linear_attention(0, q, k, v, np.ones((2, 1), np.float32))
    hybrid.call("end_forward")
    assert hybrid.lengths(0) == {2}
    for stored in hybrid.cache.debug_get_kv(0):
        np.testing.assert_array_equal(stored, 0)


def test_token_trees_are_committed_in_all_parts() -> None:
    hybrid = Hybrid()
    hybrid.call("add_sequence", 0)
    rows = draw(9)
    hybrid.forward([0], [5], rows[:5])
    hybrid.call("begin_forward", [0], [4], [-1, 0, 0, 2])
    q, k, v = (np.ascontiguousarray(x) for x in np.split(rows[5:, None], 3, axis=-1))
    hybrid.cache.attention_with_fused_qkv(0, np.concatenate([q, k, v], axis=1))
    hybrid.recurrent.linear_attention(0, q, k, v, np.full((4, 1), 0.9, np.float32))
    for node in range(4):
        before = hybrid.state.get_before(0, 0, [node])
        hybrid.state.set_at(0, 0, [node], before + rows[5 + node, :WIDTH])
    hybrid.call("end_forward")
    assert hybrid.whole.get_tree_size(0) == 4 and hybrid.lengths(0) == {9}
    hybrid.call("commit_accepted_token_tree_nodes", [0], [3])
    plain = Hybrid(composed=False)
    plain.call("add_sequence", 0)
    plain.forward([0], [8], rows[[0, 1, 2, 3, 4, 5, 7, 8]])
    assert hybrid.lengths(0) == {8} and hybrid.whole.get_tree_size(0) == 0
    more = draw(3, 7)
    ours, theirs = (h.forward([0], [3], more) for h in (hybrid, plain))
    assert same(ours[:2], theirs[:2])
    np.testing.assert_allclose(ours[2], theirs[2], atol=1e-6)  # summed in another order


def test_parts_are_changed_through_the_whole_alone() -> None:
    hybrid = Hybrid()
    hybrid.call("add_sequence", 0)
    hybrid.forward([0], [3], draw(3))
    before = hybrid.digests()
    calls: list[Callable[[Any], Any]] = [
        lambda p: p.clear(),
        lambda p: p.add_sequence(1),
        lambda p: p.remove_sequence(0),
        lambda p: p.fork_sequence(0, 1),
        lambda p: p.pop_n(0, 1),
        lambda p: p.set_retained(0, True),
        lambda p: p.begin_forward([0], [1]),
        lambda p: p.begin_forward([0], [1], [-1]),
        lambda p: p.commit_accepted_token_tree_nodes([0], [-1]),
        lambda p: p.end_forward(),
        lambda p: p.abort_forward(),
    ]
    for part in hybrid.parts:
        for call in calls:
            with pytest.raises(quire.BadStateError, match="part of a CompositeState"):
                call(part)
    with pytest.raises(quire.BadStateError, match="part of a CompositeState"):
        hybrid.cache.disagg_prepare_recv(0, 1)
    free = sums()
    with pytest.raises(quire.BadStateError, match="part of another CompositeState"):
        quire.CompositeState(recurrent=[free, hybrid.state])
    free.add_sequence(0)  # the refusal has not kept it
    assert hybrid.digests() == before
    assert hybrid.whole.attention is hybrid.cache
    assert hybrid.whole.recurrent == (hybrid.recurrent, hybrid.state)
    hybrid.whole.close()
    with pytest.raises(quire.ClosedError, match="CompositeState"):
        hybrid.whole.add_sequence(1)
    for part in hybrid.parts:  # they are what they were, and nobody's
        assert part.get_sequence_length(0) == 3
        part.clear()
    again = quire.CompositeState(attention=hybrid.cache, recurrent=[hybrid.state])
    again.add_sequence(5)
    assert hybrid.cache.has_sequence(5) and not hybrid.recurrent.has_sequence(5)


def test_a_closed_part_stays_a_part() -> None:
    hybrid = Hybrid()
    hybrid.cache.close()
    hybrid.call("add_sequence", 0)
    assert hybrid.whole.sequence_count() == 1 and hybrid.state.has_sequence(0)


def test_what_is_no_part_is_refused() -> None:
    used = sums()
    used.add_sequence(0)
    twice = sums()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(recurrent=[]), quire.BadArgumentError, "no part; give a cache"),
        (dict(recurrent=[twice, twice]), quire.BadArgumentError, r"recurrent\[1\] is given twice"),
        (dict(recurrent=[used]), quire.BadArgumentError, r"recurrent\[0\] has 1 sequences"),
        (dict(recurrent=[attention()]), quire.BadArgumentError, r"recurrent\[0\] is no RNNState"),
        (dict(recurrent=[sums()], attention=sums()), quire.BadArgumentError, "is no KVCache"),
        (dict(recurrent=[3]), TypeError, "a int is no part"),
        (dict(recurrent=[None]), TypeError, "a NoneType is no part"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            quire.CompositeState(**arguments)
    quire.CompositeState(recurrent=[twice])  # a refused one keeps no part


def test_several_attention_caches_change_together() -> None:
    caches = [attention(), attention()]
    whole = quire.CompositeState(attention=caches)
    assert whole.attention is caches[0] and whole.attention_caches == tuple(caches)
    whole.add_sequence(0)
    whole.begin_forward([0], [2])
    qkv = np.zeros((2, 3, WIDTH), np.float32)
    caches[0].attention_with_fused_qkv(0, qkv)
    with pytest.raises(quire.BadStateError, match="EndForward"):
        whole.end_forward()
    caches[1].attention_with_fused_qkv(0, qkv)
    whole.end_forward()
    assert [cache.get_sequence_length(0) for cache in caches] == [2, 2]
    with pytest.raises(quire.BadStateError):
        caches[1].pop_n(0, 1)
    with pytest.raises(quire.BadArgumentError, match=r"attention\[1\] is no KVCache"):
        quire.CompositeState(attention=[attention(), sums()])


# ---------------------------------------------------------------------- files


IDENTITY = {"model": "tests"}


def pair(**changes: Any) -> Hybrid:
    """Attention and one RecurrentCache, with a third part that is not in the state."""
    hybrid = Hybrid(composed=False, cache=attention(**changes))
    hybrid.whole = quire.CompositeState(attention=hybrid.cache, recurrent=[hybrid.recurrent])
    hybrid.all = [hybrid.whole, hybrid.state]
    return hybrid


def test_a_sequence_goes_on_from_a_file(tmp_path: Path) -> None:
    source, target = pair(), pair(page_size=16)
    rows = draw(40)
    source.call("add_sequence", 3)
    source.forward([3], [30], rows[:30])
    path = tmp_path / "sequence.quire"
    tokens = list(range(100, 130))
    with pytest.raises(quire.BadArgumentError, match="tokens"):
        snapshot.save_sequence(source.whole, 3, tokens[1:], path, identity=IDENTITY)
    assert not path.exists()
    snapshot.save_sequence(source.whole, 3, tokens, path, identity=IDENTITY, block_tokens=8)
    assert snapshot.verify(path).state_bytes > 0
    target.call("add_sequence", 0)
    target.forward([0], [5], rows[:5])
    before = target.digests()
    with pytest.raises(quire.IncompatibleError, match="model"):
        snapshot.restore_sequence(target.whole, 8, path, identity={"model": "another"})
    with pytest.raises(quire.SequenceExistsError):
        snapshot.restore_sequence(target.whole, 0, path, identity=IDENTITY)
    with pytest.raises(quire.BadStateError, match="part of a CompositeState"):
        snapshot.restore_sequence(target.cache, 8, path, identity=IDENTITY)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    (tmp_path / "damaged.quire").write_bytes(content)
    with pytest.raises(quire.CorruptError):
        snapshot.restore_sequence(target.whole, 8, tmp_path / "damaged.quire", identity=IDENTITY)
    assert target.digests() == before
    info = snapshot.restore_sequence(target.whole, 8, path, identity=IDENTITY)
    assert info.tokens == tokens
    assert target.cache.get_sequence_length(8) == target.recurrent.get_sequence_length(8) == 30
    target.state.add_sequence(8)
    ours = target.forward([8], [10], rows[30:])
    theirs = source.forward([3], [10], rows[30:])
    assert same(ours[:2], theirs[:2])


def test_a_cache_alone_goes_on_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cache.quire"
    caches = [attention(page_size=size) for size in (4, 16)]
    rows = draw(12)
    caches[0].add_sequence(0)

    def run(cache: quire.KVCache, seq: int, begin: int, end: int) -> np.ndarray:
        qkv = rows[begin:end].reshape(-1, 3, WIDTH)
        with cache.forward([seq], [end - begin]):
            return np.asarray(cache.attention_with_fused_qkv(0, qkv))

    run(caches[0], 0, 0, 9)
    snapshot.save_sequence(caches[0], 0, list(range(9)), path, identity=IDENTITY)
    snapshot.restore_sequence(caches[1], 5, path, identity=IDENTITY)
    assert np.array_equal(run(caches[1], 5, 9, 12), run(caches[0], 0, 9, 12))


def test_states_of_all_parts_go_on_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "states.quire"
    source, target = Hybrid(), Hybrid(cache=attention(page_size=16))
    rows = draw(14)
    source.call("add_sequence", 0)
    source.forward([0], [9], rows[:9])
    snapshot.save_sequence(source.whole, 0, list(range(9)), path, identity=IDENTITY)
    snapshot.restore_sequence(target.whole, 4, path, identity=IDENTITY)
    assert same(target.forward([4], [5], rows[9:]), source.forward([0], [5], rows[9:]))


def test_a_prefill_of_all_parts_goes_on_in_another_state() -> None:
    sender, receiver = Hybrid(attention(page_size=4)), Hybrid(attention(page_size=16))
    channel = quire.LocalChannel()
    receiver.whole.connect_channel(channel, peer=1)
    sender.whole.send_through(channel)
    alone = Hybrid()
    for hybrid in (sender, receiver, alone):
        hybrid.call("add_sequence", 0)
    rows = draw(14)
    receive = receiver.whole.disagg_prepare_recv(0, 10)
    sender.whole.disagg_mark_send(0, 0, receive, peer=1)
    before = receiver.digests()
    with pytest.raises(quire.BadStateError, match="waits for tokens"):
        receiver.whole.begin_forward([0], [1])
    for begin, end in ((0, 4), (4, 10)):
        for hybrid in (sender, alone):  # whose own sums depend on the cut
            hybrid.forward([0], [end - begin], rows[begin:end])
        with pytest.raises(quire.BadStateError, match=r"the state after token 3"):
            receiver.whole.disagg_commit_recv(receive.epoch, 3)
    assert receiver.digests() == before
    receiver.whole.wait_received(receive.epoch, 10, timeout=60)
    assert receiver.whole.receive_progress(receive.epoch).layer_rows == (10, 10, 10)
    assert not sender.whole.send_progress(0).active
    receiver.whole.disagg_commit_recv(receive.epoch, 10)
    for hybrid in (receiver, alone):
        assert hybrid.lengths(0) == {10}
    assert same(*(hybrid.forward([0], [4], rows[10:]) for hybrid in (receiver, alone)))


def test_a_transfer_that_went_past_the_end_says_so() -> None:
    sender, receiver = Hybrid(), Hybrid()
    channel = quire.LocalChannel()
    receiver.whole.connect_channel(channel, peer=0)
    sender.whole.send_through(channel)
    for hybrid in (sender, receiver):
        hybrid.call("add_sequence", 0)
    receive = receiver.whole.disagg_prepare_recv(0, 3)
    sender.whole.disagg_mark_send(0, 0, receive, peer=0)
    sender.forward([0], [5], draw(5))
    assert "went past position 3" in sender.whole.send_progress(0).failure
    with pytest.raises(quire.NeedsReplayError, match="went past position 3"):
        receiver.whole.wait_received(receive.epoch, 3, timeout=60)
    receiver.whole.disagg_cancel_recv(receive.epoch)
    receiver.forward([0], [5], draw(5))
    receiver.whole.disconnect_channel(channel, peer=0)
