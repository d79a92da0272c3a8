"""Grammars are compiled apart: one takes up to seconds, and neither the event loop nor the threads
that tokenize for others wait for it.

They are compiled one by one, by turns of the keys: a key with many waits for its own. Each is tried
first in a process that is ended where it takes too long, so a turn is bounded. What is compiled is
kept, and given at once to requests that ask for it again. What may wait is bounded, in all and for
each key.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

from quire import errors
from quire.engine import Engine
from quire.grammar import CompiledGrammar, Grammar
from quire.serve.grammar_probe import GrammarProbe, TooCostlyError
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.turns import ByTurns, call_in, started_pool

__all__ = ["GrammarQueue"]


_COSTLY_MAX = 64  # of at most 64 KiB each


class Probe(Protocol):
    """What :class:`GrammarProbe` is for the queue."""

    def check(self, grammar: Grammar, special_texts: tuple[str, ...]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Work:
    """A grammar that `waiting` requests of a key wait for."""

    grammar: Grammar
    special_texts: tuple[str, ...]
    tenant: str
    done: asyncio.Future[CompiledGrammar]
    waiting: int = 0


class GrammarQueue:
    """For the event loop's thread.

    Args:
        refuse: of the server's book: counts a limit that was met.
        probe: tries grammars; None: in a process of its own.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        refuse: Callable[[str, int, str], Problem],
        probe: Probe | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._refuse = refuse
        bounds = (limits.grammar_seconds, limits.grammar_bytes, limits.wait_seconds)
        self._probe = probe or GrammarProbe(engine, *bounds)
        self._turns: ByTurns[_Work] = ByTurns()  # what waits, by tenant
        self._running: _Work | None = None
        # What is compiled, the last used last.
        self._known: collections.OrderedDict[tuple[Any, ...], CompiledGrammar]
        self._known = collections.OrderedDict()
        self._known_bytes = 0
        # Why a grammar is refused at once, the last one last.
        self._costly: collections.OrderedDict[Grammar, str] = collections.OrderedDict()
        self._paused: dict[str, float] = {}  # until when, by tenant
        self._pool = started_pool(1, "quire-grammar")

    async def compile(
        self, grammar: Grammar, special_texts: tuple[str, ...], tenant: str
    ) -> CompiledGrammar:
        """Problem (429, 503) where too many wait, or it is not compiled within
        `limits.wait_seconds`; TooCostlyError; what Engine.compile_grammar raises."""
        if grammar in self._costly:
            raise self._too_costly(self._costly[grammar])
        known = self._find(grammar, special_texts)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        self._check_pause(tenant, loop.time())
        work = self._same(grammar, special_texts, tenant)
        if work is None:
            self._check_room(tenant)
            work = _Work(grammar, special_texts, tenant, loop.create_future())
            self._turns.add(tenant, work)
            self._begin_next()
        work.waiting += 1
        seconds = self._limits.wait_seconds
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(work.done)
        except TimeoutError:
            message = f"the grammar was not compiled within {seconds:g} s"
            raise self._refuse("grammars", 503, message) from None
        finally:
            work.waiting -= 1
            if work.waiting == 0:
                self._withdraw(work)

    def give_up(self, grammar: Grammar, why: str) -> None:
        """Refuses a grammar from now on, as long as it is among the last ones of this kind."""
        self._costly[grammar] = why
        while len(self._costly) > _COSTLY_MAX:
            self._costly.popitem(last=False)

    def pause(self, tenant: str) -> None:
        """Refuses new grammars of a key for a while: one held all answers for a token, which no
        trial had shown."""
        now = asyncio.get_running_loop().time()
        self._paused[tenant] = now + self._limits.grammar_pause_seconds

    def close(self) -> None:
        """Nothing is compiled any more."""
        for work in self._turns.take_all():
            if not work.done.done():
                work.done.set_exception(errors.ClosedError("the server ends"))
        self._probe.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- What waits

    def _same(
        self, grammar: Grammar, special_texts: tuple[str, ...], tenant: str
    ) -> _Work | None:
        """The work of this key that gives the same: requests that come together share it."""
        works = [] if self._running is None else [self._running]
        works += self._turns[tenant]
        for work in works:
            wanted = (work.grammar, work.special_texts, work.tenant)
            if wanted == (grammar, special_texts, tenant) and not work.done.done():
                return work
        return None

    def _check_pause(self, tenant: str, now: float) -> None:
        until = self._paused.get(tenant, now)
        if until <= now:
            self._paused.pop(tenant, None)
            return
        message = (
            "a grammar of this key held all answers for a token: it gets no new one for a while"
        )
        problem = self._refuse("grammar_pause_seconds", 429, message)
        problem.retry_after = math.ceil(until - now)
        raise problem

    def _check_room(self, tenant: str) -> None:
        # One that runs counts until it is done, also where nobody waits for it any more.
        running = () if self._running is None else (self._running.tenant,)
        own = len(self._turns[tenant]) + running.count(tenant)
        if own >= self._limits.grammars_per_key:
            message = f"this key has {own} grammars that are being compiled"
            raise self._refuse("grammars_per_key", 429, message)
        total = len(self._turns) + len(running)
        if total >= self._limits.grammars:
            raise self._refuse("grammars", 503, f"{total} grammars are being compiled")

    def _withdraw(self, work: _Work) -> None:
        """Nobody waits for it any more."""
        work.done.cancel()
        self._turns.remove(work.tenant, work)

    def _begin_next(self) -> None:
        while self._running is None and (found := self._turns.take()) is not None:
            _, work = found
            if work.done.done():
                continue  # its client has gone, and has not withdrawn it yet
            known = self._find(work.grammar, work.special_texts)
            if known is not None:
                work.done.set_result(known)
                continue
            self._running = work
            loop = asyncio.get_running_loop()
            made = self._pool.submit(self._make, work.grammar, work.special_texts)
            made.add_done_callback(functools.partial(call_in, loop, self._end, work))

    def _too_costly(self, why: str) -> TooCostlyError:
        self._refuse("grammar_seconds", 400, why)  # counts it; the client is told its field, too
        return TooCostlyError(why)

    def _make(self, grammar: Grammar, special_texts: tuple[str, ...]) -> CompiledGrammar:
        """In the thread."""
        self._probe.check(grammar, special_texts)
        return self._engine.compile_grammar(grammar, special_texts)

    def _end(self, work: _Work, made: concurrent.futures.Future[CompiledGrammar]) -> None:
        self._running = None
        ended = errors.ClosedError("the server ends")
        error = ended if made.cancelled() else made.exception()
        if isinstance(error, TooCostlyError):
            self.give_up(work.grammar, str(error))
            why = str(error)
            for _ in range(max(1, work.waiting)):  # each request that it refuses counts
                error = self._too_costly(why)
        if error is None:
            self._keep(work, made.result())
        if not work.done.done():
            if error is None:
                work.done.set_result(made.result())
            else:
                work.done.set_exception(error)
        self._begin_next()

    # ---- What is compiled

    def _find(self, grammar: Grammar, special_texts: tuple[str, ...]) -> CompiledGrammar | None:
        key = (grammar, special_texts)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def _keep(self, work: _Work, compiled: CompiledGrammar) -> None:
        self._known[(work.grammar, work.special_texts)] = compiled
        self._known_bytes += _size(work.grammar, compiled)
        while self._known_bytes > self._limits.grammar_cache_bytes:
            (grammar, _), last = self._known.popitem(last=False)
            self._known_bytes -= _size(grammar, last)


def _size(grammar: Grammar, compiled: CompiledGrammar) -> int:
    return len(grammar.text) + compiled.memory_bytes
