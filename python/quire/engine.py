"""quire.Engine: text or token ids in, text and token ids out, from a model folder."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np

from quire import _ffi, errors
from quire._arrays import dtype_name, int_list
from quire._kv_store import Attachment
from quire.kv_cache import LayerSpec
from quire.store import ChunkStore
from quire.text import Detokenizer, Message, StopStrings, Tokenizer

__all__ = [
    "Engine",
    "EngineOptions",
    "FinishReason",
    "MemoryPlan",
    "ModelInfo",
    "Piece",
    "Prompt",
    "Result",
    "Sample",
    "SamplingOptions",
    "Stream",
    "Usage",
]

Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Sequence[Message]
"""A text (taken as it is), token ids, or the messages of a chat (put through the model's
template)."""

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]

# In the order of quire::FinishReason; "error" raises and is never seen in a result.
_FINISH_REASONS: tuple[Any, ...] = (None, "stop", "length", "cancelled", "error")
_DEFAULT_MAX_TOKENS = 128
# Of EngineOptions; they are of no matter to what an engine takes of the memory.
_STORE_OPTIONS = frozenset(
    (
        "kv_store",
        "kv_dir",
        "kv_dir_bytes",
        "kv_redis",
        "kv_ram_bytes",
        "kv_durability",
        "kv_key_file",
        "kv_load_timeout",
        "kv_load_always",
    )
)
_FLUSH_SECONDS = 60.0  # more than a store takes to write the largest queue to a slow disk


class EngineOptions(TypedDict, total=False):
    """The options of :class:`Engine`, which says what they mean."""

    dtype: Any
    kv_dtype: str
    threads: int
    page_size: int
    prefill_chunk: int
    kv_bytes: int
    state_bytes: int
    speculate: str | None
    draft_model: str | os.PathLike[str] | None
    draft_tokens: int
    draft_branches: int
    max_tree_nodes: int
    prefix_cache: bool
    max_num_sequences: int
    max_waiting: int
    kernel_path: str
    kv_store: ChunkStore | None
    kv_dir: str | os.PathLike[str] | None
    kv_dir_bytes: int
    kv_redis: str
    kv_ram_bytes: int
    kv_durability: str
    kv_key_file: str | os.PathLike[str] | None
    kv_load_timeout: float
    kv_load_always: bool


class SamplingOptions(TypedDict, total=False):
    """How an answer is drawn. A draw depends on logits, history, seed and position alone.

    max_tokens: most new tokens; 128 by default, or what the model's positions leave.
    temperature: 0 (default) takes the most likely token.
    top_k, top_p, min_p: cut the unlikely; 0, 1 and 0 switch them off (default).
    repetition_penalty: over prompt and answer; presence_penalty, frequency_penalty: over the
        answer.
    logit_bias: added to the logits of single token ids.
    seed: 0 by default; any number of 64 bits.
    n: samples per prompt.
    logprobs: 0 (default) gives the log-probability of each token, k those of the k best ones as
        well, None none.
    ignore_eos: go on behind the end-of-answer token.
    stop: texts, or lists of token ids, that end the answer and are cut from it.
    cache_salt: requests with equal salts reuse each other's KV, others never do; a text or bytes.
    speculate, draft_tokens, draft_branches: how tokens are guessed, instead of what the engine was
        made with; see :class:`Engine`.
    window, sinks: endless text: a token sees the first `sinks` tokens and the last window - sinks,
        and prompt and answer may pass the model's positions; 0 (default): it sees all.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    logprobs: int | None
    ignore_eos: bool
    stop: str | Sequence[str | Sequence[int]]
    cache_salt: str | bytes
    speculate: str
    draft_tokens: int
    draft_branches: int
    window: int
    sinks: int


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
    load_seconds: that it took.
    drafted_tokens, accepted_tokens: tokens that were guessed, and of these the right ones.
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
    load_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_forwards: int = 0

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
    """

    prompt_ids: list[int]
    samples: list[Sample]
    usage: Usage

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
    sample: index of the sample.
    finish_reason: set on the last piece of a sample.
    result: the whole answer, set on the last piece of all.
    """

    ids: list[int]
    sample: int
    finish_reason: FinishReason | None
    result: Result | None

    @staticmethod
    def of(text: str, ids: list[int], sample: int, finish_reason: FinishReason | None) -> Piece:
        piece = Piece(text)
        piece.ids, piece.sample, piece.finish_reason, piece.result = (
            ids,
            sample,
            finish_reason,
            None,
        )
        return piece

    @property
    def text(self) -> str:
        """The text as a plain str."""
        return str(self)


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What the engine runs.

    ``eos_token_ids`` end an answer; ``bos_token_id`` is None if there is none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    parameter_count: int
    weight_bytes: int
    layers: tuple[LayerSpec, ...]
    rope: Mapping[str, Any]
    kernel_path: str


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
    total_bytes: all of these together.
    machine_bytes: memory of the machine.
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
    total_bytes: int
    machine_bytes: int
    longest_context: int

    @property
    def fits(self) -> bool:
        """Whether the machine has so much memory."""
        return self.total_bytes <= self.machine_bytes


