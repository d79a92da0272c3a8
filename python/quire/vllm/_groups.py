"""Groups of layers: those that have their blocks in common, as vLLM's hybrid manager forms them.

Each group has a key space of its own, with a passport that names it. So the chunks of a group that
attends to everything and of one with a window are asked for apart: of the latter only those in the
window are read, and each group's chunks are copied with its own block numbers and page size. (One
chunk with the sections of all groups would be read whole, which is mostly windows' KV for nothing.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

from quire import errors

__all__ = ["NULL_BLOCK", "KvGroup", "common_block", "groups_of"]

NULL_BLOCK = 0  # in the table of a group with a window: before the window, nobody's memory

# Whether it has a window. Kinds that are derived from these keep something else, too.
_KINDS = {"FullAttentionSpec": False, "MLAAttentionSpec": False, "SlidingWindowSpec": True}


@dataclasses.dataclass(frozen=True)
class KvGroup:
    """layer_names: in order. block_size: tokens. page_bytes: of a block of one layer. window:
    tokens that a token attends to, itself among them; None: all before it. chunk_tokens: a multiple
    of the block sizes of all groups."""

    layer_names: tuple[str, ...]
    block_size: int
    page_bytes: int
    window: int | None
    chunk_tokens: int

    @property
    def part(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of a chunk in one layer."""
        return self.page_bytes * self.part

    @property
    def identity(self) -> str:
        """What tells its chunks from those of the model's other groups."""
        names = hashlib.sha256("\n".join(self.layer_names).encode()).hexdigest()[:16]
        return f"{'all' if self.window is None else f'window-{self.window}'}/{names}"

    def first_needed(self, border: int) -> int:
        """The first chunk that tokens behind chunk `border` attend to."""
        if self.window is None:
            return 0
        return max(0, border * self.chunk_tokens - (self.window - 1)) // self.chunk_tokens

    def lead(self, border: int) -> int:
        """Blocks of that chunk that are before the window."""
        if self.window is None:
            return 0
        begin = max(0, border * self.chunk_tokens - (self.window - 1))
        return begin % self.chunk_tokens // self.block_size

    @property
    def never_needed(self) -> int:
        """The first blocks of any chunk that are before the window of every border behind it."""
        return self.lead(1)


def _layer_order(names: Sequence[str]) -> list[str]:
    """Layers in the order of the numbers in their names."""

    def numbers(name: str) -> tuple[list[int], str]:
        return [int(part) for part in re.findall(r"\d+", name)], name

    return sorted(names, key=numbers)


def groups_of(kv_cache_config: Any, chunk_tokens: int) -> list[KvGroup]:
    """The groups of vLLM's configuration, in its order.

    Raises BadArgumentError for a kind of KV that the connector cannot keep.
    """
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        kind, names = type(spec).__name__, ", ".join(list(group.layer_names)[:2])
        if kind not in _KINDS:
            raise errors.BadArgumentError(
                f"QuireConnector: the KV of {names} and others is of kind {kind}; it takes "
                "attention to everything or through a sliding window"
            )
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise errors.BadArgumentError(
                f"QuireConnector: vLLM keeps the KV of {names} and others in a way of its own"
            )
        if spec.page_size_bytes % spec.block_size:
            raise errors.BadArgumentError(
                f"QuireConnector: a page of {spec.page_size_bytes} bytes is not whole bytes for "
                f"each of {spec.block_size} tokens"
            )
        window = None
        if _KINDS[kind]:
            window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
            if window < 2:
                raise errors.BadArgumentError(f"QuireConnector: a window of {window} tokens")
        found.append(
            KvGroup(
                layer_names=tuple(_layer_order(group.layer_names)),
                block_size=int(spec.block_size),
                page_bytes=int(spec.page_size_bytes),
                window=window,
                chunk_tokens=chunk_tokens,
            )
        )
    return found


def common_block(kv_cache_config: Any) -> int:
    """Tokens that are whole blocks of every group."""
    return math.lcm(*(int(g.kv_cache_spec.block_size) for g in kv_cache_config.kv_cache_groups))
