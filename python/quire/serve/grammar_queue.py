"""Grammars are compiled in a thread of their own: one takes up to seconds, and neither the event
loop nor the threads that tokenize for others wait for it.

The thread takes them one by one. What may wait for it is bounded, in all and for each key.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from collections.abc import Callable

from quire.engine import Engine
from quire.grammar import CompiledGrammar, Grammar
from quire.serve.limits import Limits
from quire.serve.problems import Problem

__all__ = ["GrammarQueue"]


class GrammarQueue:
    """For the event loop's thread.

    Args:
        refuse: of the server's book: counts a limit that was met.
    """

    def __init__(
        self, engine: Engine, limits: Limits, refuse: Callable[[str, int, str], Problem]
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._refuse = refuse
        self._waiting: collections.Counter[str] = collections.Counter()  # by tenant
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "quire-grammar")

    async def compile(
        self, grammar: Grammar, special_texts: tuple[str, ...], tenant: str
    ) -> CompiledGrammar:
        """Problem (429, 503) where too many wait, or the thread is busy for longer than
        `limits.wait_seconds`; what Engine.compile_grammar raises."""
        limits = self._limits
        if self._waiting[tenant] >= limits.grammars_per_key:
            message = f"this key has {self._waiting[tenant]} grammars that are being compiled"
            raise self._refuse("grammars_per_key", 429, message)
        if self._waiting.total() >= limits.grammars:
            message = f"{self._waiting.total()} grammars are being compiled"
            raise self._refuse("grammars", 503, message)
        self._waiting[tenant] += 1
        # Counted until the thread is done with it, also where nobody waits for it any more.
        work = self._pool.submit(self._engine.compile_grammar, grammar, special_texts)
        loop = asyncio.get_running_loop()
        done = asyncio.wrap_future(work)
        work.add_done_callback(lambda _: _call_in(loop, self._leave, tenant))
        try:
            async with asyncio.timeout(limits.wait_seconds):
                return await done
        except TimeoutError:
            message = f"the grammar was not compiled within {limits.wait_seconds:g} s"
            raise self._refuse("grammars", 503, message) from None

    def _leave(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], tenant: str) -> None:
    try:
        loop.call_soon_threadsafe(call, tenant)
    except RuntimeError:
        pass  # the event loop has ended, and the counts with it
