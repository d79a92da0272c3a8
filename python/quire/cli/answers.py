"""Answers as text that comes piece by piece, and as JSON objects."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from quire.cli.terminal import note, printable

if TYPE_CHECKING:
    from quire.engine import Engine, Result, Sample, Usage


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


def print_answer(
    engine: Engine, prompt: Any, sampling: dict[str, Any], *, interruptible: bool = False
) -> PrintedAnswer:
    """Prints an answer as it is computed. Interruptible: Ctrl-C ends the answer, not the caller."""
    answer = PrintedAnswer()
    start = time.monotonic()
    first: float | None = None
    stream = engine.stream(prompt, **{"logprobs": None, **sampling})
    try:
        with stream:
            for piece in stream:
                first = time.monotonic() if first is None else first
                text = piece.text if engine.has_tokenizer else "".join(f"{id} " for id in piece.ids)
                answer.text += text
                print(printable(text), end="", flush=True)
                answer.result = piece.result
    except KeyboardInterrupt:
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


def print_sources(engine: Engine, result: Result | None) -> None:
    """With a chunk store: where the KV of the prompt came from, and why no more came."""
    if engine.store is None or result is None:
        return
    note(f"({sources(result.usage)})")


def print_total_sources(engine: Engine) -> None:
    """The same for all requests of the engine together."""
    if engine.store is None:
        return
    stats = engine.stats()
    tiers = {name: stats[f"loaded_{name}_tokens"] for name in ("ram", "disk", "redis")}
    found = ", ".join(f"{count} {name}" for name, count in tiers.items() if count > 0)
    note(
        f"({stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens not computed; "
        f"from the store: {found or 'none'})"
    )


def sources(usage: Usage) -> str:
    """ "300 of 310 prompt tokens not computed: 44 memory, 256 disk in 0.01 s; then: not stored"."""
    found = {
        "memory": usage.memory_tokens,
        "ram": usage.ram_tokens,
        "disk": usage.disk_tokens,
        "redis": usage.redis_tokens,
    }
    text = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens not computed"
    if usage.cached_tokens > 0:
        text += ": " + ", ".join(f"{count} {name}" for name, count in found.items() if count > 0)
    if usage.load_seconds > 0:
        text += f" in {usage.load_seconds:.3f} s"
    if usage.miss is not None:
        text += f"; {'then' if usage.cached_tokens else 'the store'}: {usage.miss}"
    return text


def result_object(result: Result) -> dict[str, Any]:
    """A result as JSON; with several samples a list of them."""
    usage = _usage_object(result.usage)
    if len(result.samples) > 1:
        return {"samples": [_sample_object(sample) for sample in result.samples], "usage": usage}
    return {**_sample_object(result.samples[0]), "usage": usage}


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
