"""One forward of a model over the rows of a QuireCache."""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.hf._sequences import Rows

__all__ = ["Forward"]

_LOG2_E = math.log2(math.e)
_WORD_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: == on these tells -0 from 0 and takes a NaN for itself."""
    return tensor.view(_WORD_OF_BYTES[tensor.element_size()])


class Forward:
    """Begins with the tensors of layer 0, ends with the last layer.

    Rows that hold the same sequence, hide the same columns and have equal queries, keys and values
    are a group: the cache computes and stores its first row, the lead, alone. Should they differ in
    a later layer (a matrix product may round equal rows apart), each row goes on by itself from
    there. Tensors are [rows, heads, new columns, dim], as transformers has them.

    shown: bool [rows, new columns], False where nothing is stored; None = True everywhere.
    """

    def __init__(self, rows: Rows, shown: torch.Tensor | None, tensors: list[torch.Tensor]) -> None:
        self.next_layer = 0
        self.modules: list[Any] = []
        self._rows = rows
        self._kv = rows.sequences.kv
        self._shown = shown
        self._batch, _, self.columns, _ = tensors[0].shape
        self._earlier: list[list[torch.Tensor]] = []
        self._leads, self._group_of_row = self._groups(tensors)
        self._open()

    def attend(
        self, tensors: list[torch.Tensor], scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Stores keys and values of the next layer; the output is [rows, new columns, heads, dim].

        tensors: queries, keys and values. sinks: a logit per query head that takes part in the
        softmax without a value.
        """
        if self._has_groups() and not self._still_equal(tensors):
            self._part()
        of_leads = [self._of_leads(tensor) for tensor in tensors]
        query, key, value = (self._stored(tensor) for tensor in of_leads)
        self._kv.append(self.next_layer, key, value)
        lse = None if sinks is None else query.new_empty(query.shape[:2], dtype=torch.float32)
        out = self._kv.attend(self.next_layer, query, lse=lse, sm_scale=scale)
        if sinks is not None and lse is not None:
            out = out * torch.sigmoid(lse / _LOG2_E - sinks.float()).unsqueeze(-1).to(out.dtype)
        if self._has_groups():
            self._earlier.append(of_leads)
        self.next_layer += 1
        return self._of_rows(out)

    def end(self) -> None:
        """The tokens count from now on."""
        self._rows.end_forward([self._sequences[group] for group in self._group_of_row])

    def abort(self) -> None:
        """The rows are as they were before; also after a failure of _part()."""
        self._rows.abort_forward()

    # ---- Groups

    def _groups(self, tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        held: list[int | None] = [*self._rows.held] or [None] * self._batch
        last_keys = _bits(tensors[1])[:, :, -1].contiguous().numpy()
        leads: list[int] = []
        group_of_row: list[int] = []
        alike: dict[tuple[int | None, bytes], list[int]] = {}  # groups that may be equal
        for row in range(self._batch):
            candidates = alike.setdefault((held[row], last_keys[row].tobytes()), [])
            for group in candidates:
                if self._equal(tensors, leads[group], row):
                    group_of_row.append(group)
                    break
            else:
                candidates.append(len(leads))
                group_of_row.append(len(leads))
                leads.append(row)
        return leads, group_of_row

    def _equal(self, tensors: list[torch.Tensor], lead: int, row: int) -> bool:
        if self._shown is not None and not torch.equal(self._shown[lead], self._shown[row]):
            return False
        return all(torch.equal(_bits(tensor)[lead], _bits(tensor)[row]) for tensor in tensors)

    def _has_groups(self) -> bool:
        return len(self._leads) < self._batch

    def _still_equal(self, tensors: list[torch.Tensor]) -> bool:
        return all(
            row == self._leads[group] or self._equal(tensors, self._leads[group], row)
            for row, group in enumerate(self._group_of_row)
        )

    def _open(self) -> None:
        """Begins the forward of the cache. Only a sequence that no other row holds is made longer;
        in place of others there is a fork until the end."""
        sequences = self._rows.sequences
        new: list[int] = []
        self._sequences: list[int] = []
        try:
            for group, lead in enumerate(self._leads):
                old = self._rows.held[lead] if self._rows.held else None
                if old is not None and sequences.holders(old) == self._group_of_row.count(group):
                    self._sequences.append(old)
                    continue
                new.append(sequences.add() if old is None else sequences.fork(old))
                self._sequences.append(new[-1])
            batch = [
                (sequence, length)
                for sequence, length in zip(self._sequences, self._lengths(), strict=True)
                if length
            ]
            self._rows.begin_forward([s for s, _ in batch], [n for _, n in batch], new)
        except BaseException:
            sequences.drop(new)
            raise

    def _part(self) -> None:
        """From here on each row by itself: what is stored of a group is stored for all its rows.

        A forward of the cache runs all of every layer, so this attends once more and drops that.
        """
        self.abort()
        earlier = [[tensor[self._group_of_row] for tensor in layer] for layer in self._earlier]
        self._leads = list(range(self._batch))
        self._group_of_row = self._leads
        self._earlier = []
        self._open()
        for layer, tensors in enumerate(earlier):
            query, key, value = (self._stored(tensor) for tensor in tensors)
            self._kv.append(layer, key, value)
            self._kv.attend(layer, query)

    # ---- Between the layouts: [rows, heads, columns, dim] of transformers, [leads, columns, heads,
    # dim], and [tokens, heads, dim] of the cache, where tokens are the columns that are shown.

    def _lengths(self) -> list[int]:
        if self._shown is None:
            return [self.columns] * len(self._leads)
        return [int(count) for count in self._shown[self._leads].sum(dim=1)]

    def _of_leads(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.transpose(1, 2)
        return tensor[self._leads] if self._has_groups() else tensor

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shown is None:
            return tensor.reshape(-1, *tensor.shape[2:])
        return tensor[self._shown[self._leads]]

    def _of_rows(self, out: torch.Tensor) -> torch.Tensor:
        if self._shown is None:
            out = out.view(len(self._leads), self.columns, *out.shape[1:])
        else:
            all_columns = out.new_zeros(len(self._leads), self.columns, *out.shape[1:])
            all_columns[self._shown[self._leads]] = out
            out = all_columns
        return out[self._group_of_row] if self._has_groups() else out
