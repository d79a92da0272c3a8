"""quire.Engine: text or token ids in, text and token ids out, from a model folder."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import operator
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, cast, overload

import numpy as np

from quire import _blend_verdict, _documents, _ffi, _numbers, _options, _prefill, _sampling, errors
from quire._arrays import dtype_name, int_list
from quire._blend_verdict import BlendVerdict
from quire._description import Description, read_description
from quire._inbox import Inbox, Item, Mail, Output
from quire._kv_store import Attachment
from quire._options import EngineOptions, SamplingOptions
from quire._prefill import PrefillPeer, Refusals
from quire.blend.controller import RATIO_FLOOR, recompute_ratio
from quire.gguf_model import model_folder
from quire.grammar import CompiledGrammar, Grammar, GrammarCompiler, compiler_options
from quire.identity import model_identity
from quire.kv_cache import LayerSpec
from quire.store import FLUSH_SECONDS, ChunkStore, read_key_file
from quire.text import Detokenizer, Message, StopStrings, Tokenizer, check_messages

__all__ = [
    "BlendUsage",
    "Description",
    "Engine",
    "EngineOptions",
    "FinishReason",
    "MemoryPlan",
    "ModelInfo",
    "Piece",
    "PrefillPeer",
    "PrefixMiss",
    "Prompt",
    "Result",
    "Sample",
    "SamplingOptions",
    "StepTimes",
    "Stream",
    "Usage",
]

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Sequence[Message]
"""A text (taken as it is), token ids, or the messages of a chat (put through the model's
template)."""

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]

# Families of rotations that are others for sequences that pass the original length.
_ROPE_OF_LENGTH = ("longrope", "dynamic")
# Times in the usage, which the library counts in nanoseconds.
_TIMES = ("queue", "prompt", "decode", "remote", "predicted_remote", "predicted_here")
_COMPILERS_MAX = 2  # without special texts, and with those of the model's calls


@dataclasses.dataclass(frozen=True)
class BlendUsage:
    """How a prompt with `blend` was made. exact + kept + moved + computed tokens are all of it.

    approximate: whether some of its KV is not what full prefill gives.
    documents: of the prompt, named by the request or found by the engine.
    exact_tokens: found as prefill would give them, from the prefix cache or the store.
    kept_tokens: left by an earlier request with the same blend.
    moved_tokens: KV of documents, used at another place; recomputed_tokens: of these, computed
        again in all layers.
    computed_tokens: the rest of the prompt.
    learned_tokens: computed before the prompt, so that its documents are known.
    deviation_max, deviation_mean: how far the cached KV of the moved tokens that were not
        recomputed is from fresh KV, at the check layer (by the metric of the blend).
    moved_bytes: of keys and values; move_seconds: that reading and rotating them took;
        select_seconds: that comparing took.
    wait_seconds: of `Usage.queue_seconds`, from the first document that was begun to be read or
        computed to the last one.
    ram_tokens, disk_tokens, redis_tokens: what the chunk store brought for documents before the
        prompt, by tier; with the tokens before each, where they were not in memory. The prompt then
        found it in memory.
    miss: why the store did not bring more of the documents, as :attr:`Usage.miss`; None if it
        brought all or was not asked. Where it was for several reasons, not "not stored".
    """

    approximate: bool = False
    documents: int = 0
    exact_tokens: int = 0
    kept_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    learned_tokens: int = 0
    deviation_max: float = 0.0
    deviation_mean: float = 0.0
    moved_bytes: int = 0
    move_seconds: float = dataclasses.field(default=0.0, compare=False)
    select_seconds: float = dataclasses.field(default=0.0, compare=False)
    wait_seconds: float = dataclasses.field(default=0.0, compare=False)
    ram_tokens: int = 0
    disk_tokens: int = 0
    redis_tokens: int = 0
    miss: str | None = None


def _blend_usage(counts: dict[str, Any]) -> BlendUsage | None:
    """Takes the columns of a blend out of those of the usage; None where nothing was to blend."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(BlendUsage):
        value = counts.pop(f"blend.{field.name}", 0)
        if field.type == "float":  # its bits
            value = struct.unpack("<d", struct.pack("<q", value))[0]
        elif field.name == "miss":
            value = _miss_name(value)
        fields[field.name] = bool(value) if field.type == "bool" else value
    return BlendUsage(**fields) if counts.pop("blends", 0) else None


@dataclasses.dataclass(frozen=True)
class PrefixMiss:
    """Why the KV of a prompt was not all there when its request began, as far as requests of the
    same cache_salt tell.

    kind: "new": nothing is known behind the first `position` tokens. "differs": what is known
        departs from the prompt at token `position`. "evicted": what was known behind `position` was
        given up for want of memory, `evicted_ms` before. "store": the chunk store did not bring
        more; :attr:`Usage.miss` has its reason.
    position: tokens that were there, or known.
    evicted_ms: in milliseconds; 0 for the other kinds.
    """

    kind: Literal["new", "differs", "evicted", "store"]
    position: int
    evicted_ms: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one request: of the prompt, how many of those came from a cache, and of all its
    samples.

    memory_tokens, ram_tokens, disk_tokens, redis_tokens: where cached_tokens came from: the prefix
        cache, or a tier of the chunk store.
    recomputed_tokens: of the prompt, known to the prefix cache and computed again all the same,
        because no state of the recurrent layers is kept where the text parts from the known one (or
        a window has slid past).
    miss: why the store did not bring more; None if it brought all or was not asked.
    prefix_miss: why the KV of the prompt was not all there, whether or not there is a store; None
        if it was.
    load_seconds: that it took.
    remote_tokens: of the prompt, computed by another process (`prefill_from`); remote_seconds: that
        they took to come; predicted_remote_seconds, predicted_here_seconds: what was predicted for
        them, there and here. 0 where no process was asked, or speeds were not known.
    drafted_tokens, accepted_tokens: tokens that were guessed, and of these the right ones.
    queue_seconds, prompt_seconds, decode_seconds: where the time went: until the engine began with
        the request, then to its first token, then to the end. The first two together are the time
        to the first token. steps: of the engine that computed some of its tokens.
    blend: of a prompt with `blend`, how it was made; else None.
    decode_forwards: where something was guessed: forwards that drew tokens of the answer, counted
        per sample. Without guesses there is one for each token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    memory_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    redis_tokens: int = 0
    recomputed_tokens: int = 0
    miss: str | None = None
    prefix_miss: PrefixMiss | None = None
    load_seconds: float = dataclasses.field(default=0.0, compare=False)
    remote_tokens: int = 0
    remote_seconds: float = dataclasses.field(default=0.0, compare=False)
    predicted_remote_seconds: float = dataclasses.field(default=0.0, compare=False)
    predicted_here_seconds: float = dataclasses.field(default=0.0, compare=False)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_forwards: int = 0
    queue_seconds: float = dataclasses.field(default=0.0, compare=False)
    prompt_seconds: float = dataclasses.field(default=0.0, compare=False)
    decode_seconds: float = dataclasses.field(default=0.0, compare=False)
    steps: int = dataclasses.field(default=0, compare=False)
    blend: BlendUsage | None = None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens for each time that the model's weights were read: what guesses save at
        most."""
        return self.completion_tokens / self.decode_forwards if self.decode_forwards else 0.0


@dataclasses.dataclass
class Sample:
    """One answer.

    ids: its tokens, up to and including the one that ended it by a stop text.
    text: of the ids, without special tokens and cut before a stop text; None when the model has no
        tokenizer.
    logprobs: natural logarithm of each token's probability under the model's own logits; None if
        not asked for.
    top_logprobs: per token the best ones, as (id, logprob); None unless `logprobs` was above 0.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: FinishReason | None = None


@dataclasses.dataclass
class Result:
    """The answer to one prompt; with n > 1 its samples.

    ids, text, logprobs, top_logprobs and finish_reason are those of the first sample.

    seed: what the answer was drawn with: given again, with the same prompt and options, it gives
        the same answer. None where nothing was drawn (greedy).
    """

    prompt_ids: list[int]
    samples: list[Sample]
    usage: Usage
    seed: int | None = None

    @property
    def ids(self) -> list[int]:
        return self.samples[0].ids

    @property
    def text(self) -> str | None:
        return self.samples[0].text

    @property
    def logprobs(self) -> list[float] | None:
        return self.samples[0].logprobs

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        return self.samples[0].top_logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.samples[0].finish_reason


