"""vLLM's blocks: verified chunks are copied in, full blocks out. One thread calls each object.

In the CPU's memory that is a copy each way. In a GPU's, torch copies, through pinned memory:

- A load copies a chunk into a slot of the pinned memory, and the slot into the blocks, on the
  stream that is current: the forward's, whose kernels therefore see it.
- A save gathers the blocks on that stream, too, so the next step, which may give them to others,
  comes after. A stream of its own then copies what was gathered into a slot, beside the forward.
- A slot is used again when the event behind its copy has passed. No call waits for the forward, but
  one that finds no free slot: it waits for the oldest copy.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import quire
from quire import errors
from quire.chunk_space import SectionName
from quire.vllm._order import KernelOrder

__all__ = [
    "Blocks",
    "CudaStream",
    "DeviceBlocks",
    "FetchedChunks",
    "HostBlocks",
    "Put",
    "Source",
    "Stream",
    "block_memory",
    "stream_of",
]

#: Called with memory and the blocks in it that a saved chunk lies in.
Put: TypeAlias = "Callable[[quire.BlockMemory, list[int]], None]"


class Source(Protocol):
    """Verified chunks."""

    def copy(
        self, layer: int, first: int, count: int, target: HostBlocks, blocks: list[int]
    ) -> None:
        """Copies a layer of chunks [first, first + count) into blocks of the target."""


class FetchedChunks:
    """Chunks of a fetch from `first` on, as a source of blocks."""

    def __init__(self, fetch: quire.ChunkFetch, first: int) -> None:
        self._fetch, self._first = fetch, first

    def copy(
        self, layer: int, first: int, count: int, target: HostBlocks, blocks: list[int]
    ) -> None:
        self._fetch.scatter(layer, target.memory, blocks, first=self._first + first, count=count)


class Blocks(Protocol):
    """vLLM's blocks of some layers."""

    def load(self, source: Source, count: int, blocks: list[int], lead: int = 0) -> None:
        """Fills blocks, the same number for each of the `count` chunks of the source; the first
        `lead` of the first chunk are left out. What is computed later on this stream reads them."""

    def save(self, blocks: list[int], put: Put, lead: int = 0) -> None:
        """Calls `put`, now or in a later call, with a chunk of the bytes that these blocks have
        now, behind `lead` blocks of zeros."""

    def finish(self, *, wait: bool = False) -> None:
        """Puts what has been copied since; with `wait` everything that was saved."""


def block_memory(layers: Sequence[Any], order: KernelOrder | None) -> quire.BlockMemory:
    """The sections of chunks in blocks. layers: NumPy arrays of uint8 [blocks, ...]. order: of
    keys and values in a block; None: chunks are blocks as they are."""
    if order is None:
        return quire.BlockMemory({("latent", i): each for i, each in enumerate(layers)})
    arrays: dict[SectionName, Any] = {}
    orders: dict[SectionName, quire.BlockOrder] = {}
    for i, each in enumerate(layers):
        arrays["key", i] = arrays["value", i] = each
        orders["key", i], orders["value", i] = order.key, order.value
    return quire.BlockMemory(arrays, orders)


class HostBlocks:
    """Blocks in the CPU's memory. layers: uint8 [blocks, ...] of each. part: blocks of a chunk.
    order: as for block_memory."""

    def __init__(
        self, layers: Sequence[Any], part: int, order: KernelOrder | None = None
    ) -> None:
        self._layers, self._part, self._order = list(layers), part, order
        # As NumPy's, since pinned memory is not a CPU's by its DLPack type.
        self.memory = block_memory([each.numpy() for each in self._layers], order)

    def write(self, layer: int, blocks: list[int], rows: Any) -> None:
        """rows: an array of bytes of as many blocks, one after the other."""
        import torch

        pages = self._layers[layer]
        pages[torch.tensor(blocks)] = torch.from_numpy(rows).reshape(
            len(blocks), *pages.shape[1:]
        )

    def load(self, source: Source, count: int, blocks: list[int], lead: int = 0) -> None:
        first = 0
        if lead > 0:
            self._load_behind(source, lead, blocks[: self._part - lead])
            first, blocks = 1, blocks[self._part - lead :]
        if count > first:
            for layer in range(len(self._layers)):
                source.copy(layer, first, count - first, self, blocks)

    @functools.cached_property
    def _chunk(self) -> HostBlocks:
        """Other blocks, of one chunk: through them go chunks of which only a part has blocks."""
        import torch

        shapes = [(self._part, *pages.shape[1:]) for pages in self._layers]
        zeros = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
        return HostBlocks(zeros, self._part, self._order)

    def _load_behind(self, source: Source, lead: int, blocks: list[int]) -> None:
        """The blocks of the first chunk but for `lead` of them."""
        for layer, rows in enumerate(self._chunk._layers):
            source.copy(layer, 0, 1, self._chunk, list(range(self._part)))
            self.write(layer, blocks, rows[lead:].numpy())

    def save(self, blocks: list[int], put: Put, lead: int = 0) -> None:
        if lead == 0:
            put(self.memory, blocks)
            return
        import torch

        for rows, pages in zip(self._chunk._layers, self._layers, strict=True):
            rows[:lead] = 0
            rows[lead:] = pages[torch.tensor(blocks)]
        put(self._chunk.memory, list(range(self._part)))

    def finish(self, *, wait: bool = False) -> None:
        """Nothing is left to do."""


