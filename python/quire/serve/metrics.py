"""The page /metrics: Prometheus' text format, with the names and units of vLLM under "quire:".

No label comes from a user: names of routes, limits, tiers and reasons are the program's own, and
addresses of peers are those of its options.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.serve.protocol import ConnectionBook

if TYPE_CHECKING:
    from quire.engine import Engine, Usage

__all__ = ["Histogram", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 10, 50, 100, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)
TIERS = ("memory", "ram", "disk", "redis")

# By field of Engine.stats(): the metric and its help.
_GAUGES = {
    "running": ("num_requests_running", "Requests that the engine computes."),
    "waiting": ("num_requests_waiting", "Requests that wait for pages or a place in the batch."),
    "loading": ("num_requests_loading", "Requests that wait for KV of the chunk store."),
    "remote_waiting": (
        "num_requests_remote",
        "Requests whose prompts another process computes.",
    ),
    "staging_bytes": (
        "prefill_staging_bytes",
        "Memory of what arrives from other processes and is not in its pages yet.",
    ),
    "served_peers": ("prefill_served_peers", "Processes that have their prompts computed here."),
    "served_waiting": (
        "prefill_served_waiting",
        "Their prompts that are queued or being computed.",
    ),
    "sending_bytes": (
        "prefill_sending_bytes",
        "Memory of rows for other processes that they have not taken yet.",
    ),
    "held_prompts": ("prefill_held_prompts", "Prompts that are held for another process."),
    "held_pages": ("prefill_held_pages", "Their pages."),
    "retained_tokens": ("prefix_cache_tokens", "Tokens whose KV the prefix cache keeps."),
    "kv_bytes": ("kv_cache_bytes", "Memory of all pages."),
    "weight_bytes": ("model_weight_bytes", "Memory of the model's weights."),
}
_COUNTERS = {
    "steps": ("engine_steps_total", "Steps of the engine."),
    "prompt_tokens": ("prompt_tokens_total", "Tokens of prompts."),
    "cached_tokens": ("prompt_tokens_cached_total", "Of these, not computed."),
    "recomputed_tokens": ("prompt_tokens_recomputed_total", "Known, and computed again."),
    "completion_tokens": ("generation_tokens_total", "Tokens of answers."),
    "preemptions": ("num_preemptions_total", "Answers that gave up their pages for others."),
    "drafted_tokens": ("spec_decode_num_draft_tokens_total", "Guessed tokens."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total", "Of these, the right ones."),
    "blend_moved_tokens": (
        "blend_moved_tokens_total",
        "Tokens of blended prompts whose KV was used at another place.",
    ),
    "blend_recomputed_tokens": ("blend_recomputed_tokens_total", "Of these, computed again."),
    "blend_exact_tokens": (
        "blend_exact_tokens_total",
        "Tokens of blended prompts that were found as full prefill gives them.",
    ),
    "blend_kept_tokens": (
        "blend_kept_tokens_total",
        "Tokens of blended prompts that an earlier request with the same blend left.",
    ),
    "blend_computed_tokens": (
        "blend_computed_tokens_total",
        "Tokens of blended prompts that were neither found nor moved.",
    ),
    "served_prompts": (
        "prefill_served_prompts_total",
        "Prompts that were sent to other processes.",
    ),
    "served_tokens": ("prefill_served_tokens_total", "Their tokens that were sent."),
    "served_losses": ("prefill_served_losses_total", "Prompts that were refused or broken off."),
    "served_timeouts": (
        "prefill_served_timeouts_total",
        "Of these, prompts whose deadline or lease was over, or whose rows were not taken in time.",
    ),
    "held_used": (
        "prefill_held_used_total",
        "Prompts that were held for another process until it had them.",
    ),
    "held_overdue": (
        "prefill_held_overdue_total",
        "Prompts that it did not ask for in time.",
    ),
    "held_given_up": (
        "prefill_held_given_up_total",
        "Prompts that were not held any more, for want of pages or at the end of serving.",
    ),
    "remote_timeouts": (
        "prefill_timeouts_total",
        "Prompts that other processes did not finish in time.",
    ),
    "loads": ("kv_loads_total", "Loads from the chunk store."),
    "stored_chunks": ("kv_stored_chunks_total", "Chunks put into the store."),
    "stored_bytes": ("kv_stored_bytes_total", "Bytes put into the store."),
    "refused_chunks": ("kv_refused_chunks_total", "Chunks that the store did not take."),
}
# By field of a tier in ChunkStore.statistics(): the metric, its type, its help.
_TIER_FIELDS = {
    "bytes": ("kv_tier_bytes", "gauge", "Bytes that the tier holds."),
    "hits": ("kv_tier_hits_total", "counter", "Chunks that were there."),
    "misses": ("kv_tier_misses_total", "counter", "Chunks that were not there."),
    "evicted": ("kv_tier_evictions_total", "counter", "Chunks that made room for others."),
    "dropped_writes": ("kv_tier_dropped_writes_total", "counter", "Chunks that were not taken."),
    "corrupt": ("kv_tier_corrupt_total", "counter", "Chunks that were damaged."),
    "bytes_read": ("kv_tier_read_bytes_total", "counter", "Bytes read."),
    "bytes_written": ("kv_tier_written_bytes_total", "counter", "Bytes written."),
}


# By field of PrefillPeer: the metric, its type, its help.
_PEER_FIELDS = {
    "connected": ("prefill_peer_connected", "gauge", "Whether prompts can go to the process."),
    "queued_tokens": ("prefill_peer_queued_tokens", "gauge", "Tokens that it has to compute."),
    "prompts": ("prefill_peer_prompts_total", "counter", "Prompts that it computed for this one."),
    "tokens": ("prefill_peer_tokens_total", "counter", "Their tokens that came."),
    "bytes": ("prefill_peer_bytes_total", "counter", "Bytes of KV that came."),
    "losses": ("prefill_peer_losses_total", "counter", "Prompts that it did not finish."),
}

Lines = Callable[[str], Iterable[str]]


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self.sum += value * times
        self.count += times

    def lines(self) -> Lines:
        return histogram_lines(self._bounds, self._counts, self.sum)


def histogram_lines(bounds: Sequence[float], counts: Sequence[int], total: float) -> Lines:
    """The lines of a histogram, for its name. counts: of each class, and of what is above all;
    total: of all observations."""

    def lines(name: str) -> Iterable[str]:
        below = 0
        for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {total:.9g}"
        yield f"{name}_count {below}"

    return lines


class Metrics:
    """What the server counts itself; for the event loop's thread alone."""

    def __init__(self, book: ConnectionBook) -> None:
        self._book = book
        self.time_to_first_token = Histogram(_SECONDS)
        self.inter_token_latency = Histogram(_SECONDS)
        self.e2e_latency = Histogram(_SECONDS)
        self.queue_time = Histogram(_SECONDS)
        self.prefill_time = Histogram(_SECONDS)
        self.decode_time = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._requests: dict[tuple[str, int], int] = {}
        self._finished: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self.tier_tokens = dict.fromkeys(TIERS, 0)
        self._shown = dict.fromkeys(_COUNTERS, 0)

    def note_request(self, route: str, status: int) -> None:
        self._requests[route, status] = self._requests.get((route, status), 0) + 1

    def note_finished(self, reason: str) -> None:
        """A sample's finish reason, or "cancelled" or "error"."""
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def note_usage(self, usage: Usage) -> None:
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        self.queue_time.observe(usage.queue_seconds)
        self.prefill_time.observe(usage.prompt_seconds)
        self.decode_time.observe(usage.decode_seconds)
        first_token = usage.queue_seconds + usage.prompt_seconds
        self.e2e_latency.observe(first_token + usage.decode_seconds)
        if usage.completion_tokens:
            self.time_to_first_token.observe(first_token)
        for tier in TIERS:
            self.tier_tokens[tier] += getattr(usage, f"{tier}_tokens")
        reason = _miss_of(usage)
        if reason is not None:
            self.misses[reason] = self.misses.get(reason, 0) + 1

    def text(self, stats: Mapping[str, int], engine: Engine) -> str:
        """The whole page. stats: of the engine."""
        page = _Page()
        for name, (metric, help) in _GAUGES.items():
            page.add(metric, "gauge", help, [((), stats[name])])
        for name, (metric, help) in _COUNTERS.items():
            # Tokens behind the end of an answer are counted until it is cut there. To Prometheus a
            # counter that falls has begun again, and all of it is new.
            self._shown[name] = max(self._shown[name], stats[name])
            page.add(metric, "counter", help, [((), self._shown[name])])
        times = engine.step_times()
        page.add_histogram(
            "engine_step_seconds",
            "Time of a step that computed something.",
            histogram_lines(times.bounds, times.counts, times.seconds),
        )
        self._add_cache(page, stats)
        self._add_store(page, engine)
        self._add_prefill(page, stats, engine)
        self._add_requests(page)
        return page.text()

    def _add_cache(self, page: _Page, stats: Mapping[str, int]) -> None:
        total, free = stats["pages_total"], stats["pages_free"]
        # Kept pages are those of all groups of layers, the others of the group with the fewest
        # free.
        kept = min(stats["retained_pages"], stats["pages_in_use"])
        used = stats["pages_in_use"] - kept
        page.add(
            "kv_cache_usage_perc",
            "gauge",
            "Share of the pages that requests hold, 0 to 1.",
            [((), used / total if total else 0.0)],
        )
        states = {"free": free, "kept": kept, "used": used}
        page.add("kv_pages", "gauge", "Pages by state.", _labelled("state", states))
        queries, hits = stats["prompt_tokens"], stats["cached_tokens"]
        page.add("prefix_cache_queries_total", "counter", "Tokens asked for.", [((), queries)])
        page.add("prefix_cache_hits_total", "counter", "Tokens that were there.", [((), hits)])
        page.add(
            "prefix_cache_miss_total",
            "counter",
            "Requests for which the KV of the prompt was not all there, by the reason.",
            _labelled("reason", self.misses),
        )
        page.add(
            "kv_tier_hit_tokens_total",
            "counter",
            "Prompt tokens that were not computed, by where their KV came from.",
            _labelled("tier", self.tier_tokens),
        )

    def _add_store(self, page: _Page, engine: Engine) -> None:
        if engine.store is None:
            return
        tiers = engine.store.statistics()["tiers"]
        for field, (metric, kind, help) in _TIER_FIELDS.items():
            values = {name: int(tier[field]) for name, tier in tiers.items() if tier["present"]}
            page.add(metric, kind, help, _labelled("tier", values))

    def _add_prefill(self, page: _Page, stats: Mapping[str, int], engine: Engine) -> None:
        peers = engine.prefill_peers()
        if peers:
            page.add(
                "prefill_overlap_seconds_total",
                "counter",
                "Time that was computed while a prompt was on its way from another process.",
                [((), stats["remote_overlap_ns"] * 1e-9)],
            )
        for field, (metric, kind, help) in _PEER_FIELDS.items():
            values = {peer.address: int(getattr(peer, field)) for peer in peers}
            if values:
                page.add(metric, kind, help, _labelled("peer", values))
        page.add(
            "prefill_refused_total",
            "counter",
            "Connections for prompts that were refused, by the field in which the sides differ.",
            _labelled("field", engine.prefill_refusals()),
        )

    def _add_requests(self, page: _Page) -> None:
        page.add(
            "request_success_total",
            "counter",
            "Answers that ended, by how.",
            _labelled("finished_reason", self._finished),
        )
        requests = [
            ((("route", route), ("status", str(status))), count)
            for (route, status), count in sorted(self._requests.items())
        ]
        page.add("http_requests_total", "counter", "HTTP requests.", requests)
        page.add("http_connections", "gauge", "Open connections.", [((), self._book.open)])
        page.add(
            "http_limit_total",
            "counter",
            "Connections and requests that were ended by a limit.",
            _labelled("limit", self._book.refused),
        )
        for name, histogram, help in (
            ("time_to_first_token_seconds", self.time_to_first_token, "Submitted to first token."),
            ("inter_token_latency_seconds", self.inter_token_latency, "Between two tokens."),
            ("e2e_request_latency_seconds", self.e2e_latency, "Submitted to the end."),
            ("request_queue_time_seconds", self.queue_time, "Submitted to begun."),
            ("request_prefill_time_seconds", self.prefill_time, "Begun to first token."),
            ("request_decode_time_seconds", self.decode_time, "First token to the end."),
            ("request_prompt_tokens", self.prompt_tokens, "Tokens of a request's prompt."),
            ("request_generation_tokens", self.generation_tokens, "New tokens of a request."),
        ):
            page.add_histogram(name, help, histogram.lines())


def _miss_of(usage: Usage) -> str | None:
    """A text that goes on behind what is known is no miss."""
    miss = usage.prefix_miss
    if miss is None or (miss.kind == "new" and miss.position > 0):
        return usage.miss
    return usage.miss or {"new": "new prefix"}.get(miss.kind, miss.kind)


def _labelled(label: str, values: Mapping[str, int]) -> list[_Sample]:
    return [(((label, name),), count) for name, count in sorted(values.items())]


_Sample = tuple[tuple[tuple[str, str], ...], float]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, help: str, samples: Sequence[_Sample]) -> None:
        self._head(name, kind, help)
        for labels, value in samples:
            text = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
            self._lines.append(
                f"quire:{name}{{{text}}} {value}" if text else f"quire:{name} {value}"
            )

    def add_histogram(self, name: str, help: str, lines: Lines) -> None:
        self._head(name, "histogram", help)
        self._lines += lines(f"quire:{name}")

    def _head(self, name: str, kind: str, help: str) -> None:
        self._lines += [f"# HELP quire:{name} {help}", f"# TYPE quire:{name} {kind}"]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
