"""Which requests are let in, so that none waits longer than `limits.wait_seconds`.

What a request waits for is predicted from two measured speeds, from the first request on:

- prompts ahead of it, which are computed one after the other at the engine's speed, as far as their
  KV was not there in the requests of the same key so far;
- a place in the batch: a sample *runs* while no more than running_max are in work, and all above
  wait. Their time is the mean between the ends of two samples while some waited; before that was
  seen, it comes from the time of a token and from how long answers are. It is forgotten once none
  waits: a mean that refuses each request that would wait is corrected by no end.

The engine takes keys by turns, in proportion to their shares. So a request waits for all that its
own key has, and of another key for what has a turn before it: the queue of one key is no reason to
refuse another one.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from quire.engine import Usage
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.tenants import Tenant

__all__ = ["Admission", "Cost", "Place"]

_SMOOTHING = 0.2


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a request asks for.

    samples: answers. prompt_seconds: that its prompts take, if nothing of them is there.
    token_seconds: between two tokens of an answer; 0: not known. max_tokens: of an answer; None: as
    many as there is room for.
    """

    samples: int
    prompt_seconds: float = 0.0
    token_seconds: float = 0.0
    max_tokens: int | None = None


@dataclasses.dataclass(eq=False)
class Place:
    """A request that was let in. ahead: seconds that others wait for its prompts."""

    tenant: Tenant
    samples: int
    ahead: float


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)


class Admission:
    """For the event loop's thread."""

    def __init__(self, limits: Limits, running_max: int, share_total: int) -> None:
        self._limits = limits
        self._running_max = running_max
        self._share_total = share_total
        self._in_work: collections.Counter[Tenant] = collections.Counter()
        self._places: dict[Place, None] = {}  # whose prompts are not computed, the oldest first
        self._computed_share: dict[Tenant, float] = {}  # of prompt tokens
        self._answer_tokens: float | None = None  # of a sample, in the mean
        self._seconds_per_sample: float | None = None
        self._last_end: float | None = None

    @property
    def samples(self) -> int:
        """In work or waiting."""
        return self._in_work.total()

    def enter(self, tenant: Tenant, cost: Cost, waiting: int) -> Place:
        """Counts a request in. waiting: requests that wait for pages. Problem (413, 429, 503)."""
        samples = cost.samples
        each = self._sample_seconds(cost)
        own = self._in_work[tenant] + samples
        share = max(1, self._running_max * tenant.share // self._share_total)
        most = share + self._limits.queue_per_key
        self._check_fits(samples, min(most, self._running_max + self._limits.queue))
        if own > most:
            raise Problem(
                429,
                f"this key has {own - samples} answers in work or waiting; it may have {most}",
                code="too_many_requests",
                retry_after=_whole(each),
            )
        queued = max(self.samples + samples - self._running_max, waiting, 0)
        seconds = self._prompts_ahead(tenant) + self._turns_ahead(tenant, samples, queued) * each
        if queued > self._limits.queue:
            message = f"{queued - samples} answers wait; the limit is {self._limits.queue}"
            raise Problem(503, message, code="queue_full", retry_after=_whole(seconds))
        if seconds > self._limits.wait_seconds:
            raise Problem(
                503,
                f"the answer would wait for about {_whole(seconds)} s; the limit is "
                f"{self._limits.wait_seconds:g} s",
                code="would_wait",
                retry_after=_whole(seconds),
            )
        self._in_work[tenant] += samples
        place = Place(tenant, samples, cost.prompt_seconds * self._computed_share.get(tenant, 1.0))
        self._places[place] = None
        return place

    def _prompts_ahead(self, tenant: Tenant) -> float:
        """Seconds of the prompts that are computed before one of this key that comes now: the one
        in work, those of the key, and of each other key those with an earlier turn."""
        own = 1 + sum(place.tenant is tenant for place in self._places)
        seen: collections.Counter[Tenant] = collections.Counter()
        seconds = 0.0
        for index, place in enumerate(self._places):
            if index > 0:
                seen[place.tenant] += 1
            turns = math.ceil(own * place.tenant.share / tenant.share)
            if place.tenant is tenant or seen[place.tenant] <= turns:
                seconds += place.ahead
        return seconds

    def _turns_ahead(self, tenant: Tenant, samples: int, queued: int) -> int:
        """Samples that end before the last of these runs. queued: that wait for a place in all."""
        own = min(queued, self._in_work[tenant]) + samples
        shares = sum(other.share for other in {*self._in_work, tenant})
        return min(queued, math.ceil(own * shares / tenant.share))

    @staticmethod
    def _check_fits(samples: int, most: int) -> None:
        """Problem for more answers than there is ever room for: to come back would not help."""
        if samples > most:
            raise Problem(
                413,
                f"the request asks for {samples} answers, n of each prompt; at most {most} fit",
                param="n",
                code="too_many_answers",
            )

    def note_prompt(self, place: Place, prompt_seconds: float) -> None:
        """What its prompts take if nothing of them is there: now it is known."""
        place.ahead = prompt_seconds * self._computed_share.get(place.tenant, 1.0)

    def note_begun(self, place: Place) -> None:
        """Its first token has come: nobody waits for its prompts any more."""
        self._places.pop(place, None)

    def note_usage(self, tenant: Tenant, usage: Usage, samples: int) -> None:
        """What a request has taken that ended by itself. samples: its answers."""
        computed = 1 - usage.cached_tokens / max(1, usage.prompt_tokens)
        self._computed_share[tenant] = _smoothed(self._computed_share.get(tenant), computed)
        tokens = usage.completion_tokens / max(1, samples)
        self._answer_tokens = _smoothed(self._answer_tokens, tokens)

    def leave(self, place: Place, now: float, *, ran: bool = True) -> None:
        """Counts a request out. ran: its samples had places in the batch, which are free now."""
        if ran:
            if self._last_end is not None:
                seconds = (now - self._last_end) / place.samples
                self._seconds_per_sample = _smoothed(self._seconds_per_sample, seconds)
            self._last_end = now
        self._places.pop(place, None)
        self._in_work[place.tenant] -= place.samples
        if not self._in_work[place.tenant]:
            del self._in_work[place.tenant]
        if self.samples <= self._running_max:
            self._last_end = self._seconds_per_sample = None

    def _sample_seconds(self, cost: Cost) -> float:
        """Between the ends of two samples while others wait."""
        if self._seconds_per_sample is not None:
            return self._seconds_per_sample
        tokens = self._answer_tokens
        if tokens is None:
            tokens = 0 if cost.max_tokens is None else cost.max_tokens
        return tokens * cost.token_seconds / self._running_max


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))