class Event(Protocol):
    """A point of a stream, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether everything before it has been done."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Stream(Protocol):
    """What a device does one after the other, while the CPU goes on."""

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array that the device copies from and to by itself."""

    def run(self, work: Callable[[], object]) -> Event:
        """Work on the stream of the forward, and the event behind it."""

    def run_out(self, gather: Callable[[], Any], copy: Callable[[Any], object]) -> Event:
        """`gather` on the stream of the forward; `copy` of what it gives, beside what follows
        there; the event behind that."""


class CudaStream:
    """The streams of a CUDA (or ROCm) device, by torch."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def run(self, work: Callable[[], object]) -> Event:
        import torch

        work()
        return self._event(torch.cuda.current_stream(self._device))

    def run_out(self, gather: Callable[[], Any], copy: Callable[[Any], object]) -> Event:
        import torch

        gathered = gather()
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            copy(gathered)
        gathered.record_stream(self._out)  # its memory is not given to others before
        return self._event(self._out)

    def _event(self, stream: Any) -> Event:
        import torch

        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        stream.record_event(event)
        return event


def stream_of(device: Any) -> Stream | None:
    """None: its memory is the CPU's.

    Raises BadArgumentError for a device that is neither a CPU nor one of CUDA's.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise errors.BadArgumentError(
            f"QuireConnector: the KV is on {device}; it takes that of a CPU or of torch's cuda"
        )
    return CudaStream(device)


class _Copy(NamedTuple):
    event: Event
    slot: int
    put: Put | None


