"""TVM's global functions ``vm.builtin.*`` as they are at one moment, as methods on NumPy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import Shape

_NAMES = [
    name.removeprefix("vm.builtin.")
    for name in tvm_ffi.registry.list_global_func_names()
    if name.startswith("vm.builtin.")
]


def function(name: str) -> Any:
    return tvm_ffi.get_global_func("vm.builtin." + name)


class Calls:
    """The functions that have TVM's names now; later replacements do not reach it."""

    def __init__(self) -> None:
        self._functions = {name: function(name) for name in _NAMES}

    def __getattr__(self, name: str) -> Any:
        found = self._functions
        for full in (name, "kv_state_" + name, "attention_kv_cache_" + name):
            if full in found:
                return found[full]
        raise AttributeError(name)

    # ---- What takes more than the arguments as they come.

    def begin(
        self,
        cache: Any,
        ids: Iterable[int],
        lengths: Iterable[int],
        parents: Iterable[int] | None = None,
    ) -> None:
        tree = None if parents is None else Shape(list(parents))
        self.begin_forward(cache, Shape(list(ids)), Shape(list(lengths)), tree)

    def attend(self, cache: Any, layer: int, qkv: np.ndarray, kv_heads: int) -> np.ndarray:
        """Fused attention; the scale is that of the head dimension."""
        rows, heads, dim = qkv.shape
        o = tvm.runtime.tensor(np.full((rows, heads - 2 * kv_heads, dim), np.nan, qkv.dtype))
        self.attention_with_fused_qkv(cache, layer, dim**-0.5, tvm.runtime.tensor(qkv), o)
        return o.numpy()

    def forward(
        self,
        cache: Any,
        ids: Sequence[int],
        lengths: Sequence[int],
        qkv: np.ndarray,
        kv_heads: int,
        parents: Sequence[int] | None = None,
    ) -> np.ndarray:
        """A whole forward; qkv is [layers, rows, heads, dim], the result [layers, rows, Hq, dim]."""
        self.begin(cache, ids, lengths, parents)
        outputs = [self.attend(cache, layer, part, kv_heads) for layer, part in enumerate(qkv)]
        self.end_forward(cache)
        return np.stack(outputs)

    def commit(self, cache: Any, ids: Iterable[int], leaves: Iterable[int]) -> None:
        self.commit_accepted_token_tree_nodes(cache, Shape(list(ids)), Shape(list(leaves)))

    def positions(self, cache: Any) -> list[int]:
        return [int(p) for p in self.get_query_positions(cache).numpy()]

    def kv(
        self, cache: Any, seq: int, start: int, end: int, shape: tuple[int, int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the tokens; `shape` is layers, heads, dim."""
        layers, heads, dim = shape
        empty = np.full((layers, end - start, heads, dim), np.nan, "float32")
        k, v = tvm.runtime.tensor(empty), tvm.runtime.tensor(empty)
        self.debug_get_kv(cache, seq, start, end, k, v)
        return k.numpy(), v.numpy()


def unused_kernel(*_: Any) -> None:
    raise AssertionError("Quire called a kernel")


def create_arguments(
    *,
    sequences: int = 8,
    tokens: int = 64,
    chunk: int = 64,
    page_size: int = 4,
    windows: bool = False,
    layer_window: int | None = None,
    kinds: Sequence[int] = (0, 0),
    partition: Sequence[int] | None = None,
    heads: tuple[int, int] = (2, 1),
    dim: int = 8,
    value_dim: int | None = None,
    rope_mode: int = 0,
    theta: float = 10000.0,
    rotation: Any = None,
    dtype: str = "float32",
    transfer: bool = False,
) -> list[Any]:
    """The 28 arguments of paged_attention_kv_cache_create, with kernels that must not be called."""
    sizes = [sequences, tokens, chunk, page_size, int(windows)]
    if layer_window is not None:
        sizes.append(layer_window)
    kernels: list[Any] = [["tirx", unused_kernel] for _ in range(7)]
    return [
        Shape(sizes),
        Shape([0, len(kinds)] if partition is None else partition),
        heads[0],
        heads[1],
        dim,
        dim if value_dim is None else value_dim,
        Shape(list(kinds)),
        transfer,
        rope_mode,
        1.0,
        theta,
        None,
        tvm.runtime.tensor(np.zeros((), dtype)),
        unused_kernel,
        unused_kernel,
        *kernels,
        [],
        [unused_kernel],
        rotation,
        unused_kernel,
        unused_kernel,
        unused_kernel,
    ]


class OneCache:
    """One of Quire's caches behind TVM's names, with its shape and random inputs; with `arguments`,
    what creation makes of these."""

    def __init__(self, arguments: list[Any] | None = None, **options: Any) -> None:
        self.calls = Calls()
        self.layers = len(options.get("kinds", (0, 0)))
        self.qo_heads, self.kv_heads = options.get("heads", (2, 1))
        self.dim = options.get("dim", 8)
        given = create_arguments(**options) if arguments is None else arguments
        self.cache = self.calls.paged_attention_kv_cache_create(*given)
        self._random = np.random.default_rng(1)
        self._ids = itertools.count()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.calls, name)
        return lambda *args: call(self.cache, *args)

    def qkv(self, rows: int) -> np.ndarray:
        shape = (self.layers, rows, self.qo_heads + 2 * self.kv_heads, self.dim)
        return self._random.standard_normal(shape).astype("float32")

    def forward(
        self,
        ids: Sequence[int],
        lengths: Sequence[int],
        qkv: np.ndarray | None = None,
        parents: Sequence[int] | None = None,
    ) -> np.ndarray:
        rows = self.qkv(sum(lengths)) if qkv is None else qkv
        return self.calls.forward(self.cache, ids, lengths, rows, self.kv_heads, parents)

    def kv_of(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        length = self.get_sequence_length(seq)
        return self.kv(seq, 0, length, (self.layers, self.kv_heads, self.dim))

    def digest(self) -> int:
        self.cache.check_invariants()
        return int(self.cache.state_digest())


def plain_attention(
    qkv: np.ndarray, visible: Sequence[Sequence[int]], kv_heads: int
) -> np.ndarray:
    """Attention of each row of [rows, heads, dim] to the rows that it sees, in float64."""
    rows, heads, dim = qkv.shape
    qo_heads = heads - 2 * kv_heads
    x = qkv.astype(np.float64)
    o = np.zeros((rows, qo_heads, dim))
    for row, sees in enumerate(visible):
        for head in range(qo_heads):
            kv = head // (qo_heads // kv_heads)
            scores = x[list(sees), qo_heads + kv] @ x[row, head] * dim**-0.5
            weights = np.exp(scores - scores.max())
            o[row, head] = weights @ x[list(sees), qo_heads + kv_heads + kv] / weights.sum()
    return o


def visible_rows(lengths: list[int], window: int, sinks: int, span: bool) -> list[list[int]]:
    """What each row of these forwards of one sequence with a window sees; `span`: tvm_window_span."""
    rows: list[list[int]] = []
    slid = 0  # behind the sinks, as of the last forward
    for length in lengths:
        for _ in range(length):
            row = len(rows)
            hidden = slid if span else max(0, row + 1 - window)
            rows.append([*range(min(sinks, row + 1)), *range(sinks + hidden, row + 1)])
        slid = max(slid, len(rows) - window)
    return rows


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from a root to `node`; none for -1."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