@dataclasses.dataclass
class _Output:
    """What one step gave to one sample."""

    sample: int
    tokens: list[int]
    logprobs: list[
        list[tuple[int, float]]
    ]  # per token: the chosen one, then the best ones; empty if not asked for
    finish_reason: FinishReason | None
    cached_tokens: int
    tier_tokens: tuple[int, int, int]
    miss: int
    load_ns: int
    recomputed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    decode_forwards: int
    error: str | None


class _Answer:
    """One sample in the making: collects tokens, makes text, watches for stop texts."""

    def __init__(
        self, detokenizer: Detokenizer | None, stops: Sequence[str], logprobs: int | None
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
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

    def put(self, output: _Output) -> tuple[str, list[int]]:
        """Takes one step's tokens; returns the new text, and the tokens that belong to the
        answer."""
        taken: list[int] = []
        text = ""
        for i, token in enumerate(output.tokens):
            if self.stopped:
                break
            taken.append(token)
            self._note_logprobs(output.logprobs[i])
            if self._detokenizer is not None:
                text += self._stops.put(self._detokenizer.put([token]))
        if output.finish_reason is not None and not self.stopped:
            text += self._rest_of_text()
        self.sample.ids += taken
        if self._detokenizer is not None:
            self.sample.text = (self.sample.text or "") + text
        if output.finish_reason is not None:
            self.sample.finish_reason = "stop" if self.stopped else output.finish_reason
        return text, taken

    def _rest_of_text(self) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.put(self._detokenizer.finish())
        return text + self._stops.finish()

    def _note_logprobs(self, entries: list[tuple[int, float]]) -> None:
        if self.sample.logprobs is not None:
            self.sample.logprobs.append(entries[0][1])
        if self.sample.top_logprobs is not None:
            self.sample.top_logprobs.append(entries[1:])


class _Request:
    """One submitted prompt."""

    def __init__(self, id: int, prompt_ids: list[int], answers: list[_Answer]) -> None:
        self.id = id
        self.prompt_ids = prompt_ids
        self.answers = answers
        self.outputs: collections.deque[_Output] = collections.deque()
        self.last: _Output | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def result(self) -> Result:
        samples = [answer.sample for answer in self.answers]
        usage = Usage(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=0,
            completion_tokens=sum(len(sample.ids) for sample in samples),
        )
        if self.last is not None:
            ram, disk, redis = self.last.tier_tokens
            usage = dataclasses.replace(
                usage,
                cached_tokens=self.last.cached_tokens,
                memory_tokens=self.last.cached_tokens - ram - disk - redis,
                ram_tokens=ram,
                disk_tokens=disk,
                redis_tokens=redis,
                recomputed_tokens=self.last.recomputed_tokens,
                miss=_miss_name(self.last.miss),
                load_seconds=self.last.load_ns / 1e9,
                drafted_tokens=self.last.drafted_tokens,
                accepted_tokens=self.last.accepted_tokens,
                decode_forwards=self.last.decode_forwards if self.last.drafted_tokens else 0,
            )
        return Result(self.prompt_ids, samples, usage)


class Engine(_ffi.Owner):
    """Runs a language model from a Hugging Face folder (config.json, safetensors, tokenizer.json).

    Exact: an answer and its logits depend on the prompt and the options alone, not on what runs
    beside it, on page size, chunking or threads. Threads of Python may share an engine; one at a
    time computes, for all of them.

    Args:
        model_dir: the folder; that of the embedded model (:func:`quire.embedded_model_dir`) if
            None.
        dtype: "bfloat16" or "float32": of products, and of stored keys and values unless kv_dtype
            says otherwise.
        kv_dtype: "bfloat16", "float32", "float16", "int8" or "fp8", or two of them for keys and for
            values: "bfloat16,int8". The narrow ones are codes with a scale per token and head.
        threads: 0 = one per core.
        page_size: tokens per page of KV; 0 = chosen for the model.
        prefill_chunk: most new tokens of one step.
        kv_bytes: memory for KV pages; 0 = one sequence of all the model's positions, at most a
            quarter of the machine's memory.
        state_bytes: models with recurrent layers: memory for the states that the prefix cache
            keeps, beside those of samples in work; 0 = at most 128 states and an eighth of the
            machine's memory.
        speculate: guess the next tokens and verify them in one forward, which changes no bit of an
            answer: "ngram" (what followed earlier in prompt and answer) or "model" (a smaller one);
            "none" by default, with a draft_model "model".
        draft_model: the smaller model's folder; its tokens are the same.
        draft_tokens: most guesses of a step; draft_branches: alternatives that are followed.
        max_tree_nodes: guesses of all samples in a step, and one more for each sample; 0 = 64 if
            speculate or draft_model is given. Recurrent layers keep a state for each.
        prefix_cache: keep the KV of finished answers, and reuse the longest common prefix.
        max_num_sequences: most samples in work at a time; more wait.
        max_waiting: most requests that wait.
        kernel_path: one of :func:`quire.kernel_paths`; the best one if empty.
        kv_store: a :class:`quire.ChunkStore` in which KV outlives the engine; the caller closes it.
        kv_dir, kv_redis, kv_ram_bytes: or the tiers of a store of the engine's own: a folder,
            "HOST:PORT" of Redis, several of a cluster or a URL (as ``ChunkStore.redis``), memory
            beside the pages. kv_dir_bytes: the most that the folder takes; kv_durability: "none",
            "async", "os" or "sync"; kv_key_file: a file whose content signs the chunks.
        kv_load_timeout: seconds that a request waits for the store at most.
        kv_load_always: load even what is predicted to be computed sooner.

    The store is used as soon as the digest of the model's files is known. It is kept, so that only
    the first engine of a model computes it, beside its first answers (see :meth:`wait_for_store`).

    Raises:
        NotFoundError, CorruptError, IncompatibleError, BadArgumentError: the folder is not what it
            should be.
        OutOfMemoryError: weights or pages do not fit.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        *,
        dtype: Any = "bfloat16",
        kv_dtype: str = "",
        threads: int = 0,
        page_size: int = 0,
        prefill_chunk: int = 512,
        kv_bytes: int = 0,
        state_bytes: int = 0,
        speculate: str | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        draft_tokens: int = 8,
        draft_branches: int = 2,
        max_tree_nodes: int = 0,
        prefix_cache: bool = True,
        max_num_sequences: int = 64,
        max_waiting: int = 65536,
        kernel_path: str = "",
        kv_store: ChunkStore | None = None,
        kv_dir: str | os.PathLike[str] | None = None,
        kv_dir_bytes: int = 0,
        kv_redis: str = "",
        kv_ram_bytes: int = 0,
        kv_durability: str = "os",
        kv_key_file: str | os.PathLike[str] | None = None,
        kv_load_timeout: float = 2.0,
        kv_load_always: bool = False,
    ) -> None:
        self._attachment: Attachment | None = None
        has_tiers = kv_dir is not None or bool(kv_redis) or kv_ram_bytes > 0
        if kv_store is not None and has_tiers:
            raise errors.BadArgumentError(
                "Engine: kv_store and kv_dir, kv_redis or kv_ram_bytes are two stores; give one"
            )
        self.model_dir = _folder(model_dir)
        store = kv_store
        if has_tiers:
            store = ChunkStore(
                kv_dir,
                redis=kv_redis,
                ram_bytes=kv_ram_bytes,
                disk_bytes=kv_dir_bytes,
                durability=kv_durability,  # type: ignore[arg-type]
                key=b"" if kv_key_file is None else Path(kv_key_file).read_bytes(),
            )
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_load = self._begin_tokenizer()  # beside the weights
        handle = _ffi.new_engine(
            _option_map(
                self.model_dir,
                {
                    "dtype": dtype,
                    "kv_dtype": kv_dtype,
                    "threads": threads,
                    "page_size": page_size,
                    "prefill_chunk": prefill_chunk,
                    "kv_bytes": kv_bytes,
                    "state_bytes": state_bytes,
                    "speculate": speculate,
                    "draft_model": draft_model,
                    "draft_tokens": draft_tokens,
                    "draft_branches": draft_branches,
                    "max_tree_nodes": max_tree_nodes,
                    "prefix_cache": prefix_cache,
                    "max_num_sequences": max_num_sequences,
                    "max_waiting": max_waiting,
                    "kernel_path": kernel_path,
                },
            )
        )
        # Reentrant: the garbage collector may close a stream, and so cancel its request, at any
        # line of Python.
        self._lock = threading.RLock()
        self._requests: dict[int, _Request] = {}
        super().__init__(handle)
        self._info = self._read_info()
        if store is not None:
            use = {
                "load_timeout_ms": max(1, round(kv_load_timeout * 1000)),
                "load_always": kv_load_always,
            }
            owned = kv_store is None
            self._attachment = Attachment(store, owned, self.model_dir, use, self._attach_store)

    def _attach_store(
        self, store: ChunkStore, identity: dict[str, Any], options: dict[str, Any]
    ) -> None:
        with self._lock:
            self._handle.attach_store(store.__tvm_ffi_object__(), identity, options)

    @property
    def store(self) -> ChunkStore | None:
        """Where KV outlives this engine; None without one."""
        return None if self._attachment is None else self._attachment.store

    def wait_for_store(self) -> None:
        """Waits until the digest of the model's files is known and the store in use; raises what
        went wrong with that."""
        if self._attachment is not None:
            self._attachment.wait()

    @property
    def uses_store(self) -> bool:
        """Whether the store is in use already."""
        return self._attachment is not None and self._attachment.done

    def flush_store(self, timeout: float = _FLUSH_SECONDS) -> None:
        """Puts what is in memory and not in the store, and waits until it is as durable as the
        store promises. TimeoutError after `timeout` seconds."""
        if self._attachment is None:
            return
        self._attachment.wait()
        with self._lock:
            self._handle.flush_store(round(timeout * 1000))

    @staticmethod
    def plan_memory(
        model_dir: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
    ) -> MemoryPlan:
        """The memory that an engine of this model and these options takes, from config.json and the
        headers of the weights alone: in milliseconds, whatever the size of the model.

        Raises as the constructor, but no OutOfMemoryError: look at :attr:`MemoryPlan.fits`.
        """
        fields = _ffi.function("Engine.plan_memory")(_option_map(_folder(model_dir), options))
        names = [field.name for field in dataclasses.fields(MemoryPlan)]
        return MemoryPlan(**{name: int(fields[name]) for name in names})

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
            with self._lock:
                self._open_handle = None
                self._requests.clear()
            if attachment is not None:
                attachment.stop()
                attachment.close()

    def _write_rest(self, attachment: Attachment) -> None:
        try:
            attachment.wait()
            with self._lock:
                self._handle.flush_store(round(_FLUSH_SECONDS * 1000))
        except (errors.QuireError, OSError, ValueError):
            pass  # ValueError: config.json has become something else

    @property
    def info(self) -> ModelInfo:
        """The model and how it is run."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. NotFoundError when its folder has none."""
        if self._tokenizer is None:
            load, self._tokenizer_load = self._tokenizer_load, None
            self._tokenizer = Tokenizer(self.model_dir) if load is None else load.result()
        return self._tokenizer

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

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges of now, from any thread at any time.

        pages_total, pages_free, pages_in_use (those of retained sequences among them);
        retained_sequences, retained_tokens (of the prefix cache); waiting, running (requests);
        steps, prompt_tokens, cached_tokens, completion_tokens, preemptions; kv_bytes,
        kv_bytes_per_token, weight_bytes, page_size (tokens).

        Of recurrent layers: states_total, states_free, retained_states (of the prefix cache),
        state_bytes; recomputed_tokens, as in :class:`Usage`.

        Of guesses: drafted_tokens, accepted_tokens, decode_forwards, as in :class:`Usage`; draft_ns
        (that guessing took).

        Of the chunk store: loading (requests that wait for it), loads, loaded_ram_tokens,
        loaded_disk_tokens, loaded_redis_tokens, load_ns; layer_loads (loads that a forward
        took layer by layer), overlap_ns (that was computed meanwhile); stored_chunks, stored_bytes,
        refused_chunks; compute_ns_per_token, which a load must beat.
        """
        return {str(name): int(value) for name, value in self._handle.stats().items()}

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
        with self._lock:
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
        """Answers to one prompt or to many at once.

        Args:
            prompts: a text, token ids or chat messages; or a list of such.
            **options: see :class:`SamplingOptions`.

        Returns:
            A :class:`Result` for one prompt, else a list of them in the order of the prompts.

        Raises:
            BadArgumentError: an option or token id out of range, an empty prompt.
            TooLargeError: a prompt and its max_tokens can never fit.
            FullError: too many requests wait.
        """
        many, one = _as_list(prompts)
        results: dict[int, Result] = {}
        requests = ((prompt, options) for prompt in many)
        # All at once, so that what is wrong with any of them is known before anything is computed.
        with contextlib.closing(self.generate_each(requests, in_flight=len(many))) as outcomes:
            for index, outcome in outcomes:
                if isinstance(outcome, errors.QuireError):
                    raise outcome
                results[index] = outcome
        return results[0] if one else [results[index] for index in range(len(many))]

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
        """
        running: dict[int, _Request] = {}
        source = enumerate(requests)
        try:
            while True:
                while len(running) < in_flight and (entry := next(source, None)) is not None:
                    index, (prompt, options) = entry
                    try:
                        running[index] = self._submit(prompt, options)
                    except errors.QuireError as error:
                        yield index, error
                if not running:
                    return
                self._step_for(list(running.values()))
                if on_step is not None:
                    on_step()
                for index, request in list(running.items()):
                    outcome = self._outcome(request)
                    if outcome is not None:
                        del running[index]
                        yield index, outcome
        finally:
            for request in running.values():
                self._drop(request)

    def check(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> int:
        """Raises what :meth:`generate` would raise before it computes; else the number of the
        prompt's tokens."""
        request = self._submit(prompt, options)
        self._drop(request)
        return len(request.prompt_ids)

    def stream(self, prompt: Prompt, **options: Unpack[SamplingOptions]) -> Stream:
        """The answer to one prompt, piece by piece as it is computed.

        Raises as :meth:`generate`, and at once. Several streams may be open at a time: each step
        computes for all of them.

        Args:
            prompt: a text, token ids or chat messages.
            **options: see :class:`SamplingOptions`.

        Returns:
            An iterator over :class:`Piece`: a str with the tokens that came with it.
        """
        return Stream(self, self._submit(prompt, options))

    # ---- Requests. Locked: the maps of requests and every call of the C++ engine.

    def _submit(self, prompt: Prompt, options: SamplingOptions) -> _Request:
        unknown = options.keys() - SamplingOptions.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"there is no option {sorted(unknown)[0]!r}; options are "
                + ", ".join(SamplingOptions.__annotations__)
            )
        with self._lock:
            ids = self._prompt_ids(prompt)
            stop_texts, stop_ids = _split_stops(options.get("stop", ()))
            logprobs = options.get("logprobs", 0)
            sampling: dict[str, Any] = {
                name: value
                for name, value in options.items()
                if name not in ("stop", "logprobs", "max_tokens")
            }
            sampling["logprobs"] = -1 if logprobs is None else logprobs
            sampling["max_tokens"] = self._max_tokens(
                options.get("max_tokens"), 0 if options.get("window") else len(ids)
            )
            if "seed" in sampling:
                sampling["seed"] = _as_signed(sampling["seed"])
            if stop_ids:
                sampling["stop"] = stop_ids
            if "speculate" in sampling:
                sampling["draft"] = sampling.pop("speculate")
            elif "draft_tokens" in sampling or "draft_branches" in sampling:
                raise errors.BadArgumentError(
                    'draft_tokens and draft_branches of a request go with speculate: "ngram" or '
                    '"model"'
                )
            if isinstance(sampling.get("cache_salt"), str):
                sampling["cache_salt"] = sampling["cache_salt"].encode()
            if stop_texts and not self.has_tokenizer:
                raise errors.BadArgumentError(
                    "stop: texts need a tokenizer, and this model has none; give token ids"
                )
            StopStrings(stop_texts)  # raises what is wrong with them while nothing is submitted
            request_id = int(self._handle.submit(np.asarray(ids, dtype=np.int64), sampling))
            answers = [
                _Answer(self._detokenizer(prompt, ids), stop_texts, logprobs)
                for _ in range(sampling.get("n", 1))
            ]
            request = _Request(request_id, ids, answers)
            self._requests[request_id] = request
            return request

    def _advance(self, request: _Request) -> list[Piece]:
        """Computes until there is something for this request, and gives it."""
        with self._lock:
            while not request.outputs:
                self._check_known(request)
                self._step(request)
        return self._take_outputs(request)

    def _step_for(self, requests: Sequence[_Request]) -> None:
        """One step, unless something has come for one of these requests meanwhile."""
        with self._lock:
            if any(request.outputs for request in requests):
                return
            self._check_known(requests[0])
            self._step(requests[0])

    def _outcome(self, request: _Request) -> Result | errors.QuireError | None:
        """What became of a request; None while it has not ended. One that ended is forgotten."""
        try:
            # A stop text is found here; the engine must hear of it before it computes on.
            self._take_outputs(request)
        except errors.QuireError as error:
            self._drop(request)
            return error
        if not request.finished:
            return None
        self._drop(request)
        return request.result()

    def _check_known(self, request: _Request) -> None:
        if request.id not in self._requests:
            raise errors.CancelledError(f"request {request.id} was cancelled or its engine closed")

    def _take_outputs(self, request: _Request) -> list[Piece]:
        """What has come for this request since the last call."""
        with self._lock:
            outputs = list(request.outputs)
            request.outputs.clear()
        pieces = [self._piece(request, output) for output in outputs]
        return [piece for piece in pieces if piece is not None]

    def _step(self, waiting: _Request) -> None:
        """One step of the C++ engine, its outputs handed to the requests they belong to."""
        any_output = False
        for request_id, output in _outputs(self._handle.step()):
            any_output = True
            request = self._requests.get(request_id)
            if request is not None:  # else cancelled meanwhile
                request.outputs.append(output)
        if not any_output and self._handle.idle():
            raise errors.InternalError(
                f"the engine is idle, but request {waiting.id} has not ended"
            )

    def _piece(self, request: _Request, output: _Output) -> Piece | None:
        if output.error is not None:
            raise errors.from_text(output.error)
        if output.finish_reason is not None:
            request.last = output
        answer = request.answers[output.sample]
        was_stopped = answer.stopped
        text, ids = answer.put(output)
        if answer.stopped and not answer.finished:
            if was_stopped:
                return None  # computed by another thread before the engine heard of the stop text
            self._stop(request, output.sample, len(answer.sample.ids))
        return Piece.of(text, ids, output.sample, answer.sample.finish_reason)

    def _stop(self, request: _Request, sample: int, answer_tokens: int) -> None:
        """Ends one sample; the engine reports its end with the next step."""
        with self._lock:
            try:
                self._handle.stop(request.id, sample, answer_tokens)
            except errors.UnknownSequenceError:
                pass  # it has ended by itself, and the report waits in request.outputs

    def _drop(self, request: _Request) -> None:
        """Forgets a request, and ends it if the engine still works on it."""
        with self._lock:
            known = self._requests.pop(request.id, None) is not None
            if not known or request.finished or self._open_handle is None:
                return
            try:
                self._handle.cancel(request.id)
            except errors.UnknownSequenceError:
                pass  # it has ended by itself

    # ---- Prompts

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_chat(prompt):
            return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        return int_list(prompt, "token ids")

    def _detokenizer(self, prompt: Prompt, ids: list[int]) -> Detokenizer | None:
        if not self.has_tokenizer:
            return None
        # The answer to a chat stands alone; otherwise it goes on from the prompt.
        context = (
            () if _is_chat(prompt) else [id for id in ids[-8:] if 0 <= id < self._info.vocab_size]
        )
        return Detokenizer(self.tokenizer, context)

    def _max_tokens(self, asked: int | None, prompt_length: int) -> int:
        if asked is not None:
            return asked
        room = self._info.max_position_embeddings - prompt_length
        return max(1, min(_DEFAULT_MAX_TOKENS, room))

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
        )


