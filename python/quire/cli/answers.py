"""Answers as text that comes piece by piece, and as JSON objects."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from quire import errors
from quire.cli.terminal import PromptProgress, is_terminal, note, printable, told_line

if TYPE_CHECKING:
    from quire.engine import BlendUsage, Engine, Result, Sample, Usage


@dataclasses.dataclass
class PrintedAnswer:
    """What was printed of an answer, and how long it took.

    text: all of it; result: None when Ctrl-C ended it early.
    prefill_seconds: up to the first token; decode_seconds: from there on.
    """

    text: str = ""
    result: Result | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class _PrefillProgress:
    """Shows how far the prompt of the engine's one request is, until its answer begins."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._done()
        self._display: PromptProgress | None = None

    def begin(self, prompt_tokens: int) -> None:
        if is_terminal(sys.stderr):
            self._display = PromptProgress(prompt_tokens, sys.stderr)

    def update(self) -> None:
        if self._display is not None:
            self._display.update(self._done() - self._before)

    def end(self) -> None:
        if self._display is not None:
            self._display.clear()
            self._display = None

    def _done(self) -> int:
        stats = self._engine.stats()
        return stats["computed_tokens"] + stats["cached_tokens"] + stats["remote_tokens"]


def print_answer(
    engine: Engine, prompt: Any, sampling: dict[str, Any], *, interruptible: bool = False
) -> PrintedAnswer:
    """Prints an answer as it is computed. Interruptible: Ctrl-C ends the answer, not the caller."""
    answer = PrintedAnswer()
    start = time.monotonic()
    first: float | None = None
    progress = _PrefillProgress(engine)
    stream = engine.stream(prompt, on_step=progress.update, **{"logprobs": None, **sampling})
    progress.begin(stream.prompt_tokens)
    try:
        with stream:
            for piece in stream:
                progress.end()
                first = time.monotonic() if first is None else first
                text = piece.text if engine.has_tokenizer else "".join(f"{id} " for id in piece.ids)
                answer.text += text
                print(printable(text), end="", flush=True)
                answer.result = piece.result
    except KeyboardInterrupt:
        progress.end()
        if not interruptible:
            raise
    print(flush=True)
    now = time.monotonic()
    answer.prefill_seconds = (first or now) - start
    answer.decode_seconds = now - (first or now)
    return answer


def print_stats(answer: PrintedAnswer) -> None:
    if answer.result is None:
        return
    usage = answer.result.usage
    cached = f", {usage.cached_tokens} of them cached," if usage.cached_tokens else ""
    if usage.recomputed_tokens:
        cached += f" {usage.recomputed_tokens} known and computed again for want of a state,"
    decoded = usage.completion_tokens - 1  # the first one comes with the prompt
    seconds = answer.decode_seconds
    speed = f", {decoded / seconds:.1f} tokens/s" if decoded > 0 and seconds > 0 else ""
    note(
        f"({usage.prompt_tokens} prompt tokens{cached} in {answer.prefill_seconds:.2f} s, "
        f"{usage.completion_tokens} new tokens{speed}, ended by {answer.result.finish_reason})"
    )
    if usage.drafted_tokens:
        note(
            f"({usage.accepted_tokens} of {usage.drafted_tokens} guesses were right: "
            f"{usage.tokens_per_forward:.2f} tokens per forward)"
        )


def print_cut(engine: Engine, result: Result | None, sampling: dict[str, Any]) -> None:
    """That an answer did not end by itself, and what ended it."""
    if result is None or result.finish_reason != "length":
        return
    note(f"(cut after {len(result.ids)} tokens: {_cut_by(engine, result, sampling)})")


def _cut_by(engine: Engine, result: Result, sampling: dict[str, Any]) -> str:
    positions = engine.info.max_position_embeddings
    total = len(result.prompt_ids) + len(result.ids)
    if sampling.get("max_tokens") is not None:
        return "--max-tokens"
    if sampling.get("window"):
        return "as many as the model has positions; --max-tokens N allows more"
    if total >= positions:
        return f"the model has {positions:,} positions; --window N continues beyond them"
    stats = engine.stats()
    held = stats["pages_total"] * stats["page_size"]
    if total >= held:
        return f"the memory for KV holds {held:,} tokens; --kv-bytes SIZE gives more"
    return f"{total:,} tokens are the model's original length; --max-tokens N continues beyond it"


def print_sources(engine: Engine, result: Result | None) -> None:
    """With a chunk store: where the KV of the prompt came from, and why no more came."""
    if engine.store is None or result is None:
        return
    note(f"({sources(result.usage)})")


def print_remote(engine: Engine, result: Result | None) -> None:
    """With other processes for prompts: what they computed, and why one has failed."""
    peers = engine.prefill_peers()
    if not peers or result is None:
        return
    note(f"({remote(result.usage)})")
    for peer in peers:
        if peer.error:
            note(f"({peer.address}: {told_line(peer.error)})")


def remote(usage: Usage) -> str:
    """ "1022 of 1023 prompt tokens computed by another process in 0.21 s; predicted: 0.20 s there,
    0.55 s here"."""
    text = (
        f"{usage.remote_tokens} of {usage.prompt_tokens} prompt tokens computed by another process"
    )
    if usage.remote_seconds > 0:
        text += f" in {usage.remote_seconds:.3f} s"
    if usage.predicted_remote_seconds > 0:
        text += (
            f"; predicted: {usage.predicted_remote_seconds:.3f} s there, "
            f"{usage.predicted_here_seconds:.3f} s here"
        )
    return text


