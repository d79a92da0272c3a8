"""Sequences of one quire.KVCache that rows of several QuireCaches hold, counted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from quire import errors, snapshot
from quire.chunk_space import ChunkFetch
from quire.kv_cache import KVCache

__all__ = ["Rows", "Sequences"]


class Sequences:
    """A KVCache, and how many rows hold each of its sequences. One that nobody holds is removed."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self._holders: Counter[int] = Counter()
        self._next = 0
        # Rows whose QuireCache has ended while another thread was in a call of the KVCache, as the
        # garbage collector may end one. They end before the next sequence or forward.
        self.left: deque[Rows] = deque()

    def add(self) -> int:
        """An empty sequence that nobody holds yet."""
        self.end_left()
        self.kv.add_sequence(self._next)
        return self._named()

    def fork(self, sequence: int, length: int = -1) -> int:
        """A fork that nobody holds yet, of the first `length` tokens (-1: all)."""
        self.end_left()
        self.kv.fork_sequence(sequence, self._next, length)
        return self._named()

    def restore(self, path: str, identity: dict[str, str], any_numerics: bool) -> int:
        """A sequence of a snapshot that nobody holds yet."""
        self.end_left()
        snapshot.restore_sequence(
            self.kv, self._next, path, identity=identity, any_numerics=any_numerics
        )
        return self._named()

    def take(self, fetch: ChunkFetch, count: int) -> int:
        """A sequence of the first chunks of a fetch that nobody holds yet; 0: an empty one."""
        if count == 0:
            return self.add()
        self.end_left()
        self.kv.take_chunks(self._next, fetch, count)
        return self._named()

    def drop(self, sequences: Iterable[int]) -> None:
        """Removes sequences that nobody holds."""
        for sequence in sequences:
            self.kv.remove_sequence(sequence)

    def hold(self, sequences: Iterable[int]) -> None:
        """Counts one more holder for each element."""
        self._holders.update(sequences)

    def release(self, sequences: Iterable[int]) -> None:
        """Counts one holder less for each element; the last one removes the sequence."""
        for sequence in sequences:
            if self._holders[sequence] > 1:
                self._holders[sequence] -= 1
                continue
            self.kv.remove_sequence(sequence)
            del self._holders[sequence]

    def replace(self, old: list[int], new: list[int]) -> None:
        """`new` are held in place of `old`."""
        self.hold(new)
        self.release(old)

    def holders(self, sequence: int) -> int:
        return self._holders[sequence]

    def end_left(self) -> None:
        """Ends what another thread's call has kept from ending."""
        for _ in range(len(self.left)):
            self.left.popleft().end()

    def _named(self) -> int:
        self._next += 1
        return self._next - 1


class Rows:
    """The sequence of each row of a batch; apart from its QuireCache, whose end releases them."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.held: list[int] = []
        self._forward: list[int] | None = None  # new sequences of the open forward

    def set(self, new: list[int]) -> None:
        """The rows hold `new` from now on."""
        self.sequences.replace(self.held, new)
        self.held = new

    def begin_forward(self, sequences: list[int], lengths: list[int], new: list[int]) -> None:
        """Opens a forward of the KVCache; `new` are those of its sequences that no row holds."""
        self.sequences.end_left()
        self.sequences.kv.begin_forward(sequences, lengths)
        self._forward = new

    def end_forward(self, held: list[int]) -> None:
        """Its tokens count, and the rows hold `held`."""
        self.sequences.kv.end_forward()
        self._forward = None
        self.set(held)

    def abort_forward(self) -> None:
        """Ends an open forward; everything is as before it."""
        if self._forward is not None:
            self.sequences.kv.abort_forward()
            new, self._forward = self._forward, None
            self.sequences.drop(new)

    def end(self) -> None:
        """What the end of the QuireCache does, in any thread."""
        try:
            self.abort_forward()
            while self.held:
                self.sequences.release(self.held[-1:])
                self.held.pop()
        except errors.BadStateError:  # another thread is in a call
            self.sequences.left.append(self)
        except errors.ClosedError:  # the KVCache is, and has nothing any more
            pass