class Stream(Iterator[Piece]):
    """The pieces of one answer. The last one has the whole :class:`Result`.

    Closing or dropping it cancels the request.
    """

    def __init__(self, engine: Engine, request: _Request) -> None:
        self._engine = engine
        self._request = request
        self._ready: collections.deque[Piece] = collections.deque()

    def __next__(self) -> Piece:
        if not self._ready:
            if self._request.finished:
                raise StopIteration
            self._compute()
        return self._ready.popleft()

    def _compute(self) -> None:
        try:
            while not self._ready:
                self._ready.extend(self._engine._advance(self._request))
        except BaseException:
            self.close()
            raise
        if self._request.finished:
            self._ready[-1].result = self._request.result()
            self.close()

    def close(self) -> None:
        """Ends the request; its pages are free then. Closing twice is allowed."""
        self._engine._drop(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _other(name: str, usual: str) -> str | None:
    return None if name == usual else name


def _folder(model_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of a model, None being the embedded one."""
    if model_dir is None:
        from quire.embedded import embedded_model_dir

        return embedded_model_dir()
    return Path(model_dir)


def _option_map(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the library takes them; those that are absent have its defaults, which are
    those of Engine.__init__."""
    name = os.fspath(folder)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise errors.BadArgumentError(
            f"{name!r}: the name of the folder is not valid UTF-8"
        ) from None
    dtype = dtype_name(options.get("dtype", "bfloat16"))
    mine = {name: value for name, value in options.items() if name not in _STORE_OPTIONS}
    kv_dtype = mine.pop("kv_dtype", "")
    draft_model = mine.pop("draft_model", None)
    if draft_model is not None:
        mine["draft_model_directory"] = os.fspath(draft_model)
    speculate = mine.pop("speculate", None)
    mine["draft"] = speculate or ("none" if draft_model is None else "model")
    return {**mine, **_kv_dtypes(kv_dtype), "model_directory": name, "dtype": dtype}


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


def _as_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether they were given as a single one."""
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
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    texts = [entry for entry in stops if isinstance(entry, str)]
    return texts, [int_list(entry, "stop") for entry in stops if not isinstance(entry, str)]


def _miss_name(reason: int) -> str | None:
    """Of quire::MissReason; None for the first, which is no miss."""
    return None if reason == 0 else str(_ffi.function("miss_reason_name")(reason))


def _as_signed(seed: int) -> int:
    """The seed's 64 bits as a signed number, the only kind that crosses tvm-ffi."""
    if not 0 <= seed < 2**64:
        raise errors.BadArgumentError(f"seed = {seed} is out of range: 0 to 2^64 - 1")
    return seed - 2**64 if seed >= 2**63 else seed


def _outputs(step: Any) -> Iterator[tuple[int, _Output]]:
    """Request ids and outputs from the flat arrays of one step (StepArrays in
    src/ffi/engine.cc)."""
    rows = np.from_dlpack(step["requests"]).tolist()
    if not rows:
        return
    tokens = np.from_dlpack(step["tokens"]).tolist()
    ends = np.from_dlpack(step["logprob_ends"]).tolist()
    entries = list(
        zip(
            np.from_dlpack(step["logprob_tokens"]).tolist(),
            np.from_dlpack(step["logprobs"]).tolist(),
        )
    )
    begin = 0
    for row in rows:
        request_id, sample, end, reason, _, cached_tokens, _, error_index, *store = row
        starts = [ends[i - 1] if i > 0 else 0 for i in range(begin, end)]
        logprobs = [entries[start:stop] for start, stop in zip(starts, ends[begin:end])]
        yield (
            request_id,
            _Output(
                sample=sample,
                tokens=tokens[begin:end],
                logprobs=logprobs,
                finish_reason=_FINISH_REASONS[reason],
                cached_tokens=cached_tokens,
                tier_tokens=(store[0], store[1], store[2]),
                miss=store[3],
                load_ns=store[4],
                recomputed_tokens=store[5],
                drafted_tokens=store[6],
                accepted_tokens=store[7],
                decode_forwards=store[8],
                error=str(step["errors"][error_index]) if error_index >= 0 else None,
            ),
        )
        begin = end