def print_total_remote(engine: Engine) -> None:
    """The same for all requests of the engine together."""
    peers = engine.prefill_peers()
    if not peers:
        return
    stats = engine.stats()
    note(
        f"({stats['remote_tokens']} of {stats['prompt_tokens']} prompt tokens computed by other "
        f"processes; {stats['remote_losses']} prompts were not finished there)"
    )


def print_blend(result: Result | None) -> None:
    """How a blended prompt was made, and that its answer is approximate."""
    if result is None or result.usage.blend is None:
        return
    blend = result.usage.blend
    parts = [
        f"{count} {word}"
        for count, word in (
            (blend.exact_tokens, "found as they are"),
            (blend.kept_tokens, "left by the same blend"),
            (blend.moved_tokens, "moved"),
            (blend.computed_tokens, "computed"),
        )
        if count > 0
    ]
    text = f"{blend.documents} documents; " if blend.documents != 1 else "1 document; "
    text += f"of {result.usage.prompt_tokens} prompt tokens " + ", ".join(parts)
    if blend.moved_tokens > 0:
        text += f"; {blend.recomputed_tokens} of the moved ones computed again"
    if blend.moved_tokens > blend.recomputed_tokens:
        text += (
            f", deviation of the rest {blend.deviation_mean:.3g} on average, "
            f"{blend.deviation_max:.3g} at most"
        )
    if blend.learned_tokens > 0:
        text += f"; {blend.learned_tokens} computed before, to know the documents"
    if blend.wait_seconds > 0:
        text += f"; waited {blend.wait_seconds:.3f} s for documents"
    note(f"({'APPROXIMATE' if blend.approximate else 'exact'}: {text})")


def print_total_sources(engine: Engine) -> None:
    """The same for all requests of the engine together."""
    if engine.store is None:
        return
    stats = engine.stats()
    found = _counts({name: stats[f"loaded_{name}_tokens"] for name in ("ram", "disk", "redis")})
    note(
        f"({stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens not computed; "
        f"from the store: {found or 'none'})"
    )


# What a tier that drops chunks may lack.
_LACKS = {
    "disk": "room or rights in the folder, or --kv-quota is less than a chunk takes",
    "redis": "a server that answers and has room",
}


def print_lost(engine: Engine) -> None:
    """What was computed and is not kept for the next command. Waits until the rest is."""
    if engine.store is None:
        return
    try:
        engine.flush_store()
    except errors.TimeoutError as error:
        note(f"(not all KV is kept: {error})")
    for name, tier in engine.store.statistics()["tiers"].items():
        if tier["dropped_writes"]:
            count = tier["dropped_writes"]
            note(f"({count} chunks of KV are not kept: {name} lacks {_LACKS[name]})")


def sources(usage: Usage) -> str:
    """ "300 of 310 prompt tokens not computed: 44 memory, 256 disk in 0.01 s; then: not stored". A
    blend's line also has what was moved, and where the documents came from."""
    moved = 0 if usage.blend is None else usage.blend.moved_tokens - usage.blend.recomputed_tokens
    reused = usage.cached_tokens + moved
    text = f"{reused} of {usage.prompt_tokens} prompt tokens not computed"
    found = {"memory": usage.memory_tokens, **_by_tier(usage), "moved": moved}
    if reused > 0:
        text += ": " + _counts(found)
    if usage.load_seconds > 0:
        text += f" in {usage.load_seconds:.3f} s"
    if usage.miss is not None:
        text += f"; {'then' if usage.cached_tokens else 'the store'}: {usage.miss}"
    if usage.blend is not None:
        text += _of_documents(usage.blend)
    return text


def _of_documents(blend: BlendUsage) -> str:
    """ "; documents from the store: 512 disk; then: corrupt"."""
    counts = _counts(_by_tier(blend))
    if not counts and blend.miss is None:
        return ""
    text = f"; documents from the store: {counts or 'none'}"
    return text if blend.miss is None else f"{text}; then: {blend.miss}"


def _by_tier(usage: Usage | BlendUsage) -> dict[str, int]:
    return {"ram": usage.ram_tokens, "disk": usage.disk_tokens, "redis": usage.redis_tokens}


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items() if count > 0)


def result_object(result: Result) -> dict[str, Any]:
    """A result as JSON; with several samples a list of them. The seed only if something was
    drawn."""
    rest: dict[str, Any] = {} if result.seed is None else {"seed": result.seed}
    rest["usage"] = _usage_object(result.usage)
    if len(result.samples) > 1:
        return {"samples": [_sample_object(sample) for sample in result.samples], **rest}
    return {**_sample_object(result.samples[0]), **rest}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """What a chunk store gave stands there only if one was asked."""
    fields = dataclasses.asdict(usage)
    always = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return {name: value for name, value in fields.items() if name in always or value}


def _sample_object(sample: Sample) -> dict[str, Any]:
    found: dict[str, Any] = {"ids": sample.ids, "text": sample.text}
    if sample.logprobs is not None:
        found["logprobs"] = sample.logprobs
    found["finish_reason"] = sample.finish_reason
    if sample.top_logprobs is not None:
        found["top_logprobs"] = [
            [{"id": id, "logprob": logprob} for id, logprob in best] for best in sample.top_logprobs
        ]
    return found