class DeviceBlocks:
    """Blocks in a device's memory.

    layers: uint8 [blocks, ...] of each, whose blocks have as many bytes in all layers. part: blocks
    of a chunk. staging_bytes: of pinned memory, rounded down to whole chunks, two at least: one is
    filled while the other is copied. order: as for block_memory, of what lies in pinned memory.
    """

    # A slot is free, in one entry of _copies, or of the call that runs. One at which the device has
    # failed is none of these: the device may be at it still. The numbers of a slot are those of its
    # chunk's blocks, behind the ones that are left out. In a slot a layer's blocks lie one after
    # the other, and then those of the next layer.

    def __init__(
        self,
        layers: Sequence[Any],
        part: int,
        stream: Stream,
        staging_bytes: int,
        order: KernelOrder | None = None,
    ) -> None:
        import torch

        self._part, self._stream = part, stream
        self._device = layers[0].device
        self._layers = [_widest(each) for each in layers]
        self._block_count = len(layers[0])
        page_bytes = layers[0][0].numel()
        ends = [part * page_bytes * i for i in range(len(layers) + 1)]
        self._bounds = list(zip(ends, ends[1:], strict=False))  # of each layer in a slot
        self._chunk_bytes = ends[-1]
        slots = max(2, staging_bytes // self._chunk_bytes)
        self._slots = stream.host_array((slots, self._chunk_bytes), torch.uint8)
        # Block numbers, which a device would else wait for its stream to read.
        self._numbers = stream.host_array((slots, part), torch.int64)
        pages = self._slots.view(-1, page_bytes)
        self._staging = HostBlocks([pages[part * i :] for i in range(len(layers))], part, order)
        self._free = list(range(slots))
        self._copies: deque[_Copy] = deque()  # oldest first

    def load(self, source: Source, count: int, blocks: list[int], lead: int = 0) -> None:
        self._check(blocks)
        for i in range(count):
            slot = self._take()
            try:
                for layer in range(len(self._layers)):
                    source.copy(layer, i, 1, self._staging, self._staged(slot))
            except BaseException:
                self._free.append(slot)
                raise
            left_out = lead if i == 0 else 0
            begin = i * self._part - (lead - left_out)
            self._number(slot, blocks[begin : (i + 1) * self._part - lead], left_out)
            event = self._stream.run(functools.partial(self._scatter, slot, left_out))
            self._copies.append(_Copy(event, slot, None))

    def save(self, blocks: list[int], put: Put, lead: int = 0) -> None:
        self._check(blocks)
        slot = self._take()
        self._number(slot, blocks, lead)
        event = self._stream.run_out(
            functools.partial(self._gather, slot, lead),
            lambda gathered: self._slots[slot].copy_(gathered, non_blocking=True),
        )
        self._copies.append(_Copy(event, slot, put))

    def finish(self, *, wait: bool = False) -> None:
        while self._copies and (wait or self._copies[0].event.query()):
            self._end_oldest()

    def _end_oldest(self) -> None:
        copy = self._copies.popleft()
        copy.event.synchronize()
        try:
            if copy.put is not None:
                copy.put(self._staging.memory, self._staged(copy.slot))
        finally:
            self._free.append(copy.slot)

    def _staged(self, slot: int) -> list[int]:
        """The blocks of a slot, in each layer of the pinned memory."""
        begin = slot * len(self._layers) * self._part
        return list(range(begin, begin + self._part))

    def _take(self) -> int:
        """A slot that no copy reads or writes."""
        if not self._free:
            self.finish()
        while not self._free:
            if not self._copies:
                raise errors.BadStateError("the device has failed at all of the pinned memory")
            self._end_oldest()
        return self._free.pop()

    def _check(self, blocks: list[int]) -> None:
        """A device would stop at a wrong number, and the process with it."""
        if len(set(blocks)) != len(blocks) or not all(0 <= b < self._block_count for b in blocks):
            raise errors.BadArgumentError(
                f"blocks {blocks} are not different ones of {self._block_count}"
            )

    def _number(self, slot: int, blocks: list[int], lead: int) -> None:
        import torch

        self._numbers[slot, lead:].copy_(torch.tensor(blocks))

    # ---- On the device's stream

    def _on_device(self, array: Any) -> Any:
        return array.to(self._device, non_blocking=True)

    def _scatter(self, slot: int, lead: int) -> None:
        """The slot's bytes go into the blocks that its numbers say."""
        row, numbers = self._on_device(self._slots[slot]), self._on_device(self._numbers[slot])
        for pages, (begin, end) in zip(self._layers, self._bounds, strict=True):
            pages.index_copy_(0, numbers[lead:], self._as_pages(row[begin:end], pages)[lead:])

    def _gather(self, slot: int, lead: int) -> Any:
        """The bytes of the blocks that the slot's numbers say."""
        import torch

        numbers = self._on_device(self._numbers[slot])
        row = torch.zeros(self._chunk_bytes, dtype=torch.uint8, device=self._device)
        for pages, (begin, end) in zip(self._layers, self._bounds, strict=True):
            rows = self._as_pages(row[begin:end], pages)
            rows[lead:].copy_(pages.index_select(0, numbers[lead:]))
        return row

    def _as_pages(self, row: Any, pages: Any) -> Any:
        return row.view(pages.dtype).view(self._part, *pages.shape[1:])


def _widest(pages: Any) -> Any:
    """Bytes as the largest elements that they are whole ones of, wherever a chunk puts a layer: an
    index costs the same for 8 bytes as for one."""
    import torch

    strides = [s for s, n in zip(pages.stride(), pages.shape, strict=True) if n > 1][:-1]
    for dtype, size in ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2)):
        sizes = (*strides, pages.shape[-1], pages.storage_offset(), pages.data_ptr())
        if all(each % size == 0 for each in sizes) and pages.stride(-1) == 1:
            return pages.view(dtype)
    return pages
