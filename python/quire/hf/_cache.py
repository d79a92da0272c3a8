"""quire.hf.QuireCache: a cache of transformers over quire.KVCache."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from quire import errors, snapshot
from quire._arrays import dtype_name, int_list
from quire._new_folder import new_folder
from quire._numbers import int64, real
from quire.hf._attention import NewKeys, register
from quire.hf._forward import Forward
from quire.hf._kept import Prompts, check_ids, keep_rows, space_of, take_rows
from quire.hf._layers import architecture_digest, layer_specs
from quire.hf._note import FILE, VERSION, read_note
from quire.hf._positions import Positions, are_counted
from quire.hf._sequences import Rows, Sequences
from quire.hf._weights import Weights
from quire.kv_cache import KVCache
from quire.store import ChunkStore

__all__ = ["QuireCache"]


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers asks of one layer; the tokens are in the QuireCache."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: QuireCache, index: int, window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.ref(cache)
        self._index = index
        self._window = window
        self.is_sliding = window > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the pages are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, torch.Tensor]:
        return self._whole().update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._whole().get_seq_length(self._index) + query_length, 0

    def get_seq_length(self) -> int:
        return self._whole().get_seq_length(self._index)

    def get_max_length(self) -> int:
        return self._window or -1

    def _whole(self) -> QuireCache:
        cache = self._cache()
        if cache is None:
            raise errors.BadStateError("QuireCache: a layer outlived the cache that it is of")
        return cache


class QuireCache(Cache):
    """``past_key_values`` of a model that was loaded with ``attn_implementation="quire"``.

    Each row of a batch is a sequence of its own length: padding is never stored. Rows that are
    equal so far are one sequence, so beams of one prompt hold it once, and choosing among beams
    copies nothing. :meth:`get_seq_length` counts columns of the batch, padding included, as
    transformers does.

    Every call works, or raises and has changed nothing. One thread at a time.

    Args:
        config: of the model; a decoder of text.
        token_capacity: tokens that fit, those of :meth:`fork` included; what rows share counts
            once.
        dtype: of the stored keys and values, as :class:`quire.LayerSpec` has it; None = that of
            the configuration, float32 if it has none. Models compute in it, or in float32.
        max_num_sequences: most rows at a time; twice as many while beams part.
        max_crop: most tokens that :meth:`crop` takes back in models with sliding layers.
        page_size: tokens; small pages waste less where many beams are short.
        threads: of the attention; 0 = ``torch.get_num_threads()``.

    Raises:
        BadArgumentError: a model or an argument that is not supported, by name.
        OutOfMemoryError: the pages do not fit.
    """

    def __init__(
        self,
        config: Any,
        *,
        token_capacity: int,
        dtype: Any = None,
        max_num_sequences: int = 128,
        max_crop: int = 64,
        page_size: int = 64,
        threads: int = 0,
    ) -> None:
        kv = KVCache(
            layer_specs(config, dtype),
            max_num_sequences=2 * max_num_sequences,
            token_capacity=token_capacity,
            max_pop=max_crop,
            page_size=page_size,
            threads=threads or torch.get_num_threads(),
        )
        self._setup(Sequences(kv), architecture_digest(config), max_crop)

    def _setup(self, sequences: Sequences, architecture: str, max_crop: int) -> None:
        """What all have, those of fork() too."""
        specs = sequences.kv.layers
        layers: list[Any] = [_Layer(self, index, spec.window) for index, spec in enumerate(specs)]
        super().__init__(layers=layers)
        self._architecture = architecture
        self._max_crop = max_crop
        # Besides float32; codes are made from bfloat16.
        self._computes_in = getattr(torch, specs[0].dtype)
        if self._computes_in in (torch.int8, torch.float8_e4m3fn):
            self._computes_in = torch.bfloat16
        self._rows = Rows(sequences)
        self._weights = Weights()
        self._positions = Positions()
        self._columns = 0
        # Which columns are no padding, bool [rows, columns]; None = all.
        self._shown: torch.Tensor | None = None
        self._forward: Forward | None = None
        self._new_shown: torch.Tensor | None = None  # of its columns
        self._new_positions = Positions()  # once it has ended
        weakref.finalize(self, self._rows.end).atexit = False

    @property
    def kv_cache(self) -> KVCache:
        """The cache beneath, for its counters: ``get_distinct_token_count()``, ``pages_in_use()``.
        Forks of this cache are in it, too. What changes it is not for callers."""
        return self._rows.sequences.kv

    # ---- What transformers calls

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, torch.Tensor]:
        """The new keys and values, for the attention "quire", which stores them."""
        return NewKeys(self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch: the longest row with its padding."""
        if self._forward is not None and layer_idx < self._forward.next_layer:
            return self._columns + self._forward.columns
        return self._columns

    @property
    def batch_size(self) -> int:
        """Rows; -1 while nothing is held."""
        return len(self._rows.held) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether anything is held."""
        return self._columns > 0

    def reset(self) -> None:
        """Drops everything; aborts an open forward first. Then any model of the configuration may
        go on."""
        self.abort_forward()
        self._rows.set([])
        self._weights.forget()
        self._positions = Positions()
        self._columns, self._shown = 0, None

    def abort_forward(self) -> None:
        """After a forward that did not end (an interrupt, an error of the model): what was held
        before it is held again. Nothing if there is none."""
        if self._forward is not None:
            self._forward.abort()
            self._forward = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` is. Copies nothing."""
        if getattr(beam_idx, "dtype", None) == torch.bool:
            raise errors.BadArgumentError(
                "QuireCache.reorder_cache: beam_idx has bools, and not a number of a row for each "
                "row; a mask of the rows to keep is for batch_select_indices"
            )
        self._select("reorder_cache", int_list(beam_idx, "beam_idx"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows. Copies nothing."""
        if int64(repeats, "repeats") < 1:
            raise errors.BadArgumentError(
                f"QuireCache.batch_repeat_interleave: repeats must be at least 1, not {repeats}"
            )
        rows = range(len(self._rows.held))
        self._select("batch_repeat_interleave", [row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows of `indices`: numbers, or a bool for each row."""
        self._check_idle("batch_select_indices")
        if not self._columns:
            return
        asked = torch.as_tensor(indices)
        if asked.dim() != 1:
            raise errors.BadArgumentError(
                f"QuireCache.batch_select_indices: indices has shape {tuple(asked.shape)}; give "
                "one number for each row to keep, or a bool for each row"
            )
        try:
            chosen = torch.arange(len(self._rows.held))[asked].tolist()
        except IndexError as error:
            raise errors.BadArgumentError(f"QuireCache.batch_select_indices: {error}") from error
        self._select("batch_select_indices", chosen)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` columns; 0 does nothing."""
        count = -int64(tokens_to_remove, "tokens_to_remove")
        if count < 0 or count > self._columns:
            raise errors.BadArgumentError(
                f"QuireCache.crop: tokens_to_remove is {tokens_to_remove}; it must be 0, or the "
                f"negative of a number of the {self._columns} columns that are held"
            )
        self._check_idle("crop")
        if count == 0:
            return
        if count == self._columns:
            self.reset()
            return
        self._shorten(count)
        self._columns -= count
        self._shown = None if self._shown is None else self._shown[:, :-count]

    # ---- Beyond transformers

    def fork(self) -> QuireCache:
        """A second cache with the same content. Copies nothing: the pages are shared, and so is
        ``token_capacity``. ``copy.deepcopy`` does the same."""
        self._check_idle("fork")
        child = QuireCache.__new__(QuireCache)
        child._setup(self._rows.sequences, self._architecture, self._max_crop)
        child._rows.set([*self._rows.held])
        child._weights = self._weights.copy()
        child._positions = self._positions
        child._columns, child._shown = self._columns, self._shown
        return child

    def __deepcopy__(self, memo: dict[int, Any]) -> QuireCache:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("QuireCache cannot be pickled; use save() and load()")

    def save(self, path: str | os.PathLike[str], input_ids: torch.Tensor | None = None) -> None:
        """Writes everything into a new folder, whole or not at all.

        input_ids: the tokens, int64 [rows, at least get_seq_length()], padding included, for
        :meth:`load` to return; a cache does not see them otherwise. What generate() returned will
        do: it is one longer.

        Raises:
            FileExistsError: `path` is there already.
            BadStateError: nothing is held, a forward is open, or weights of the model's attention
                have changed since.
            BadArgumentError: the shape of input_ids.
        """
        self._check_held("save")
        held = self._rows.held
        if input_ids is not None:
            input_ids = self._checked_ids("save", input_ids)
        distinct = sorted(dict.fromkeys(held), key=lambda sequence: not self._length(sequence))
        fields = {
            "version": VERSION,
            "columns": self._columns,
            "rows": [distinct.index(sequence) for sequence in held],
            "lengths": [self._length(sequence) for sequence in distinct],
            "shown": None if self._shown is None else self._shown.int().tolist(),
            "input_ids": None if input_ids is None else input_ids.tolist(),
            "weights": self._weights.digests(),
            "counted": self._positions.are_counted,
            "must_count": self._positions.must_count,
        }
        note = json.dumps(fields).encode()
        with new_folder(Path(path)) as folder:
            for index, sequence in enumerate(distinct):
                if ids := self._ids(held.index(sequence), input_ids):
                    file = folder / FILE.format(index)
                    snapshot.save_sequence(
                        self.kv_cache, sequence, ids, file, identity=self._identity(), sampler=note
                    )

    def load(
        self, path: str | os.PathLike[str], *, any_numerics: bool = False
    ) -> torch.Tensor | None:
        """Holds what :meth:`save` wrote, in place of what was held; the same bits as before.

        any_numerics: also take what kernels of another CPU computed.

        Returns:
            The input_ids that save() was given, int64 [rows, get_seq_length()]; None without.

        Raises:
            NotFoundError: there is no such folder.
            IncompatibleError: another configuration, element type or kernel. Other weights are
                found by the next forward (BadStateError).
            CorruptError: a file is damaged.
            OutOfPagesError: it does not fit.
        """
        self._check_idle("load")
        folder = Path(path)
        fields = read_note(folder)
        if len(fields["weights"]) not in (0, len(self.layers)):
            raise errors.IncompatibleError(
                f"{folder}: has digests of the weights of {len(fields['weights'])} layers; this "
                f"configuration has {len(self.layers)}"
            )
        new: list[int] = []
        sequences = self._rows.sequences
        try:
            for index, length in enumerate(fields["lengths"]):
                file = os.fspath(folder / FILE.format(index))
                new.append(
                    sequences.restore(file, self._identity(), any_numerics)
                    if length
                    else sequences.add()
                )
                if self._length(new[-1]) != length:
                    raise errors.IncompatibleError(
                        f"{file}: has {self._length(new[-1])} tokens; {length} were noted"
                    )
        except BaseException:
            sequences.drop(new)
            raise
        self._rows.set([new[index] for index in fields["rows"]])
        self._weights.expect(fields["weights"])
        self._positions = Positions(fields["counted"], fields["must_count"])
        self._columns = int(fields["columns"])
        shown, ids = fields["shown"], fields["input_ids"]
        self._shown = None if shown is None else torch.tensor(shown, dtype=torch.bool)
        return None if ids is None else torch.tensor(ids)

    def keep(
        self,
        store: ChunkStore,
        input_ids: torch.Tensor,
        model: torch.nn.Module,
        *,
        cache_salt: str | bytes = b"",
        chunk_tokens: int = 64,
        ttl: float = 0,
    ) -> list[int]:
        """Puts what is held into a store, where :meth:`find` finds it, in another process too.
        Whole chunks of each row, and those that the store lacks; it writes them meanwhile.

        input_ids: the tokens, int64 [rows, at least get_seq_length()], padding included. model:
        whose keys and values these are; all its weights are digested once. cache_salt: only finds
        with the same one find it. chunk_tokens: of a chunk. ttl: seconds until it expires; 0 =
        never.

        Returns:
            How many tokens of each row the store has or takes; fewer where its queue is full.

        Raises:
            BadStateError: a forward is open, nothing is held, another model's keys and values are,
                weights of its attention have changed since, if only for one forward, tokens were
                not at the positions that counting them gives, or layers have slid more than
                ``max_crop`` tokens beyond a chunk that is new.
            BadArgumentError: the shape of input_ids, another configuration, or one that rotates
                keys by the length of the text ("longrope", "dynamic").
        """
        self._check_held("keep")
        ids = self._checked_ids("keep", input_ids)
        if not self._weights.are_of(model):
            raise errors.BadStateError("QuireCache.keep: holds keys and values of another model")
        self._positions.check_kept()
        space = space_of(
            self.kv_cache, store, model, self._architecture, cache_salt, chunk_tokens
        )
        rows = [self._ids(row, ids) for row in range(len(self._rows.held))]
        return keep_rows(self.kv_cache, self._rows.held, rows, space, ttl)

    def find(
        self,
        store: ChunkStore,
        input_ids: torch.Tensor,
        model: torch.nn.Module,
        *,
        attention_mask: torch.Tensor | None = None,
        cache_salt: str | bytes = b"",
        chunk_tokens: int = 64,
        timeout: float = 10.0,
    ) -> int:
        """Holds the longest beginning of `input_ids` that a store has of all rows, in place of what
        was held: the bits that were kept. At least one column is left to compute. Forwards that
        follow must count positions in tokens, without padding, as generate() does.

        input_ids: the whole prompts, int64 [rows, columns]. model: that will go on; only it may.
        attention_mask: zeros for padding, which stands on the left. cache_salt, chunk_tokens: as
        for :meth:`keep`. timeout: seconds after which what has not come is a miss.

        Returns:
            Columns that are held now; 0 if nothing was found.

        Raises:
            BadStateError: a forward is open.
            BadArgumentError: a shape, another configuration, one that :meth:`keep` does not take,
                or rows of several lengths in a model with sliding layers.
            OutOfPagesError: it does not fit; what was held is held.
        """
        self._check_idle("find")
        prompts = Prompts("find", input_ids, attention_mask)
        space = space_of(
            self.kv_cache, store, model, self._architecture, cache_salt, chunk_tokens
        )
        seconds = real(timeout, "timeout")
        weights = Weights()
        weights.expect_model(model, len(self.layers))
        columns, held = take_rows(self._rows.sequences, prompts, space, seconds)
        self._rows.set(held)
        self._weights = weights
        if columns == 0:
            self.reset()
            return 0
        self._positions = Positions(must_count=True)
        self._columns = columns
        shown = prompts.shown[:, :columns]
        self._shown = None if shown.all() else shown
        return columns

    # ---- Forwards

    def _attend(
        self,
        module: torch.nn.Module,
        layer: int,
        tensors: list[torch.Tensor],
        mask: torch.Tensor | None,
        position_ids: Any,
        scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer; layer 0 begins a forward and the last layer ends it."""
        if layer == 0 and self._forward is not None:
            raise self._open_forward("a forward")
        if layer != 0 and (self._forward is None or self._forward.next_layer != layer):
            expected = "layer 0" if self._forward is None else f"layer {self._forward.next_layer}"
            raise errors.BadStateError(
                f"QuireCache: attention of layer {layer} is called where {expected} is next"
            )
        try:
            self._weights.check(layer, module)
            self._check_tensors(layer, tensors)
            if layer == 0:
                self._new_shown = self._check_mask(tensors[0], mask)
                self._new_positions = self._check_positions(tensors[0], position_ids)
                self._begin(tensors)
            forward = self._forward
            assert forward is not None
            out = forward.attend(tensors, scale, sinks)
            forward.modules.append(module)
            if forward.next_layer == len(self.layers):
                self._end(forward)
            return out
        except BaseException:
            self.abort_forward()
            raise

    def _begin(self, tensors: list[torch.Tensor]) -> None:
        try:
            self._forward = Forward(self._rows, self._new_shown, tensors)
        except (errors.OutOfPagesError, errors.TooLargeError) as error:
            batch, _, columns, _ = tensors[0].shape
            raise type(error)(
                f"QuireCache: {batch} rows of {columns} new tokens do not fit: {error} "
                "(token_capacity and max_num_sequences of the QuireCache)"
            ) from error

    def _end(self, forward: Forward) -> None:
        shown = self._shown_with(forward.columns)
        weights = self._weights.after(forward.modules)
        forward.end()
        self._forward = None
        self._shown = shown
        self._columns += forward.columns
        self._positions = self._new_positions
        self._weights = weights

    def _shown_with(self, new: int) -> torch.Tensor | None:
        known = self._new_shown if self._shown is None else self._shown
        if known is None:
            return None
        parts = [(self._shown, self._columns), (self._new_shown, new)]
        return torch.cat(
            [
                torch.ones(len(known), columns, dtype=torch.bool) if shown is None else shown
                for shown, columns in parts
            ],
            dim=1,
        )

    def _check_tensors(self, layer: int, tensors: list[torch.Tensor]) -> None:
        spec = self.kv_cache.layers[layer]
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        dims = (spec.qk_head_dim, spec.qk_head_dim, spec.v_head_dim)
        rows = len(self._rows.held) or tensors[0].shape[0]
        columns = tensors[0].shape[2] if self._forward is None else self._forward.columns
        if rows == 0 or columns == 0:
            raise errors.BadArgumentError(
                f"QuireCache: a forward of {rows} rows and {columns} new columns; give at least "
                "one token"
            )
        computed = {torch.float32, self._computes_in}
        if not {tensor.dtype for tensor in tensors} <= computed:
            raise errors.BadArgumentError(
                f"QuireCache: layer {layer} brings {tensors[1].dtype}, and {spec.dtype} is stored; "
                f"make the QuireCache with dtype={dtype_name(tensors[1].dtype)!r}"
            )
        names = ("queries", "keys", "values")
        for name, tensor, head, dim in zip(names, tensors, heads, dims, strict=True):
            if tuple(tensor.shape) != (rows, head, columns, dim):
                raise errors.BadArgumentError(
                    f"QuireCache: layer {layer} brings {name} of shape {tuple(tensor.shape)}, and "
                    f"{(rows, head, columns, dim)} would fit the rows that are held and the "
                    "configuration (rows, heads, new columns, dim); reset() begins another batch"
                )

    def _check_mask(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Which of the new columns are stored; None = all."""
        rows, _, new, _ = query.shape
        if mask is None:
            if self._shown is not None:
                raise errors.BadArgumentError(
                    "QuireCache: rows have padding, so attention_mask is needed, of shape "
                    f"{(rows, self._columns + new)} with zeros where the padding is"
                )
            return None
        if tuple(mask.shape) != (rows, self._columns + new):
            raise errors.BadArgumentError(
                f"QuireCache: attention_mask has shape {tuple(mask.shape)}, and only "
                f"{(rows, self._columns + new)} is supported: zeros for padding"
            )
        whole = mask.bool()
        before, shown = whole[:, : self._columns], whole[:, self._columns :]
        stored = torch.ones_like(before) if self._shown is None else self._shown
        if not torch.equal(before, stored):
            raise errors.BadArgumentError(
                "QuireCache: attention_mask hides or shows other columns than when they were "
                "stored; only new columns may be hidden"
            )
        if shown.all():
            return None
        if not shown.any() or (shown.any(dim=1) & ~shown[:, -1]).any():
            raise errors.BadArgumentError(
                "QuireCache: attention_mask hides the last of the new columns; pad on the left"
            )
        is_after_tokens = (~whole & (whole.cumsum(dim=1) > 0))[:, self._columns :]
        if any(self.is_sliding) and is_after_tokens.any():
            raise errors.BadArgumentError(
                "QuireCache: padding after tokens of the same row is not supported for models with "
                "sliding layers, whose windows would count it"
            )
        return shown

    def _check_positions(self, query: torch.Tensor, position_ids: Any) -> Positions:
        """Those of all tokens after the forward."""
        rows, _, new, _ = query.shape
        shown = self._new_shown
        if shown is None:
            shown = torch.ones(rows, new, dtype=torch.bool)
        lengths = [self._length(sequence) for sequence in self._rows.held] or [0] * rows
        return self._positions.after(are_counted(position_ids, lengths, shown))

    # ---- Rows

    def _select(self, call: str, rows: list[int]) -> None:
        self._check_idle(call)
        if not self._columns:
            return
        held = self._rows.held
        if not rows or not all(0 <= row < len(held) for row in rows):
            raise errors.BadArgumentError(
                f"QuireCache.{call}: rows {rows} of a cache that holds rows 0 to {len(held) - 1}"
            )
        self._rows.set([held[row] for row in rows])
        self._shown = None if self._shown is None else self._shown[rows]

    def _shorten(self, columns: int) -> None:
        """Every row without its last `columns`. A sequence that others hold is forked where it is
        cut; an only holder's is popped, which is sure to work where a fork does."""
        sequences, held = self._rows.sequences, self._rows.held
        lengths: dict[int, int] = {}
        for row, sequence in enumerate(held):
            hidden = 0 if self._shown is None else int((~self._shown[row, -columns:]).sum())
            lengths[sequence] = self._length(sequence) - columns + hidden
        forks: dict[int, int] = {}
        try:
            for sequence, length in lengths.items():
                forks[sequence] = sequences.fork(sequence, length)
        except errors.BadStateError as error:
            sequences.drop(forks.values())
            raise errors.BadStateError(
                f"QuireCache.crop: {columns} columns cannot be taken back where layers slide, for "
                f"max_crop is {self._max_crop}: {error}"
            ) from error
        except BaseException:
            sequences.drop(forks.values())
            raise
        for sequence, length in lengths.items():
            if sequences.holders(sequence) == held.count(sequence):
                sequences.drop([forks.pop(sequence)])
                self.kv_cache.pop_n(sequence, self._length(sequence) - length)
        self._rows.set([forks.get(sequence, sequence) for sequence in held])

    def _length(self, sequence: int) -> int:
        return self.kv_cache.get_sequence_length(sequence)

    def _ids(self, row: int, input_ids: torch.Tensor | None) -> list[int]:
        """Token ids of a row; zeros if they are not known."""
        if input_ids is None:
            return [0] * self._length(self._rows.held[row])
        ids = input_ids[row] if self._shown is None else input_ids[row][self._shown[row]]
        return [int(token) for token in ids]

    def _identity(self) -> dict[str, str]:
        return {"model": "transformers", "revision": self._architecture}

    def _check_held(self, call: str) -> None:
        self._check_idle(call)
        if not any(map(self._length, self._rows.held)):
            why = ", but for padding" if self._columns else ""
            raise errors.BadStateError(f"QuireCache.{call}: nothing is held{why}")

    def _checked_ids(self, call: str, input_ids: torch.Tensor) -> torch.Tensor:
        """Those of the columns that are held."""
        check_ids(call, input_ids)
        shape, rows = tuple(input_ids.shape), len(self._rows.held)
        if len(shape) != 2 or shape[0] != rows or shape[1] < self._columns:
            raise errors.BadArgumentError(
                f"QuireCache.{call}: input_ids has shape {shape}, the cache "
                f"{rows} rows of {self._columns} columns"
            )
        return input_ids[:, : self._columns]

    def _check_idle(self, call: str) -> None:
        if self._forward is not None:
            raise self._open_forward(f"QuireCache.{call}")

    def _open_forward(self, what: str) -> errors.BadStateError:
        assert self._forward is not None
        return errors.BadStateError(
            f"{what} is called while a forward of this QuireCache is open, before its layer "
            f"{self._forward.next_layer} of {len(self.layers)}; if that one was interrupted, "
            "abort_forward() returns to what was held before it"
        )


register()