class Piece(str):
    """A piece of an answer: its text (this is a str), and the tokens that came with it.

    ids: new tokens; their text may still be waiting for the rest of a character or of a stop text.
    logprobs, top_logprobs: of these tokens, as in :class:`Sample`.
    sample: index of the sample.
    finish_reason: set on the last piece of a sample.
    result: the whole answer, set on the last piece of all.
    """

    ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    sample: int
    finish_reason: FinishReason | None
    result: Result | None

    @property
    def text(self) -> str:
        """The text as a plain str."""
        return str(self)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What the engine runs.

    ``eos_token_ids`` end an answer; ``bos_token_id`` is None if there is none. ``weight_types``:
    bytes of the weights by the types that they have in memory ("bfloat16", "Q4_K", ...), most
    first; ``weight_bytes`` is their sum. ``numa``: the NUMA nodes on which threads and memory are
    placed, and what the system has refused, for people; "off", with a reason if it was asked for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    parameter_count: int
    weight_bytes: int
    weight_types: Mapping[str, int]
    layers: tuple[LayerSpec, ...]
    rope: Mapping[str, Any]
    kernel_path: str
    numa: str


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What an engine would take of the memory, in exact bytes; nothing has been loaded.

    weight_bytes: the weights as the engine keeps them.
    kv_bytes_per_token: keys and values of one token in all layers.
    page_size: tokens of a page; page_bytes: of a page in all layers; page_count: pages in all.
        Without attention layers there are none, and page_size is the distance of two checkpoints.
    kv_bytes: all pages.
    state_bytes: states of recurrent layers: of samples in work, their checkpoints, and those that
        the prefix cache keeps.
    scratch_bytes: what one step needs beside weights and pages, at most.
    draft_bytes: all that the draft model takes.
    staging_bytes: with `prefill_from`, what arrives and is not in its pages yet, and with recurrent
        layers the states that come with it.
    sending_bytes: what is computed for other processes, and not taken by them yet.
    total_bytes: all of these together.
    machine_bytes: memory of the machine, or of the control group that it runs in.
    available_bytes: of it, what was free when the plan was made.
    kv_shrunk: kv_bytes was not given, and there are fewer pages than usual, so that it fits.
    longest_context: most tokens that one sequence can have with these pages.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    page_size: int
    page_bytes: int
    page_count: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int
    draft_bytes: int
    staging_bytes: int
    sending_bytes: int
    total_bytes: int
    machine_bytes: int
    # Changes from call to call, and is not part of what the plan is.
    available_bytes: int = dataclasses.field(compare=False)
    kv_shrunk: bool
    longest_context: int

    @property
    def fits(self) -> bool:
        """Whether it is not more than what is free."""
        return self.total_bytes <= self.available_bytes


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """How long the engine's steps took, as a histogram.

    bounds: the largest time of each class in seconds; counts: the steps in each class, and one more
    count for all that took longer. seconds: of all together.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float


class _Answer:
    """One sample in the making: collects tokens, makes text, watches for stop texts.

    tokens: the number of those of the answer so far. keep: whether `sample` gets what the pieces
    have.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        logprobs: int | None,
        keep: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._keep = keep
        self.tokens = 0
        self.sample = Sample(
            text=None if detokenizer is None else "",
            logprobs=None if logprobs is None else [],
            top_logprobs=[] if logprobs else None,
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come: nothing is added any more, but the engine may not have
        reported the end."""
        return self._stops.stopped

    @property
    def finished(self) -> bool:
        """Whether the engine has reported the end."""
        return self.sample.finish_reason is not None

    def put(self, output: Output) -> Piece:
        """Takes one step's tokens; returns those that belong to the answer, and the new text."""
        text = ""
        taken = 0
        for i, token in enumerate(output.tokens):
            if self.stopped:
                break
            taken += 1
            if self._detokenizer is not None:
                text += self._stops.put(self._detokenizer.put([token]))
        if output.finish_reason is not None and not self.stopped:
            text += self._rest_of_text()
        if output.finish_reason is not None:
            self.sample.finish_reason = "stop" if self.stopped else output.finish_reason
        self.tokens += taken
        piece = Piece(text)
        piece.ids = output.tokens[:taken]
        entries = output.logprobs[:taken]
        sample = self.sample
        piece.logprobs = None if sample.logprobs is None else [each[0][1] for each in entries]
        piece.top_logprobs = None if sample.top_logprobs is None else [each[1:] for each in entries]
        piece.sample, piece.finish_reason, piece.result = output.sample, sample.finish_reason, None
        if self._keep:
            self._add(piece)
        return piece

    def _add(self, piece: Piece) -> None:
        sample = self.sample
        sample.ids += piece.ids
        if sample.text is not None:
            sample.text += piece
        if sample.logprobs is not None:
            sample.logprobs += piece.logprobs or []
        if sample.top_logprobs is not None:
            sample.top_logprobs += piece.top_logprobs or []

    def _rest_of_text(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.put(self._detokenizer.finish())
        return text + self._stops.finish()


@dataclasses.dataclass(frozen=True)
class _NewRequest:
    """A prompt and its options as the library takes them.

    context: the last tokens of the prompt, from which the text of the answer goes on.
    stops: texts, which are watched for here. special_texts: as of SamplingOptions.
    """

    ids: list[int]
    context: list[int]
    stops: list[str]
    special_texts: list[str]
    logprobs: int | None
    sampling: dict[str, Any]


class _Request:
    """One submitted prompt.

    mail: where its outputs come.
    """

    def __init__(
        self, id: int, mail: Mail, prompt_ids: list[int], answers: list[_Answer], seed: int | None
    ) -> None:
        self.id = id
        self.mail = mail
        self.prompt_ids = prompt_ids
        self.answers = answers
        self.seed = seed
        self.dropped = False
        self.usage: Mapping[str, int] = {}  # of the last end

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def result(self) -> Result:
        samples = [answer.sample for answer in self.answers]
        counts = dict(self.usage)
        blend = _blend_usage(counts)
        miss, load_ns = counts.pop("miss", 0), counts.pop("load_ns", 0)
        prefix_miss = _prefix_miss(counts)
        times: dict[str, Any] = {
            f"{part}_seconds": counts.pop(f"{part}_ns", 0) / 1e9
            for part in _TIMES
        }
        if not counts.get("drafted_tokens"):
            counts["decode_forwards"] = 0
        usage = Usage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=sum(answer.tokens for answer in self.answers),
            miss=_miss_name(miss),
            prefix_miss=prefix_miss,
            load_seconds=load_ns / 1e9,
            blend=blend,
            **times,
            **counts,
        )
        return Result(self.prompt_ids, samples, usage, self.seed)


class Engine(_ffi.Owner):
    """Runs a language model from a Hugging Face folder (config.json, safetensors, tokenizer.json).

    Exact: an answer and its logits depend on the prompt and the options alone, not on what runs
    beside it, on page size, chunking or threads.

    Threads of Python may share an engine. It computes on a thread of its own, for all requests
    together: one that is submitted joins the next step.

    Args:
        model_dir: the folder, or a GGUF file; None: that of the embedded model
            (:func:`quire.embedded_model_dir`).
        OPTIONS

    The store is used as soon as the digest of the model's files is known. It is kept, so that only
    the first engine of a model computes it, beside its first answers (see :meth:`wait_for_store`).
    With `prefill_from` the constructor waits for it, and for a connection to each process; those
    that do not answer are tried again in the background.

    Raises:
        NotFoundError, CorruptError, IncompatibleError, BadArgumentError: the folder is not what it
            should be.
        OutOfMemoryError: weights or pages do not fit.
        IncompatibleError: a process of `prefill_from` has another model or other KV; the message
            has the first field that differs, and both values.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._attachment: Attachment | None = None
        self._refusals: Refusals | None = None
        whole = _options.whole_engine(options)
        self._connection = _prefill.connection_fields(_options.of_part("connection", whole))
        peers = _prefill.peer_fields(_options.of_part("peers", whole))
        kv_store: ChunkStore | None = whole["kv_store"]
        ram_bytes = _numbers.int64(whole["kv_ram_bytes"], "kv_ram_bytes")
        if ram_bytes < 0:
            raise errors.BadArgumentError(f"kv_ram_bytes is {ram_bytes}; it must be at least 0")
        has_tiers = whole["kv_dir"] is not None or bool(whole["kv_redis"]) or ram_bytes > 0
        if kv_store is not None and has_tiers:
            raise errors.BadArgumentError(
                "Engine: kv_store and kv_dir, kv_redis or kv_ram_bytes are two stores; give one"
            )
        self.model_dir = _folder(model_dir)
        use = _options.of_part("use", whole)
        use["load_timeout_ms"] = max(
            1, _numbers.milliseconds(whole["kv_load_timeout"], "kv_load_timeout")
        )
        store = _make_store(whole) if has_tiers else kv_store
        self._tokenizer: Tokenizer | None = None
        self._compilers: dict[tuple[str, ...], GrammarCompiler] = {}  # by special_texts
        self._compiler_lock = threading.Lock()
        self._tokenizer_load = self._begin_tokenizer()  # beside the weights
        handle = _ffi.create("Engine", _option_map(self.model_dir, whole))
        super().__init__(handle)
        self._inbox: Inbox[_Request] = Inbox(handle.steps())
        self._info = self._read_info()
        self._model_sampling = _sampling.read_model_sampling(self.model_dir)
        self._exact = bool(whole["exact"])
        self._kv_types = whole["kv_dtype"] or dtype_name(whole["dtype"])
        self._verdict: BlendVerdict | None = None
        stats = self.stats()
        self._pages, self._page_size = stats["pages_total"], stats["page_size"]
        # Where nothing can be blended, as with recurrent layers, the library says why.
        self._can_blend = bool(
            whole["blend_piece"] > 0 and whole["prefix_cache"] and stats["states_total"] == 0
        )
        self._asks_verdict = self._can_blend and not whole["blend_unverified"]
        self._max_num_sequences = int(whole["max_num_sequences"])
        if peers is not None:
            self._attach_peers(peers)
        if store is not None:
            owned = kv_store is None
            self._attachment = Attachment(store, owned, self.model_dir, use, self._attach_store)

    def _attach_store(
        self, store: ChunkStore, identity: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self._handle.attach_store(store.__tvm_ffi_object__(), identity, options)

    def _attach_peers(self, peers: dict[str, Any]) -> None:
        try:
            identity = model_identity(self.model_dir)
            self._handle.attach_prefill_peers(identity, peers | self._connection)
        except BaseException:
            self.close()
            raise

    def prefill_peers(self) -> list[PrefillPeer]:
        """The processes of `prefill_from`, as things stand; never waits for a step."""
        return _prefill.read_peers(self._handle.prefill_peers())

    def serve_prefill(
        self,
        listen: str = "127.0.0.1:0",
        *,
        peers_max: int = _prefill.PEERS_MAX,
        on_refused: Callable[[str], None] | None = None,
    ) -> str:
        """Computes prompts for engines of other processes from now on, beside those of this one,
        and with its prefix cache and store. It ends with the engine.

        Waits for the digest of the model's files, which is kept.

        Args:
            listen: "HOST:PORT", port 0 being any that is free, "ucx:HOST:PORT" or "unix:PATH". One
                that other machines reach needs `peer_secret_file` of the engine, or TLS.
            peers_max: connections at a time.
            on_refused: is called with the reason, one line, for each connection that is refused: of
                another model, for example, with the first field that differs and both values. It is
                called on a Python thread of its own.

        Returns:
            Where others connect to, with the port that was taken: `prefill_from` of their engines.

        Raises:
            BadArgumentError: an option is out of range, or the address needs a secret or TLS.
            UnavailableError: the address cannot be had.
            BadStateError: it serves already.
        """
        fields = {
            "listen": _numbers.text(listen, "listen"),
            "peers_max": _numbers.int64(peers_max, "peers_max"),
            **self._connection,
        }
        handle = self._handle
        identity = model_identity(self.model_dir)
        refusals = Refusals(on_refused)
        try:
            endpoint = str(handle.serve_prefill(identity, fields, refusals.queue))
        except BaseException:
            refusals.close()
            raise
        self._refusals = refusals
        return endpoint

    def prefill_refusals(self) -> dict[str, int]:
        """Connections that were refused since :meth:`serve_prefill`, by the field in which the two
        sides differ, such as "revision"; "other" for other causes."""
        _ = self._handle
        return {} if self._refusals is None else self._refusals.counts()

    def end_prefill(self) -> None:
        """Begins no prompt of another process any more, so that this process can end without a
        loss: nobody else connects, and prompts that are asked for are refused, which their
        processes then compute. Those in work go on; `served_waiting` of :meth:`stats` counts them
        until their rows have arrived. Nothing for an engine that does not serve; twice is fine."""
        self._handle.end_prefill()

    @property
    def on_step(self) -> Callable[[], None] | None:
        """Is called after each step, as soon as its pieces are there (:meth:`Stream.poll`), and
        when the engine ends; None (default): nothing is. Steps that end during a call share the
        next one.

        It is called on a Python thread of the engine, which hands out nothing meanwhile. For
        asyncio::

            engine.on_step = lambda: loop.call_soon_threadsafe(drain)

        The engine is at most 8 steps ahead of that thread, or goes on after 0.1 s. So a call that
        waits until `drain` was run gives the engine the pace of the event loop.

        What it raises goes to ``threading.excepthook``.
        """
        return self._inbox.on_step

    @on_step.setter
    def on_step(self, call: Callable[[], None] | None) -> None:
        if call is not None and not callable(call):
            raise TypeError(f"on_step must be callable, not {type(call).__name__}")
        self._inbox.on_step = call

    @property
    def store(self) -> ChunkStore | None:
        """Where KV outlives this engine; None without one."""
        return None if self._attachment is None else self._attachment.store

    def wait_for_store(self) -> None:
        """Waits until the digest of the model's files is known and the store in use; raises what
        went wrong with that. ClosedError once the engine is closed."""
        _ = self._handle
        if self._attachment is not None:
            self._attachment.wait()

    @property
    def uses_store(self) -> bool:
        """Whether the store is in use already."""
        return self._attachment is not None and self._attachment.done

    def flush_store(self, timeout: float = FLUSH_SECONDS) -> None:
        """Puts what is in memory and not in the store, and waits until it is as durable as the
        store promises. TimeoutError after `timeout` seconds, ClosedError once the engine is
        closed."""
        handle = self._handle
        if self._attachment is None:
            return
        self._attachment.wait()
        handle.flush_store(_numbers.milliseconds(timeout, "timeout"))

    @staticmethod
    def plan_memory(
        model_dir: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
    ) -> MemoryPlan:
        """The memory that an engine of this model and these options takes, from config.json and the
        headers of the weights alone: in milliseconds, whatever the size of the model.

        Raises as the constructor, but no OutOfMemoryError: look at :attr:`MemoryPlan.fits`.
        """
        whole = _options.whole_engine(options)
        fields = _ffi.function("Engine.plan_memory")(_option_map(_folder(model_dir), whole))
        names = [field.name for field in dataclasses.fields(MemoryPlan)]
        plan: dict[str, Any] = {name: int(fields[name]) for name in names}
        return MemoryPlan(**{**plan, "kv_shrunk": bool(plan["kv_shrunk"])})

    def close(self) -> None:
        """Writes to the store what is not there yet, ends all requests and frees model, pages and
        threads.

        Every later call raises ClosedError. What the store does not take is lost, silently: it can
        be computed again. Call :meth:`flush_store` before to hear of it.
        """
        attachment, self._attachment = self._attachment, None
        try:
            if attachment is not None and self._open_handle is not None:
                self._write_rest(attachment)
        finally:
            handle, self._open_handle = self._open_handle, None
            if handle is not None:
                handle.close()
                self._inbox.close()
            refusals, self._refusals = self._refusals, None
            if refusals is not None:
                refusals.close()
            if attachment is not None:
                attachment.stop()
                attachment.close()

    def _abandon_after_fork(self) -> None:
        handle, self._open_handle = self._open_handle, None
        attachment, self._attachment = self._attachment, None
        self._refusals = None
        for left in (handle, None if attachment is None else attachment.abandon()):
            if left is not None:
                _ffi.leak(left)

    def _write_rest(self, attachment: Attachment) -> None:
        try:
            attachment.wait()
            self._handle.flush_store(round(FLUSH_SECONDS * 1000))
        except (errors.QuireError, OSError, ValueError):
            pass  # ValueError: config.json has become something else

    @property
    def info(self) -> ModelInfo:
        """The model and how it is run."""
        return self._info

    @property
    def max_num_sequences(self) -> int:
        """The most samples in work at a time."""
        return self._max_num_sequences

    @property
    def model_sampling(self) -> SamplingOptions:
        """The model's own sampling, of generation_config.json: the default of every answer. Empty
        where the file names none, which is greedy."""
        return cast(SamplingOptions, dict(self._model_sampling))

    def resolve_sampling(self, **options: Unpack[SamplingOptions]) -> SamplingOptions:
        """The options with which :meth:`generate` would draw: these, over the model's own, with a
        seed that is drawn if none is given."""
        _options.check_names("an answer", options, _options.SAMPLING)
        return cast(SamplingOptions, _sampling.resolved(self._model_sampling, options))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. NotFoundError when its folder has none."""
        if self._tokenizer is None:
            load, self._tokenizer_load = self._tokenizer_load, None
            self._tokenizer = Tokenizer(self.model_dir) if load is None else load.result()
        return self._tokenizer

    def compile_grammar(
        self, grammar: Grammar | Mapping[str, Any], special_texts: Sequence[str] = ()
    ) -> CompiledGrammar:
        """Makes a grammar ready, which takes up to seconds for a large one. Requests that have what
        comes back as their `grammar` begin at once, those that have the same grammar once others
        are not being compiled. Raises what is wrong with it; see `grammar` and `special_texts` of
        :class:`SamplingOptions`."""
        if self._open_handle is None:
            raise _ffi.closed_error("Engine")
        special = tuple(_texts(special_texts, "special_texts"))
        return CompiledGrammar(self._compiled(grammar, special), special)

    def _compiled(
        self,
        grammar: CompiledGrammar | Grammar | Mapping[str, Any],
        special_texts: Sequence[str] = (),
    ) -> Any:
        key = tuple(special_texts)
        if isinstance(grammar, CompiledGrammar):
            if grammar.special_texts != key:
                raise errors.bad_option(
                    "grammar",
                    "grammar: it was compiled for other special_texts than those of the request",
                )
            return grammar.handle
        wanted = Grammar.of(grammar)
        with self._compiler_lock:
            compiler = self._compilers.pop(key, None)
            if compiler is None:
                if not self.has_tokenizer:
                    raise errors.bad_option(
                        "grammar",
                        "grammar: this model has no tokenizer.json, so its tokens have no text",
                    )
                info = self._info
                compiler = GrammarCompiler(
                    compiler_options(self.tokenizer, info.vocab_size, info.eos_token_ids, key)
                )
            self._compilers[key] = compiler  # the last used is the last one
            while len(self._compilers) > _COMPILERS_MAX:
                del self._compilers[next(iter(self._compilers))]
        return compiler.compile(wanted)

    def _begin_tokenizer(self) -> Future[Tokenizer] | None:
        """Reads the tokenizer in a thread: for a small model it takes as long as the weights. What
        goes wrong shows where it is asked for."""
        if not self.has_tokenizer:
            return None
        executor = ThreadPoolExecutor(1, thread_name_prefix="quire-tokenizer")
        load = executor.submit(Tokenizer, self.model_dir)
        executor.shutdown(wait=False)
        return load

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts and answers can be text."""
        return (self.model_dir / "tokenizer.json").is_file()

    def stats(self, *, wait: bool = True) -> dict[str, int]:
        """Counters since the start and gauges of now, from any thread at any time.

        wait: until the engine has done what it was told before (requests, closed streams), which
            may take the rest of a step; False: as things stood after the last step, at once.

        pages_total, pages_free, pages_in_use (those of retained sequences among them);
        retained_sequences, retained_tokens, retained_pages (that the prefix cache alone holds);
        waiting, running (requests), learning (of those that wait, the engine's own, by which
        documents of blended prompts are learnt); steps, prompt_tokens, cached_tokens,
        completion_tokens, preemptions; computed_tokens (of prompts and answers, by the steps so
        far); kv_bytes, kv_bytes_per_token, weight_bytes, page_size (tokens).

        Recurrent layers: states_total, states_free, retained_states (of the prefix cache),
        state_bytes; recomputed_tokens, as in :class:`Usage`.

        Guesses: drafted_tokens, accepted_tokens, decode_forwards, as in :class:`Usage`; draft_ns
        (that guessing took).

        Blended prompts: blend_exact_tokens, blend_kept_tokens, blend_moved_tokens,
        blend_recomputed_tokens, blend_computed_tokens, as in :class:`BlendUsage`.

        Chunk store: loading (requests that wait for it), loads, loaded_ram_tokens,
        loaded_disk_tokens, loaded_redis_tokens, load_ns; layer_loads (loads that a forward
        took layer by layer), overlap_ns (that was computed meanwhile); stored_chunks, stored_bytes,
        refused_chunks; compute_ns_per_token, which a load must beat.

        Prompts that other processes compute (`prefill_from`): remote_tokens, remote_bytes;
        remote_waiting (requests that wait for them), remote_losses (prompts that were not
        finished), remote_timeouts (of these, those whose deadline or lease was over),
        remote_overlap_ns (that was computed for others meanwhile), staging_bytes (of them on their
        way to their pages now), staging_bytes_largest (ever). Prompts for others
        (:meth:`serve_prefill`): served_peers (connections), served_waiting, served_prompts,
        served_tokens (that were sent), served_losses (refused or broken off), served_timeouts (of
        these, those whose deadline or lease was over, or whose rows were not taken in time),
        sending_bytes (of rows that they have not taken yet);
        held_prompts, held_pages (held for them by `held_for_peer`, as of the last step), held_used
        (that they then had), held_overdue (that they did not ask for in time), held_given_up (for
        want of pages, or at the end of serving).
        """
        return {str(name): int(value) for name, value in self._handle.stats(wait).items()}

    def step_times(self) -> StepTimes:
        """The times of all steps so far; never waits for one."""
        fields = self._handle.step_times()
        bounds = tuple(float(bound) for bound in fields["bounds"])
        counts = tuple(int(count) for count in fields["counts"])
        return StepTimes(bounds, counts, float(fields["seconds"]))

    def set_kept_part(self, cache_salt: bytes, pages: int) -> None:
        """As long as the prefix cache keeps at most this number of pages for requests with this
        salt, they are given up only where nothing else is left: what others compute does not cost
        them.

        pages: those that several sequences share count for each; 0: no part any more.

        Raises BadArgumentError for a negative number, BadStateError without a prefix cache.
        """
        self._handle.set_kept_part(cache_salt, pages)

    def describe(self, *, wait: bool = False) -> Description:
        """What holds which KV, and which requests wait: as things stood between two steps, half a
        second ago or so. It is made at most twice a second, however often it is asked for.

        wait: until the description is made that this call asks for, which may take the rest of a
            step; False: the last one, at once.
        """
        return read_description(self._handle.describe(wait))

    # ---- Logits

    @overload
    def logits(self, prompts: Prompt) -> np.ndarray: ...  # type: ignore[overload-overlap]

    @overload
    def logits(self, prompts: Sequence[Prompt]) -> list[np.ndarray]: ...

    def logits(self, prompts: Prompt | Sequence[Prompt]) -> np.ndarray | list[np.ndarray]:
        """Logits of every token: float32 [n, vocab_size]; a list of such for several prompts.

        Several prompts are computed together in one batch, which changes no bit of any of them.
        """
        many, one = _as_list(prompts)
        ids = [np.asarray(self._prompt_ids(prompt), dtype=np.int64) for prompt in many]
        outputs = [np.empty((len(prompt), self._info.vocab_size), np.float32) for prompt in ids]
        self._handle.logits(ids, outputs)
        return outputs[0] if one else outputs

    # ---- Answers

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str as well
        self, prompts: Prompt, **options: Unpack[SamplingOptions]
    ) -> Result: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], **options: Unpack[SamplingOptions]
    ) -> list[Result]: ...

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[SamplingOptions]
    ) -> Result | list[Result]:
        """Answers to one prompt or to many at once. For a conversation see :meth:`chat`.

        Args:
            prompts: a text, token ids or chat messages; or a list of such. A text goes to the model
                as it stands, without a chat template.
            **options: see :class:`SamplingOptions`.

        Returns:
            A :class:`Result` for one prompt, else a list of them in the order of the prompts.

        Raises:
            TypeError: bytes, a mapping, or something else that is no prompt.
            BadArgumentError: an option or token id out of range, an empty prompt or none at all.
            TooLargeError: a prompt and its max_tokens can never fit.
            FullError: too many requests wait.
        """
        many, one = _as_list(prompts)
        if not many:
            raise errors.BadArgumentError(
                "generate: there is no prompt; give a text, token ids or chat messages"
            )
        results: dict[int, Result] = {}
        # What is wrong with any of them is known before anything is computed.
        made = [self._make_request(prompt, options) for prompt in many]
        for request in made:
            self._handle.check(np.asarray(request.ids, dtype=np.int64), request.sampling)
        with contextlib.closing(self._generate_each(enumerate(made), len(made), None)) as outcomes:
            for index, outcome in outcomes:
                if isinstance(outcome, errors.QuireError):
                    raise outcome
                results[index] = outcome
        return results[0] if one else [results[index] for index in range(len(many))]

    def chat(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Result:
        """The answer to a conversation; its text is `Result.text`.

        ::

            messages = [{"role": "user", "content": "What is a quire?"}]
            answer = engine.chat(messages)
            messages.append({"role": "assistant", "content": answer.text})

        Each turn takes what was said before from the prefix cache.

        Args:
            messages: {"role": ..., "content": ...} in order, the last one to be answered; further
                fields go to the model's chat template as they are.
            **options: see :class:`SamplingOptions`.

        Raises:
            TypeError: something else than a list of messages.
            BadArgumentError: no message; a model without a chat template; what :meth:`generate`
                raises.
        """
        return self.generate(_conversation(messages), **options)

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[SamplingOptions]
    ) -> Stream:
        """The answer to a conversation, piece by piece: :meth:`chat` as :meth:`stream`."""
        return self.stream(_conversation(messages), **options)

    def generate_each(
        self,
        requests: Iterable[tuple[Prompt, SamplingOptions]],
        *,
        in_flight: int = 256,
        on_step: Callable[[], None] | None = None,
    ) -> Generator[tuple[int, Result | errors.QuireError], None, None]:
        """Answers to many requests, each with options of its own, in the order in which they end.

        The answers are those that :meth:`generate` gives. Closing the iterator cancels what has not
        ended.

        Args:
            requests: prompts and their options; taken one by one, as others end.
            in_flight: most requests that are submitted at a time.
            on_step: is called after each step of the engine.

        Yields:
            The index of a request, and its result or, when it alone failed, its error.

        Raises:
            BadArgumentError: in_flight is below 1, which would answer nothing.
        """
        if _numbers.int64(in_flight, "in_flight") < 1:
            raise errors.BadArgumentError(f"in_flight is {in_flight}; it must be at least 1")

        def made() -> Iterator[tuple[int, _NewRequest | errors.QuireError]]:
            for index, (prompt, options) in enumerate(requests):
                try:
                    yield index, self._make_request(prompt, options)
                except errors.QuireError as error:
                    yield index, error

        return self._generate_each(made(), in_flight, on_step)

    def _generate_each(
        self,
        source: Iterator[tuple[int, _NewRequest | errors.QuireError]],
        in_flight: int,
        on_step: Callable[[], None] | None,
    ) -> Generator[tuple[int, Result | errors.QuireError], None, None]:
        self._inbox.check_may_wait()
        mail = Mail()
        running: dict[int, tuple[int, _Request]] = {}  # by the request's id: its index
        if on_step is not None:
            self._inbox.tickers.add(mail)
        steps = 0
        try:
            while True:
                while len(running) < in_flight and (entry := next(source, None)) is not None:
                    index, made = entry
                    try:
                        if isinstance(made, errors.QuireError):
                            raise made
                        request = self._submit(made, mail)
                        running[request.id] = index, request
                    except errors.QuireError as error:
                        yield index, error
                if not running:
                    return
                batch = mail.take(block=True)
                if isinstance(batch, BaseException):
                    raise batch
                while on_step is not None and steps < mail.steps:
                    steps += 1
                    on_step()
                yield from self._outcomes(batch or [], running)
        finally:
            self._inbox.tickers.discard(mail)
            self._drop_all(mail)

    def check(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> int:
        """Raises what :meth:`generate` would raise of the prompt and the options; else the number
        of the prompt's tokens. Nothing is submitted."""
        made = self._make_request(prompt, options)
        self._handle.check(np.asarray(made.ids, dtype=np.int64), made.sampling)
        return len(made.ids)

    def stream(
        self,
        prompt: Prompt,
        *,
        on_step: Callable[[], None] | None = None,
        keep: bool = True,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """The answer to one prompt, piece by piece as it is computed.

        Raises as :meth:`generate`, and at once; it waits for no step. The engine computes whether
        or not the pieces are taken. Several streams may be open at a time: each step computes for
        all of them.

        Args:
            prompt: a text, token ids or chat messages.
            on_step: is called by the thread that waits for a piece, for each step of the engine: a
                long prompt takes several before the first piece (`computed_tokens` of
                :meth:`stats`).
            keep: False: the pieces alone have the answer. :attr:`Stream.samples` and the result
                have no ids, no text and no log-probabilities, so that an answer without an end
                takes no more memory here.
            **options: see :class:`SamplingOptions`.

        Returns:
            An iterator over :class:`Piece`: a str with the tokens that came with it.
        """
        return Stream(self, prompt, options, on_step, keep)

    # ---- Requests

    def _make_request(self, prompt: Prompt, options: SamplingOptions) -> _NewRequest:
        """Checks what the library does not see, and raises what is wrong; nothing is submitted."""
        _options.check_names("an answer", options, _options.SAMPLING)
        composed = self._composed(prompt, options)
        ids = composed.ids
        stop_texts, stop_ids = _split_stops(options.get("stop", ()))
        if stop_texts and not self.has_tokenizer:
            raise errors.BadArgumentError(
                "stop: texts need a tokenizer, and this model has none; give token ids"
            )
        StopStrings(stop_texts)  # raises what is wrong with them
        sampling = self._engine_options(options, len(ids))
        if stop_ids:
            sampling["stop"] = stop_ids
        if options.get("blend") is not None:
            sampling["blend"] = self._blend(options["blend"], composed)
        # The answer to a chat stands alone; otherwise it goes on from the prompt.
        vocab_size = self._info.vocab_size
        context = [] if _is_chat(prompt) else [i for i in ids[-8:] if 0 <= i < vocab_size]
        special = _texts(options.get("special_texts", ()), "special_texts")
        logprobs = options.get("logprobs", 0)
        return _NewRequest(ids, context, stop_texts, special, logprobs, sampling)

    def _blend(self, blend: Any, composed: _documents.Composed) -> dict[str, Any]:
        """The option as the library takes it, which refuses what may be approximate unless the
        model's verdict allows it. BadArgumentError for such a blend where `exact` is set."""
        fields = _documents.blend_fields(blend, composed, self._auto_ratio)
        if self._exact and not _documents.is_exact(fields):
            raise errors.bad_option(
                "blend",
                "blend: this engine gives exact answers only (exact), and a blend with a ratio "
                "below 1 may be approximate; leave blend out, or give the ratio 1",
            )
        if not self._asks_verdict:
            return {**fields, "unverified": True}
        verdict = None if _documents.is_exact(fields) else self.blend_verdict()
        if verdict is None:
            return fields
        return {**fields, "verdict": [verdict.divergence, verdict.agreement]}

    def _auto_ratio(self, tokens: int) -> float:
        """The part of `tokens` tokens that is computed in the time that loading takes, by what the
        two have taken so far; in steps of 0.05, as speeds are never equal, and the next turn of a
        conversation goes on from this one only with the same ratio."""
        stats = self.stats(wait=False)
        if not stats["compute_ns_per_token"]:  # nothing was measured
            return RATIO_FLOOR
        loaded = sum(stats[f"loaded_{tier}_tokens"] for tier in ("ram", "disk", "redis"))
        load_ns = stats["load_ns"] / loaded if loaded else 0.0
        seconds = tokens * 1e-9
        ratio = recompute_ratio(stats["compute_ns_per_token"] * seconds, load_ns * seconds)
        return min(1.0, math.ceil(ratio * 20 - 1e-6) / 20)

    def blend_verdict(self) -> BlendVerdict | None:
        """What `quire blend eval` found about this model with these types of KV; None: it was not
        asked. The first call reads the weights, unless their digests are kept.

        Raises:
            CorruptError: the file of the verdict is damaged.
            IoError: it cannot be read.
        """
        if self._verdict is None:
            self._verdict = _blend_verdict.find(self._blend_fingerprint())
        return self._verdict

    def keep_blend_verdict(self, verdict: BlendVerdict) -> Path:
        """Keeps a verdict for all engines of this model with these types of KV, in the folder
        QUIRE_HOME, and returns its file. OSError where it cannot be written."""
        path = _blend_verdict.keep(self._blend_fingerprint(), verdict)
        self._verdict = verdict
        return path

    def _blend_fingerprint(self) -> str:
        return _blend_verdict.fingerprint(model_identity(self.model_dir), self._kv_types)

    def _composed(self, prompt: Prompt, options: SamplingOptions) -> _documents.Composed:
        """The prompt's tokens, and which of them are documents."""
        documents = options.get("documents")
        if isinstance(documents, np.ndarray):  # which compares and tells its truth by elements
            documents = documents.tolist()
        of_messages = _is_chat(prompt) and _documents.count_in(cast(Sequence[Message], prompt))
        if documents == _documents.AUTO:
            if options.get("blend") is None:
                raise errors.BadArgumentError(
                    'documents: "auto" looks for documents whose KV can be blended; give blend'
                )
            if of_messages:
                raise errors.bad_option(
                    "documents",
                    'documents: "auto" looks for documents, and a message names some as its '
                    "parts; leave one of them out",
                )
            ids = self._prompt_ids(prompt, options.get("template_args"))
            return _documents.Composed(ids, None)
        is_list = isinstance(documents, Iterable) and not isinstance(documents, (bytes, Mapping))
        if isinstance(documents, str) or not (documents is None or is_list):
            raise TypeError(f'documents is a list, or "auto", not {type(documents).__name__}')
        if not documents and not of_messages:
            if options.get("blend") is not None:
                raise errors.BadArgumentError("blend: there are no documents; give some")
            return _documents.Composed(self._prompt_ids(prompt, options.get("template_args")), [])
        _check_prompt(prompt)
        if _is_chat(prompt):
            messages = check_messages(list(cast(Sequence[Message], prompt)))
            variables = _template_args(options.get("template_args"))
            if self.tokenizer.chat_template is not None:
                self.tokenizer.chat_template.check_variables(variables)
            texts = _documents.texts_of(documents or ())
            return _documents.compose_chat(self.tokenizer, messages, texts, variables)
        if isinstance(prompt, str):
            texts = _documents.texts_of(documents)
            return _documents.compose_text(self.tokenizer, prompt, texts)
        ids = self._prompt_ids(prompt, options.get("template_args"))
        return _documents.Composed(ids, _documents.ranges_of(documents, len(ids)))

    def document_ranges(
        self, prompt: Prompt, **options: Unpack[SamplingOptions]
    ) -> list[tuple[int, int]]:
        """Where the documents of a prompt are among its tokens: (begin, end) of each. With
        :attr:`Result.prompt_ids` they stand for the same prompt."""
        _options.check_names("an answer", options, _options.SAMPLING)
        found = self._composed(prompt, options).documents
        if found is None:
            raise errors.BadArgumentError(
                'document_ranges: with documents="auto" the engine finds them when the prompt '
                'comes '
                "in (usage.blend.documents says how many)"
            )
        return found

    def prepare(
        self,
        documents: Sequence[str],
        prompt: Prompt | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        cache_salt: str | bytes | None = None,
    ) -> list[Usage]:
        """Computes the KV of documents, so that prompts with `blend` find it: in the prefix cache,
        and in the store if there is one. Prompts with `documents="auto"` find these documents in
        their tokens, if this engine has room for blends (`blend_piece`).

        Without it the first prompt with a document computes it before its own tokens.

        Args:
            documents: texts; those that are parts of `prompt` are computed, too.
            prompt: like those that will come. KV of a document is that behind the beginning of the
                prompt (the template's, with a system message). None: a chat without a system
                message, or a bare text where the model has no template.
            template_args, cache_salt: as of those prompts; see :class:`SamplingOptions`.

        Returns:
            What each document took: `cached_tokens` were there.

        Raises:
            TooLargeError: a document that does not fit the model's positions or the cache.
            What :meth:`generate` raises.
        """
        options: SamplingOptions = {"documents": documents}
        if template_args is not None:
            options["template_args"] = template_args
        if prompt is None:
            is_chat = self.has_tokenizer and self.tokenizer.chat_template is not None
            prompt = [{"role": "user", "content": ""}] if is_chat else ""
        composed = self._composed(prompt, options)

        def requests() -> Iterator[tuple[Prompt, SamplingOptions]]:
            for chain, begin in composed.chains(self._info.bos_token_id):
                of_chain: SamplingOptions = {"max_tokens": 0}
                if cache_salt is not None:
                    of_chain["cache_salt"] = cache_salt
                if self._can_blend:  # exact, and the engine knows which tokens the document has
                    of_chain["documents"] = [(begin, len(chain))]
                    of_chain["blend"] = {"ratio": 1, "learn": False}
                yield chain, of_chain

        for chain, of_chain in requests():  # none is computed if one is refused
            self.check(chain, **of_chain)
        usages: dict[int, Usage] = {}
        with contextlib.closing(self.generate_each(requests())) as outcomes:
            for index, outcome in outcomes:
                if isinstance(outcome, errors.QuireError):
                    raise outcome
                usages[index] = dataclasses.replace(outcome.usage, blend=None)
        return [usages[index] for index in range(len(usages))]

    def _submit(self, made: _NewRequest, mail: Mail, keep: bool = True) -> _Request:
        seed = made.sampling["seed"] % 2**64 if _sampling.draws(made.sampling) else None
        request = _Request(-1, mail, made.ids, [], seed)
        ids = np.asarray(made.ids, dtype=np.int64)
        receipt = np.full(1, -1, dtype=np.int64)
        try:
            with self._inbox.lock:  # its outputs find it
                self._handle.submit(ids, made.sampling, receipt)
                request.id = int(receipt[0])
                self._inbox.requests[request.id] = request
            request.answers += [
                _Answer(self._detokenizer(made), made.stops, made.logprobs, keep)
                for _ in range(made.sampling.get("n", 1))
            ]
        except BaseException:
            # An interrupt may come at any line, also when only the library knows the request.
            request.id = int(receipt[0])
            if request.id >= 0:
                self._inbox.requests.setdefault(request.id, request)
                self._drop(request)
            raise
        return request

    def _engine_options(self, options: SamplingOptions, prompt_tokens: int) -> dict[str, Any]:
        """The options of a request as the library takes them, but for `stop`."""
        sampling = _sampling.resolved(self._model_sampling, options)
        for name in ("stop", "special_texts", "template_args", "documents", "blend"):
            sampling.pop(name, None)
        logprobs = options.get("logprobs", 0)
        sampling["logprobs"] = -1 if logprobs is None else _numbers.int64(logprobs, "logprobs")
        asked = sampling.get("max_tokens")
        sampling["max_tokens"] = (
            self._room(prompt_tokens, sampling)
            if asked is None
            else _numbers.int64(asked, "max_tokens")
        )
        sampling["seed"] = _as_signed(sampling["seed"])
        if "speculate" in sampling:
            sampling["draft"] = _numbers.text(sampling.pop("speculate"), "speculate")
        elif "draft_tokens" in sampling or "draft_branches" in sampling:
            raise errors.BadArgumentError(
                'draft_tokens and draft_branches of a request go with speculate: "ngram" or "model"'
            )
        grammar = sampling.pop("grammar", None)
        if grammar is not None:
            special = _texts(options.get("special_texts", ()), "special_texts")
            sampling["grammar"] = self._compiled(grammar, special)
        if "prediction" in sampling:
            sampling["predicted_tokens"] = self._predicted_ids(sampling.pop("prediction"))
        if "turn_weight" in sampling:
            sampling["turn_weight"] = _numbers.int64(sampling["turn_weight"], "turn_weight")
        if not isinstance(sampling.get("turn_group", b""), bytes):
            kind = type(sampling["turn_group"]).__name__
            raise TypeError(f"turn_group must be bytes, not {kind}")
        if "prefill_peer" in sampling:
            sampling["prefill_peer"] = _numbers.text(sampling["prefill_peer"], "prefill_peer")
        if "logit_bias" in sampling:
            sampling["logit_bias"] = _logit_bias(sampling["logit_bias"])
        if isinstance(sampling.get("cache_salt"), str):
            sampling["cache_salt"] = _numbers.text(sampling["cache_salt"], "cache_salt").encode()
        return sampling

    def _outcomes(
        self, batch: Sequence[Item], running: dict[int, tuple[int, _Request]]
    ) -> Iterator[tuple[int, Result | errors.QuireError]]:
        """Takes what has come; yields what has ended, in that order, and takes it from
        `running`."""
        ended: list[tuple[int, Result | errors.QuireError]] = []
        for request_id, output in batch:
            if request_id not in running:
                continue  # another sample of it has failed
            index, request = running[request_id]
            outcome: Result | errors.QuireError | None = None
            try:
                self._piece(request, output)
            except errors.QuireError as error:
                outcome = error
            if outcome is None and request.finished:
                outcome = request.result()
            if outcome is not None:
                del running[request_id]
                self._drop(request)
                ended.append((index, outcome))
        yield from ended

    def _piece(self, request: _Request, output: Output) -> Piece | None:
        if output.error is not None:
            raise _failure(output.error, output)
        if output.usage is not None:
            request.usage = output.usage
        answer = request.answers[output.sample]
        was_stopped = answer.stopped
        piece = answer.put(output)
        if answer.stopped and not answer.finished:
            if was_stopped:
                return None  # computed before the engine heard of the stop text
            self._stop(request, output.sample, answer.tokens)
        return piece

    def _stop(self, request: _Request, sample: int, answer_tokens: int) -> None:
        """Ends one sample; the engine reports its end with the next step."""
        with contextlib.suppress(errors.UnknownSequenceError):  # it has ended by itself
            self._handle.stop(request.id, sample, answer_tokens)

    def _drop(self, request: _Request) -> None:
        """Forgets a request, and ends it if the engine still works on it. Never raises, never
        waits. May be called again, so what an interrupt cut off is done by the next call."""
        handle = self._open_handle
        if handle is None:
            return
        with self._inbox.lock:
            known = request.id in self._inbox.requests
            request.dropped = True
        if known and not (request.answers and request.finished):
            # It has ended by itself, or the engine has.
            with contextlib.suppress(errors.QuireError):
                handle.cancel(request.id)
        with self._inbox.lock:
            self._inbox.requests.pop(request.id, None)

    def _drop_all(self, mail: Mail) -> None:
        """As `_drop`, for every request whose outputs come into `mail`."""
        with self._inbox.lock:
            dropped = [r for r in self._inbox.requests.values() if r.mail is mail]
        for request in dropped:
            self._drop(request)

    # ---- Prompts

    def _prompt_ids(
        self, prompt: Prompt, template_args: Mapping[str, Any] | None = None
    ) -> list[int]:
        _check_prompt(prompt)
        if _is_chat(prompt):
            variables = _template_args(template_args)
            template = self.tokenizer.chat_template
            if template is not None:
                template.check_variables(variables)
            return self.tokenizer.encode_chat(check_messages(prompt), **variables)
        if template_args:
            raise errors.BadArgumentError("template_args go with chat messages, not with a text")
        if isinstance(prompt, str):
            if not prompt:
                raise errors.BadArgumentError("the prompt is an empty text")
            return self.tokenizer.encode(prompt)
        return int_list(prompt, "token ids")

    def _predicted_ids(self, prediction: Any) -> list[int]:
        if isinstance(prediction, str):
            return self.tokenizer.encode(prediction, add_special_tokens=False)
        return int_list(prediction, "prediction")

    def _detokenizer(self, made: _NewRequest) -> Detokenizer | None:
        if not self.has_tokenizer:
            return None
        return Detokenizer(self.tokenizer, made.context, made.special_texts)

    def _room(self, prompt_tokens: int, sampling: Mapping[str, Any]) -> int:
        """The most tokens that an answer can have. 1 if there is no room: then the library says
        what is missing."""
        positions = self._info.max_position_embeddings
        if sampling.get("window"):
            return positions
        room = positions - prompt_tokens
        original = int(self._info.rope["original_max_position_embeddings"])
        if self._info.rope["scaling"] in _ROPE_OF_LENGTH and prompt_tokens <= original * 3 // 4:
            room = min(room, original - prompt_tokens)
        if self._info.layers:  # else the text takes no pages
            # Samples share the whole pages of the prompt.
            samples = max(1, sampling.get("n", 1))
            shared = prompt_tokens // self._page_size
            pages = (self._pages + (samples - 1) * shared) // samples
            room = min(room, pages * self._page_size - prompt_tokens)
        return max(1, room)

    def _read_info(self) -> ModelInfo:
        fields = dict(self._handle.info())
        bos = int(fields["bos_token_id"])
        return ModelInfo(
            architecture=str(fields["architecture"]),
            vocab_size=int(fields["vocab_size"]),
            hidden_size=int(fields["hidden_size"]),
            max_position_embeddings=int(fields["max_position_embeddings"]),
            eos_token_ids=tuple(int(id) for id in fields["eos_token_ids"]),
            bos_token_id=None if bos < 0 else bos,
            parameter_count=int(fields["parameter_count"]),
            weight_bytes=int(fields["weight_bytes"]),
            weight_types={str(name): int(size) for name, size in fields["weight_types"]},
            layers=tuple(
                LayerSpec(
                    **{
                        **dict(layer),
                        "dtype": str(layer["dtype"]),
                        "v_dtype": _other(str(layer["v_dtype"]), str(layer["dtype"])),
                        "head_sinks": tuple(layer["head_sinks"]),
                        "rope": dict(layer["rope"]) if "rope" in layer else None,
                    }
                )
                for layer in fields["layers"]
            ),
            rope={str(name): value for name, value in fields["rope"].items()},
            kernel_path=str(fields["kernel_path"]),
            numa=str(fields["numa"]),
        )


_options.describe(Engine, _options.ENGINE)
_options.with_signature(Engine.__init__, _options.ENGINE, EngineOptions)


class Stream(Iterator[Piece]):
    """The pieces of one answer. The last one has the whole :class:`Result`.

    Take them by iterating, which waits for each, or by :meth:`poll`, which does not. Closing or
    dropping a stream cancels the request; so does what is raised meanwhile, by `on_step` or as
    KeyboardInterrupt.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        options: SamplingOptions,
        on_step: Callable[[], None] | None = None,
        keep: bool = True,
    ) -> None:
        self._open = False
        self._engine = engine
        self._mail = Mail()
        made = engine._make_request(prompt, options)
        self._on_step = on_step
        if on_step is not None:  # before the first step can be over
            engine._inbox.tickers.add(self._mail)
        try:
            self._request = engine._submit(made, self._mail, keep)
            self._open = True
        except BaseException:
            engine._inbox.tickers.discard(self._mail)
            engine._drop_all(self._mail)
            raise
        self._steps = 0
        self._ready: collections.deque[Piece] = collections.deque()
        self._error: BaseException | None = None
        self._result: Result | None = None
        self._turn = threading.Lock()  # threads may share a stream: each piece goes to one of them

    def __next__(self) -> Piece:
        with self._turn:
            if self._open and not self._ready:
                self._engine._inbox.check_may_wait()
            try:
                while not self._ready and self._error is None and self._result is None:
                    if not self._open:
                        raise errors.CancelledError(f"request {self._request.id} was cancelled")
                    self._take(block=True)
            except BaseException:
                self.close()
                raise
            return self._next_ready()

    def poll(self, most_steps: int | None = None) -> list[Piece]:
        """The pieces that have come since the last call, without waiting; none if there are none,
        after the end, or while another thread takes them.

        most_steps: takes the pieces of at most this number of steps. An event loop that serves
            others, too, is else kept for as long as the engine is faster than it.

        Raises what ended the request (ClosedError: the engine was closed), once.
        """
        if not self._turn.acquire(blocking=False):
            return []
        try:
            steps = 0
            try:
                while self._open and self._error is None and steps != most_steps:
                    if not self._take(block=False):
                        break
                    steps += 1
            except BaseException:  # what had come is lost, and the answer would have a gap
                self.close()
                raise
            if self._error is not None and not self._ready:
                error, self._error = self._error, None
                raise error
            pieces = list(self._ready)
            self._ready.clear()
            return pieces
        finally:
            self._turn.release()

    @property
    def finished(self) -> bool:
        """Whether every piece was taken, or the stream has failed or was closed."""
        return not self._open and not self._ready and self._error is None

    @property
    def result(self) -> Result | None:
        """The whole answer; None before its end."""
        return self._result

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return self._request.prompt_ids

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed; None before the first piece."""
        return self._request.usage.get("cached_tokens")

    @property
    def seed(self) -> int | None:
        """As :attr:`Result.seed`."""
        return self._request.seed

    @property
    def samples(self) -> list[Sample]:
        """The answers so far: what was in the pieces that were taken, with logprobs."""
        return [answer.sample for answer in self._request.answers]

    def _next_ready(self) -> Piece:
        """The next piece that is there, else what ended the stream."""
        if self._ready:
            return self._ready.popleft()
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _take(self, block: bool) -> bool:
        """Takes the next that has come; False if there was none. Nothing comes of an engine that
        was closed."""
        closed = self._engine._open_handle is None
        batch = _ffi.closed_error("Engine") if closed else self._mail.take(block)
        if batch is None:
            return False
        while self._on_step is not None and self._steps < self._mail.steps:
            self._steps += 1
            self._on_step()
        if isinstance(batch, BaseException):
            self._error = batch
            self.close()
            return True
        for _, output in batch:
            try:
                piece = self._engine._piece(self._request, output)
            except errors.QuireError as error:
                self._error = error
                break
            if piece is not None:
                self._ready.append(piece)
        if self._error is None and self._request.finished:
            self._result = self._request.result()
            self._ready[-1].result = self._result
        if self._error is not None or self._result is not None:
            self.close()
        return True

    def close(self) -> None:
        """Ends the request, without waiting: its pages are free before the next step. Closing twice
        is allowed."""
        if not self._open:
            return
        self._engine._inbox.tickers.discard(self._mail)
        self._engine._drop(self._request)
        self._open = False
        self._mail.clear()
        self._mail.put([])  # wakes a thread that waits

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _other(name: str, usual: str) -> str | None:
    return None if name == usual else name


def _folder(model_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of a model, None being the embedded one; of a GGUF file that in the cache."""
    if model_dir is None:
        from quire.embedded import embedded_model_dir

        return embedded_model_dir()
    return model_folder(model_dir)


def _make_store(options: Mapping[str, Any]) -> ChunkStore:
    """The store of an engine's own."""
    tiers = _options.of_part("store", options)
    del tiers["kv_store"]
    key_file = tiers.pop("key")
    tiers["key"] = b"" if key_file is None else read_key_file(key_file)
    seconds = _numbers.timeout(tiers.pop("io_timeout"), "kv_io_timeout", most=86400)
    timeout_ms = max(1, round(seconds * 1e3))
    return ChunkStore(**tiers, disk_timeout_ms=timeout_ms, redis_timeout_ms=timeout_ms)


def _option_map(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an engine as the library takes them."""
    mine = _options.of_part("engine", options)
    if mine["staging_bytes"] == 0 and _options.of_part("peers", options)["addresses"]:
        mine["staging_bytes"] = int(_ffi.function("default_staging_bytes")())
    kv_dtype, draft_model = mine.pop("kv_dtype"), mine.pop("draft_model")
    if draft_model is not None:
        draft = model_folder(_folder_name(draft_model, "draft_model"))
        mine["draft_model_directory"] = _folder_name(draft, "draft_model")
    speculate = mine.pop("speculate")
    if speculate == "model" and draft_model is None:
        raise errors.BadArgumentError(
            'speculate is "model" and there is no draft_model; give its folder, or take "ngram"'
        )
    mine["draft"] = speculate or ("none" if draft_model is None else "model")
    for name in ("dtype", "activations"):
        mine[name] = dtype_name(mine[name])
    mine["model_directory"] = _folder_name(folder, "model_dir")
    return _numbers.checked_fields(mine | _kv_dtypes(kv_dtype))


def _folder_name(folder: str | os.PathLike[str], option: str) -> str:
    name = os.fspath(folder)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise errors.BadArgumentError(
            f"{option}: {name!r}: the name of the folder is not valid UTF-8"
        ) from None
    return name


def _kv_dtypes(kv_dtype: str) -> dict[str, str]:
    """ "int8", or "bfloat16,int8" for keys and values apart; nothing for ""."""
    if not kv_dtype:
        return {}
    keys, comma, values = kv_dtype.partition(",")
    return {"k_dtype": keys, "v_dtype": values if comma else keys}


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and isinstance(prompt[0], Mapping)
    )


_PROMPT_KINDS = "a prompt is a text, token ids or a list of chat messages"


def _check_prompt(prompt: Any) -> None:
    """TypeError for what would be taken for a list of ids or of messages and is none."""
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        kind = type(prompt).__name__
        raise TypeError(f"{_PROMPT_KINDS}, not {kind}; decode them first: prompt.decode()")
    if isinstance(prompt, Mapping):
        raise TypeError(
            f"{_PROMPT_KINDS}, not a mapping; a chat is a list, also of a single message: "
            '[{"role": "user", "content": "..."}]'
        )
    if not isinstance(prompt, Iterable):
        raise TypeError(f"{_PROMPT_KINDS}, not {type(prompt).__name__}")


def _conversation(messages: Any) -> list[Message]:
    """The messages as a list, of which there is one at least."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            'a chat is a list of messages, such as [{"role": "user", "content": "..."}], not '
            + type(messages).__name__
        )
    found = list(messages)
    if not found:
        raise errors.BadArgumentError("the chat has no message; give at least one")
    return check_messages(found)


def _template_args(arguments: Any) -> dict[str, Any]:
    """Arguments of a chat template as plain JSON values, so that a template gets no objects."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError("template_args must be a mapping from names to values")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.BadArgumentError(f"template_args: {error}") from None
    return plain


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError("logit_bias must be a mapping from token ids to numbers")
    return {
        _numbers.int64(id, "logit_bias: a token id"): _numbers.real(value, f"logit_bias of {id}")
        for id, value in bias.items()
    }


def _as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether they were given as a single one."""
    _check_prompt(prompts)
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts], True
    if isinstance(prompts, np.ndarray):
        return ([prompts], True) if prompts.ndim == 1 else (list(prompts), False)
    prompts = list(prompts)
    if prompts and hasattr(prompts[0], "__index__"):
        return [prompts], True
    return prompts, False


def _split_stops(stop: Any) -> tuple[list[str], list[list[int]]]:
    """Stop texts, which are watched for here, and stop token lists, which the engine watches
    for."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, Sequence) or isinstance(stops, (bytes, bytearray)):
        kind = type(stop).__name__
        raise TypeError(f"stop is a text, or a list of texts and lists of token ids, not {kind}")
    for entry in stops:
        if not isinstance(entry, Iterable) or isinstance(entry, (bytes, bytearray)):
            kind = type(entry).__name__
            raise TypeError(f"an entry of stop is a text or a list of token ids, not {kind}")
    texts = [_numbers.text(entry, "stop") for entry in stops if isinstance(entry, str)]
    return texts, [int_list(entry, "stop") for entry in stops if not isinstance(entry, str)]


def _texts(value: Any, option: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} is a list of texts, not {type(value).__name__}")
    return [_numbers.text(entry, option) for entry in value]


def _miss_name(reason: int) -> str | None:
    """The name of a quire::MissReason; None for the first, which is no miss."""
    return None if reason == 0 else str(_ffi.function("miss_reason_name")(reason))


def _prefix_miss(counts: dict[str, int]) -> PrefixMiss | None:
    """Takes the fields of quire::PrefixMiss from those of a usage."""
    kinds: tuple[Any, ...] = (None, "new", "differs", "evicted", "store")  # by PrefixMissKind
    kind = kinds[counts.pop("prefix_miss", 0)]
    position, evicted_ms = counts.pop("miss_position", 0), counts.pop("evicted_ms", 0)
    return None if kind is None else PrefixMiss(kind, position, evicted_ms)


def _failure(text: str, output: Output) -> errors.QuireError:
    """Why a sample has failed, in Python's words: what C++ calls a filter is a grammar here."""
    error = errors.from_text(text.replace("SamplingOptions::filter", "grammar"))
    option = "grammar" if output.error_option == "filter" else output.error_option
    return errors.about(error, option, output.error_reason)


def _as_signed(seed: int) -> int:
    """The seed's 64 bits as a signed number, the only kind that crosses tvm-ffi."""
    if not isinstance(seed, int) and not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, not {type(seed).__name__}")
    seed = operator.index(seed)
    if not 0 <= seed < 2**64:
        raise errors.BadArgumentError(
            f"seed is {_numbers.shown(seed)}; it must be from 0 to 2^64 - 1"
        )
    return seed - 2**64 if seed >= 2**63 else seed
