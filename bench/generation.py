"""What an engine is asked in the whole-model cases, the same for Quire, vLLM and llama-server."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import line_protocol

Prompt = list[int] | str
# generate(prompts, tokens): every prompt is answered with so many tokens, all at the same time.
Generate = Callable[[list[Prompt], int], None]


@dataclasses.dataclass(frozen=True)
class Engine:
    """What the cases need of an engine."""

    generate: Generate
    vocab_size: int
    version: str
    # Waits until what it computed lies where later requests find it.
    settle: Callable[[], None] = lambda: None
    # Forwards since the start that drew tokens where tokens were guessed.
    guessing_forwards: Callable[[], int] = lambda: 0
    end: Callable[[], None] = lambda: None  # what it computed is written by then


# load(options of the case) makes an engine.
Load = Callable[..., Engine]

OWN_TOKENS = 16  # of a request behind a prefix that it shares


class Documents:
    """Prompts about the same documents in other orders, with a new question each. All that are made
    of the same numbers give the same prompts in the same order."""

    def __init__(self, vocab_size: int, documents: int, document: int, question: int) -> None:
        self._random = random.Random(5)
        self._vocab_size, self._question = vocab_size, question
        self._anchor = self._tokens(8)
        self._documents = [self._tokens(document) for _ in range(documents)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._vocab_size - 100) for _ in range(count)]

    def next(self) -> tuple[list[int], list[tuple[int, int]]]:
        """A prompt, and where the documents are in it."""
        self._random.shuffle(self._documents)
        prompt, ranges = list(self._anchor), []
        for document in self._documents:
            ranges.append((len(prompt), len(prompt) + len(document)))
            prompt += document
        return prompt + self._tokens(self._question), ranges


class Cases:
    """Runs the whole-model cases on one engine. Prompts are random: a prompt of another seed shares
    nothing with those before."""

    def __init__(self, engine: Engine, seed: int = 1) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._prompts: dict[str, list[Prompt]] = {}
        self._documents: dict[str, Documents] = {}

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(100, self._engine.vocab_size - 100) for _ in range(length)]

    def seconds(self, prompts: list[Prompt], tokens: int) -> float:
        begin = time.perf_counter()
        self._engine.generate(prompts, tokens)
        return time.perf_counter() - begin

    def prepare(self, key: str, kind: str, **shape: Any) -> dict[str, Any]:
        """Computes what the rounds find ready: the prompts of a generation, one by one, since an
        engine need not have room for all of them in one step."""
        if kind == "generate":
            prompts = [self.prompt(shape["depth"]) for _ in range(shape["batch"])]
            for one in prompts:
                self.seconds([one], 1)
            self._prompts[key] = prompts
        if kind == "again":
            self._prompts[key] = [self.prompt(shape["tokens"])]
            self.seconds(self._prompts[key], 1)
            self._engine.settle()
        if kind == "text":
            self._prompts[key] = [shape["text"]]
        if kind == "documents":
            self._documents[key] = Documents(self._engine.vocab_size, **shape)
            self.run(key, kind, **shape)  # as quire_blend_worker.py: all see the same prompts
        self.run(key, kind, **shape)
        return {}

    def drop(self, key: str) -> dict[str, Any]:
        self._prompts.pop(key, None)
        self._documents.pop(key, None)
        return {}

    def run(self, key: str, kind: str, **shape: Any) -> dict[str, Any]:
        if kind == "text":
            return {"samples": self.answer(self._prompts[key], shape["tokens"])}
        if kind == "documents":
            prompt, _ = self._documents[key].next()
            return {"samples": {"first token": [self.seconds([prompt], 1)]}}
        measure: dict[str, Callable[..., list[float]]] = {
            "prefill": self.prefill,
            "leave": self.leave,
            "generate": lambda **rest: self.generation(self._prompts[key], **rest),
            "shared": self.shared_prefix,
            "first_token": self.first_token,
            "again": lambda tokens: [self.seconds(self._prompts[key], 1)],
        }
        return {"samples": {"call": measure[kind](**shape)}}

    def prefill(self, tokens: int, repetitions: int = 1) -> list[float]:
        """Seconds for a new prompt, up to its first token."""
        return [self.seconds([self.prompt(tokens)], 1) for _ in range(repetitions)]

    def leave(self, tokens: int, repetitions: int = 1) -> list[float]:
        """The same, until another engine finds what was computed."""
        seconds = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            self._engine.generate([self.prompt(tokens)], 1)
            self._engine.settle()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def generation(self, prompts: list[Prompt], depth: int, batch: int, tokens: int) -> list[float]:
        """Seconds of one decode step behind prompts that are cached: the difference of two times,
        so that queueing and the prompts' last tokens fall out."""
        del depth, batch
        first = self.seconds(prompts, 1)
        return [(self.seconds(prompts, tokens + 1) - first) / tokens]

    def answer(self, prompts: list[Prompt], tokens: int) -> dict[str, list[float]]:
        """Seconds of a token of the answers, as in generation, and forwards for each of them."""
        before = self._engine.guessing_forwards()
        seconds = self.generation(prompts, 0, len(prompts), tokens)
        forwards = self._engine.guessing_forwards() - before
        drawn = len(prompts) * (tokens + 2)
        return {"call": seconds, "forwards of a token": [forwards / drawn if forwards else 1.0]}

    def shared_prefix(self, prefix: int, batch: int, tokens: int) -> list[float]:
        """Seconds of `batch` requests behind a new prefix that one request has just computed."""
        common = self.prompt(prefix)
        self.seconds([common], 1)
        return [self.seconds([common + self.prompt(OWN_TOKENS) for _ in range(batch)], tokens)]

    def first_token(self, prefix: int, repetitions: int) -> list[float]:
        """Seconds to the first token of a cached prefix and OWN_TOKENS new tokens."""
        common = self.prompt(prefix)
        self.seconds([common], 1)
        return [self.seconds([common + self.prompt(OWN_TOKENS)], 1) for _ in range(repetitions)]


def serve(load: Load) -> None:
    """Answers bench/bench with the engine that `load` makes."""
    handlers: dict[str, line_protocol.Handler] = {}

    def load_engine(**options: Any) -> dict[str, Any]:
        engine = load(**options)
        cases = Cases(engine)
        engine.generate([cases.prompt(8)], 1)
        handlers.update(prepare=cases.prepare, run=cases.run, drop=cases.drop)
        handlers["end"] = lambda: {"ended": engine.end()}
        return {"version": engine.version}

    handlers["load"] = load_engine
    line_protocol.serve(handlers)
