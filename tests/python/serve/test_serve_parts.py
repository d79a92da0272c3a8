"""Parts of the server alone: streams that meet a defect, and the thread that compiles grammars."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from quire.grammar import CompiledGrammar, Grammar
from quire.serve.calls import Call
from quire.serve.grammar_queue import GrammarQueue
from quire.serve.limits import Limits
from quire.serve.problems import Problem
from quire.serve.protocol import ConnectionBook
from quire.serve.responses import _EventAnswer
from quire.serve.tenants import ANYONE

DEADLINE = 30.0


class BrokenView:
    """Its second event is a defect."""

    def begin(self, prompt_tokens: int) -> tuple[bytes, ...]:
        return (b"data: begun\n\n",)

    def first(self, prompt_tokens: int, cached_tokens: int) -> tuple[bytes, ...]:
        return ()

    def step(self, deltas: Any) -> tuple[bytes, ...]:
        raise KeyError("a defect of a view")

    def failed(self, problem: Problem) -> bytes:
        return f"data: error {problem.status}\n\n".encode()


def test_a_defect_ends_a_stream_with_an_error_event() -> None:
    """Errors without a name once ended a stream that nobody could tell from a whole one."""

    async def sent() -> list[dict[str, Any]]:
        async def next_deltas(timeout: float) -> list[Any]:
            return [SimpleNamespace()]

        submitted: Any = SimpleNamespace(
            prompt_tokens=1, cached_tokens=0, next=next_deltas, first_token=None, result=None, fail=lambda error: None
        )
        finished: list[str] = []
        service: Any = SimpleNamespace(
            limits=Limits(), finish=lambda *arguments: finished.append(arguments[-1])
        )
        answer = _EventAnswer(service, Any, BrokenView(), submitted, Call("id-1", ANYONE), {})  # type: ignore
        messages: list[dict[str, Any]] = []

        async def receive() -> Any:
            await asyncio.sleep(DEADLINE)

        async def send(message: Any) -> None:
            messages.append(message)

        with pytest.raises(KeyError):  # which the guard logs
            await answer({}, receive, send)
        assert finished == ["error"]
        return messages

    start, *bodies = asyncio.run(sent())
    assert start["status"] == 200
    assert [body["body"] for body in bodies] == [
        b"data: begun\n\n",
        b"data: error 500\n\n",
        b"",
    ]
    assert bodies[-1]["more_body"] is False


# ---- Grammars


class SlowEngine:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.compiled: list[str] = []

    def compile_grammar(self, grammar: Grammar, special_texts: Any) -> CompiledGrammar:
        assert self.go_on.acquire(timeout=DEADLINE)
        self.compiled.append(grammar.text)
        return CompiledGrammar(grammar.text, special_texts)


def _queue(engine: SlowEngine, **limits: Any) -> GrammarQueue:
    found = Limits(**limits)
    return GrammarQueue(engine, found, ConnectionBook(found).refuse)  # type: ignore[arg-type]


def test_grammars_are_bounded_for_each_key_and_in_all() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, grammars=4, grammars_per_key=3)

        def begin(tenant: str, text: str) -> asyncio.Task[CompiledGrammar]:
            return asyncio.create_task(queue.compile(Grammar("regex", text), (), tenant))

        tasks = [begin("ann", text) for text in "abc"]
        await asyncio.sleep(0)
        for tenant, expected in (("ann", (429, "grammars_per_key")), ("bob", None), ("cid", (503, "grammars"))):
            task = begin(tenant, "d")
            await asyncio.sleep(0)
            if expected is None:
                tasks.append(task)
                continue
            with pytest.raises(Problem) as caught:
                await task
            assert (caught.value.status, caught.value.code) == expected
            assert caught.value.retry_after is not None
        engine.go_on.release(len(tasks) + 1)
        assert [(await task).handle for task in tasks] == ["a", "b", "c", "d"]
        assert engine.compiled == ["a", "b", "c", "d"]
        assert (await begin("ann", "e")).handle == "e"  # there is room again
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    async def run() -> None:
        engine = SlowEngine()
        queue = _queue(engine, wait_seconds=0.01, grammars_per_key=1)
        with pytest.raises(Problem, match="not compiled within 0.01 s") as caught:
            await queue.compile(Grammar("regex", "a"), (), "ann")
        assert caught.value.status == 503
        with pytest.raises(Problem) as caught:  # the thread still works on the first
            await queue.compile(Grammar("regex", "b"), (), "ann")
        assert caught.value.status == 429
        engine.go_on.release(2)
        queue.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
