"""Pages of SGLang's host pool, and of tensors, as rows of bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from quire import errors

__all__ = ["HostPages", "rows_of"]

_log = logging.getLogger("quire.sglang")


def rows_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in the CPU's memory as uint8 [rows, n], in the order of its elements.
    Rows are n bytes each and equally far apart; nothing is copied.

    Raises:
        BadArgumentError: it is no such tensor, or has gaps at more than one distance.
    """
    import torch  # as SGLang does; the rest of Quire does without

    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        raise errors.BadArgumentError(
            "a page must be a torch tensor in the CPU's memory, not "
            f"{getattr(tensor, 'device', type(tensor).__name__)}"
        )
    # Innermost first: (how many, bytes from one to the next), what lies together as one.
    parts = [(tensor.element_size(), 1)]
    for count, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        inner, step = parts[-1]
        if count == 1:
            continue
        if stride * tensor.element_size() == inner * step:
            parts[-1] = (inner * count, step)
        else:
            parts.append((count, stride * tensor.element_size()))
    row, (rows, apart) = parts[0][0], parts[1] if len(parts) == 2 else (1, parts[0][0])
    if len(parts) > 2 or tensor.numel() == 0 or apart < row:
        raise errors.BadArgumentError(
            f"a page of the shape {tuple(tensor.shape)} and the strides {tensor.stride()} has more "
            "than one row of gaps"
        )
    flat = tensor.as_strided((1,), (1,)).view(torch.uint8).numpy()
    return np.lib.stride_tricks.as_strided(flat, (rows, row), (apart, 1))


class HostPages:
    """The pages of a HostKVCache: where they lie, and what they are.

    In place, a page is read and written where the pool has it; a pool that gives no views of its
    pages has them copied by its own methods.

    Raises:
        BadArgumentError: it is no pool of pages.
    """

    def __init__(self, pool: Any) -> None:
        missing = [
            name
            for name in (
                "layout", "page_size", "get_data_page", "get_dummy_flat_data_page",
                "set_from_flat_data_page",
            )
            if not hasattr(pool, name)
        ]  # fmt: skip
        if missing:
            raise errors.BadArgumentError(
                f"QuireHiCacheStorage: the host pool {type(pool).__name__} has no "
                f"{', '.join(missing)}; pools of several kinds of pages are not supported"
            )
        self._pool = pool
        self.tokens = int(pool.page_size)
        flat = pool.get_dummy_flat_data_page()
        self.bytes = int(flat.numel() * flat.element_size())
        self.layout = f"{pool.layout}/{str(flat.dtype).removeprefix('torch.')}/page{self.tokens}"
        self.rows = 1
        self.in_place = self._gives_views()

    def _gives_views(self) -> bool:
        """Whether the pool gives a page as a view of its memory, in the order of its flat pages."""
        try:
            first, again = self._view(0), self._view(0)
            flat = rows_of(self._pool.get_data_page(0).contiguous())
        except (errors.BadArgumentError, TypeError) as error:
            _log.info("QuireHiCacheStorage: pages are copied, as the pool has no views: %s", error)
            return False
        # Copies that are both alive have different addresses.
        if first.ctypes.data != again.ctypes.data or flat.tobytes() != first.tobytes():
            _log.info("QuireHiCacheStorage: pages are copied, as the pool gives copies of them")
            return False
        self.rows = first.shape[0]
        return True

    def _view(self, index: int) -> np.ndarray[Any, Any]:
        return self.of_size(rows_of(self._pool.get_data_page(index, flat=False)))

    def of_size(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows. BadArgumentError if they are not those of a page."""
        if rows.size != self.bytes:
            raise errors.BadArgumentError(
                f"a page of {rows.size} bytes; those of the host pool have {self.bytes}"
            )
        return rows

    def first_tokens(self, host_indices: Any, count: int) -> list[int]:
        """The index of the first token of each of `count` pages, whose tokens stand in the pool one
        after the other.

        Raises:
            BadArgumentError: they do not, or their number is another one.
        """
        indices = np.asarray(host_indices)
        if indices.shape != (count * self.tokens,):
            raise errors.BadArgumentError(
                f"{count} pages of {self.tokens} tokens have {indices.shape} host indices"
            )
        pages = indices.reshape(count, self.tokens)
        firsts = pages[:, :1]
        if (firsts < 0).any() or (pages != firsts + np.arange(self.tokens)).any():
            raise errors.BadArgumentError("host indices of a page do not follow each other")
        return [int(first) for first in firsts[:, 0]]

    def read(self, index: int) -> np.ndarray[Any, Any]:
        """The page that begins at this token, as rows; in place if that can be."""
        if self.in_place:
            return self._view(index)
        return self.flat(self._pool.get_data_page(index))

    def write(self, index: int, fill: Callable[[np.ndarray[Any, Any]], None]) -> None:
        """`fill` writes the rows that it is given to the page that begins at this token."""
        if self.in_place:
            fill(self._view(index))
            return
        page = self.new()
        fill(rows_of(page))
        self._pool.set_from_flat_data_page(index, page)

    def new(self) -> Any:
        """A tensor for one flat page."""
        return self._pool.get_dummy_flat_data_page()

    def flat(self, value: Any) -> np.ndarray[Any, Any]:
        """The bytes of a page that SGLang hands over, as rows.

        Raises:
            BadArgumentError: it has not the size of a page.
        """
        return self.of_size(rows_of(value.contiguous() if hasattr(value, "contiguous") else value))
