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

__all__ = ["NULL_BLOCK", "KvGroup", "KvRows", "common_block", "groups_of", "has_states"]

NULL_BLOCK = 0  # in the table of a group with a window: before the window, nobody's memory

# Kinds that are derived from these keep something else, too.
_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"
_STATE = "MambaSpec"
_STATE_WINDOW = 2  # a state is all that a token needs of the one before it

# By torch's name of an element type of KV: the passport's, and bytes. Codes of FP8 are bytes: what
# they stand for is in the passport's numerics.
_ELEMENTS = {
    "bfloat16": ("bf16", 2),
    "float16": ("f16", 2),
    "float32": ("f32", 4),
    "uint8": ("u8", 1),
    "float8_e4m3fn": ("u8", 1),
    "float8_e5m2": ("u8", 1),
}


@dataclasses.dataclass(frozen=True)
class KvRows:
    """A token's keys [heads, key_dim] and values [heads, value_dim] in a layer. dtype: the
    passport's name of their elements, of element_bytes each."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    element_bytes: int

    @classmethod
    def of(cls, spec: Any) -> KvRows | None:
        """None: a page has something else than these rows of its tokens."""
        dtype, width = _ELEMENTS.get(
            str(getattr(spec, "dtype", None)).removeprefix("torch."), ("", 0)
        )
        key_dim = int(getattr(spec, "head_size", 0))
        value_dim = int(getattr(spec, "head_size_v", None) or key_dim)
        heads = int(getattr(spec, "num_kv_heads", 0))
        page_bytes = int(spec.block_size) * heads * (key_dim + value_dim) * width
        if type(spec).__name__ == "MLAAttentionSpec" or page_bytes != spec.page_size_bytes:
            return None
        return cls(heads, key_dim, value_dim, dtype, width)


@dataclasses.dataclass(frozen=True)
class KvGroup:
    """layer_names: in order. block_size: tokens. page_bytes: of a block of one layer. rows: what a
    page has of each token; None: something else than keys and values. window: tokens that a token
    attends to, itself among them; None: all before it. chunk_tokens: a multiple of the block sizes
    of all groups. state: what a recurrent state of one layer is, where a page has one: that behind
    all tokens up to the block's end; else empty. Such a group has a window of two tokens."""

    layer_names: tuple[str, ...]
    block_size: int
    page_bytes: int
    rows: KvRows | None
    window: int | None
    chunk_tokens: int
    state: str = ""

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
        kind = "all" if self.window is None else f"window-{self.window}"
        parts = list(self.layer_names)
        if self.state:
            kind = "state"
            parts.append(self.state)
        return f"{kind}/{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"

    @property
    def canonical_identity(self) -> str:
        """The same of canonical chunks. They lack the tokens that are before every window, in whole
        blocks of the process that saves them. Larger blocks of another process would be filled in
        part, and vLLM's prefix cache gives whole ones to others."""
        lacking = self.never_needed * self.block_size
        return f"{self.identity}/from-{lacking}" if lacking else self.identity

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


def _window_of(spec: Any) -> int:
    window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    if window < 2:
        raise errors.BadArgumentError(f"QuireConnector: a window of {window} tokens")
    return window


def _check_states(spec: Any, names: str) -> None:
    """States that a block has behind its last token."""
    mode = str(getattr(spec, "mamba_cache_mode", "none"))
    if mode != "align":
        raise errors.BadArgumentError(
            f"QuireConnector: the recurrent states of {names} and others are not kept at the ends "
            f"of blocks (mamba_cache_mode is {mode!r}); give --enable-prefix-caching"
        )
    if int(getattr(spec, "num_speculative_blocks", 0)):
        raise errors.BadArgumentError(
            f"QuireConnector: the recurrent states of {names} and others are those of drafts, too; "
            "it takes no speculative decoding with such a model"
        )


def _page_bytes(spec: Any, names: str) -> int:
    """What a block has in one layer: whole bytes for each of its tokens."""
    size, tokens = int(spec.page_size_bytes), int(spec.block_size)
    if type(spec).__name__ == _STATE:  # without what fills it up to the page of other groups
        state_bytes = int(getattr(spec, "state_content_size_bytes", size))
        size = min(size, -(-state_bytes // tokens) * tokens)
    if size % tokens:
        raise errors.BadArgumentError(
            f"QuireConnector: a page of {names} and others has {size} bytes, which are not whole "
            f"bytes for each of {tokens} tokens"
        )
    return size


def _group_of(group: Any, chunk_tokens: int) -> KvGroup:
    spec = group.kv_cache_spec
    kind, names = type(spec).__name__, ", ".join(list(group.layer_names)[:2])
    if kind not in (*_ATTENTION, _WINDOW, _STATE):
        raise errors.BadArgumentError(
            f"QuireConnector: the KV of {names} and others is of kind {kind}; it takes attention "
            "to everything or through a sliding window, and recurrent states"
        )
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise errors.BadArgumentError(
            f"QuireConnector: vLLM keeps the KV of {names} and others in a way of its own"
        )
    window, state = None, ""
    if kind == _WINDOW:
        window = _window_of(spec)
    elif kind == _STATE:
        _check_states(spec, names)
        window, state = _STATE_WINDOW, f"{spec.mamba_type}/{spec.shapes}/{spec.dtypes}"
    return KvGroup(
        layer_names=tuple(_layer_order(group.layer_names)),
        block_size=int(spec.block_size),
        page_bytes=_page_bytes(spec, names),
        rows=KvRows.of(spec),
        window=window,
        chunk_tokens=chunk_tokens,
        state=state,
    )


def groups_of(kv_cache_config: Any, chunk_tokens: int) -> list[KvGroup]:
    """The groups of vLLM's configuration, in its order. The worker may have no layer of some.

    Raises BadArgumentError for a kind of KV that the connector cannot keep.
    """
    return [_group_of(group, chunk_tokens) for group in kv_cache_config.kv_cache_groups]


def has_states(kv_cache_config: Any) -> bool:
    """Whether a group has recurrent states."""
    groups = kv_cache_config.kv_cache_groups
    return any(type(group.kv_cache_spec).__name__ == _STATE for group in groups)


def common_block(kv_cache_config: Any) -> int:
    """Tokens that are whole blocks of every group."""
    return math.lcm(*(int(g.kv_cache_spec.block_size) for g in kv_cache_config.kv_cache_groups))
