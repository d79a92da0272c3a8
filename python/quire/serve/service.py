"""The server's state: its clients, what runs, what is refused, and how it ends.

All of it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire import errors
from quire.engine import Engine, Result, Usage
from quire.serve import refusals
from quire.serve._streams import Answer, Streams
from quire.serve.admission import Admission, Cost, Place
from quire.serve.generation import Generation, ModelFacts
from quire.serve.grammar_queue import GrammarQueue
from quire.serve.held_kv import HeldKV
from quire.serve.kept_responses import KeptResponses
from quire.serve.limits import Limits
from quire.serve.metrics import Metrics
from quire.serve.problems import Problem
from quire.serve.protocol import ConnectionBook
from quire.serve.tenants import Tenant, Tenants
from quire.serve.tool_parser import parser_of_template, special_texts
from quire.serve.wrong_keys import WrongKeys

__all__ = ["Service", "blend_of", "guesses_of", "origin_of", "usage_of"]

_HEALTHY_SECONDS = 10.0
_CHARACTERS_PER_TOKEN = 4.0  # of English, about; what a text costs is told by its tokens later
_PROBE_SALT = b"quire health probe 1"
_PROBE_TOKEN = 0


class Service:
    """One engine and its clients."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        tenants: Tenants,
        limits: Limits,
        *,
        strict: bool,
        tool_parser: str | None = None,
    ) -> None:
        self.engine = engine
        self.facts = facts
        self.tenants = tenants
        self.limits = limits
        self.strict = strict
        template = engine.tokenizer.chat_template
        self.template = "" if template is None else template.source
        self.tool_parser = tool_parser or parser_of_template(
            None if template is None else template.source
        )
        self.book = ConnectionBook(limits)
        self.wrong_keys = WrongKeys(limits.wrong_keys)
        self.metrics = Metrics(self.book)
        self.admission = Admission(limits, engine.max_num_sequences, tenants.share_total)
        self.streams = Streams(engine, self._note_tokens, limits, self.book.refuse)
        self.grammars = GrammarQueue(engine, limits, self.book.refuse)
        self.kept = KeptResponses(limits)
        self.held_kv = HeldKV(engine, tenants)
        self.body_bytes: collections.Counter[str] = collections.Counter()  # in work, by key
        self.texts: collections.Counter[str] = collections.Counter()  # tokenized alone, by key
        self.draining = False
        self.prefill_endpoint: str | None = None  # where other processes have prompts computed
        self._last_tokens: dict[Answer, dict[int, float]] = {}  # when they came, by sample
        self._places: dict[Answer, Place] = {}
        self._probe: asyncio.Task[str | None] | None = None
        self._submitting = 0  # requests that are on their way to the engine
        self._ends = False  # an answer that begins now is over
        self._computed = 0
        self._fault: str | None = None  # why the engine does not tell how things stand
        self._last_progress = -math.inf

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the engine; never waits for a step."""
        return self.engine.stats(wait=False)

    # ---- Requests

    async def submit(self, generation: Generation, tenant: Tenant) -> Answer:
        """Problem for a request that is refused. The answer must be given to `finish`."""
        self._submitting += 1
        try:
            return await self._submit(generation, tenant)
        finally:
            self._submitting -= 1

    async def _submit(self, generation: Generation, tenant: Tenant) -> Answer:
        stats = self.stats()
        waiting = stats["waiting"] - stats["learning"]  # the engine's own are no answers
        place = self.admission.enter(tenant, self._cost(generation, stats), waiting)
        try:
            options = await self._options(generation, tenant)
            answer = await self.streams.submit(
                generation.prompts,
                options,  # type: ignore[arg-type]
                key=tenant.name,
                keep=generation.keep,
                held_bytes=generation.held_bytes,
            )
        except BaseException as error:
            self._leave(place, ran=False)
            if isinstance(error, errors.QuireError):
                raise refusals.of_request(error, generation) from None
            raise
        self._places[answer] = place
        # Tools, and texts of other alphabets, have more tokens than was guessed.
        seconds = answer.prompt_tokens * stats["compute_ns_per_token"] * 1e-9
        self.admission.note_prompt(place, seconds)
        if self._ends:
            answer.fail(_ending())
        if answer.first_token is not None:  # it came before this turn of the event loop
            self.admission.note_begun(place)
        return answer

    def _cost(self, generation: Generation, stats: dict[str, int]) -> Cost:
        """What a request asks for, about: nothing of it is tokenized yet."""
        characters = sum(_characters(prompt) for prompt in generation.prompts)
        documents = generation.options.get("documents", ())
        if not isinstance(documents, str):  # "auto": they are in the prompt
            characters += sum(map(len, documents))
        latency = self.metrics.inter_token_latency
        return Cost(
            samples=generation.samples,
            prompt_seconds=characters
            / _CHARACTERS_PER_TOKEN
            * stats["compute_ns_per_token"]
            * 1e-9,
            token_seconds=latency.sum / latency.count if latency.count else 0.0,
            max_tokens=generation.options.get("max_tokens"),
        )

    async def _options(self, generation: Generation, tenant: Tenant) -> dict[str, Any]:
        """As the engine takes them. Keys take turns by their shares, whatever salts their clients
        send; where there are no keys, salts do."""
        options = dict(generation.options)
        salt = tenant.salt(generation.cache_salt)
        if salt is not None:
            options["cache_salt"] = salt
            self.held_kv.note_salt(tenant, salt)
        if self.tenants.need_keys:
            options |= {"turn_group": tenant.name.encode(), "turn_weight": tenant.share}
        special: tuple[str, ...] = ()
        if generation.tool_parser is not None:
            special = special_texts(generation.tool_parser)
            options["special_texts"] = special
        if generation.grammar_field is not None:
            grammar = options["grammar"]
            options["grammar"] = await self.grammars.compile(grammar, special, tenant.name)
        return options

    def failure(self, error: errors.QuireError, generation: Generation, tenant: Tenant) -> Problem:
        """What a client is told of an answer that fails while it is computed. A grammar that is too
        costly is refused from now on, and new ones of its key for a while."""
        of_grammar = refusals.is_of_grammar(error, generation)
        if of_grammar and isinstance(error, errors.TooLargeError):
            message = str(error).removeprefix("SamplingOptions::")
            self.grammars.give_up(generation.options["grammar"], f"grammar: {message}")
            if self.tenants.need_keys:
                self.grammars.pause(tenant.name)
        return refusals.of_answer(error, generation)

    def finish(self, answer: Answer, generation: Generation, tenant: Tenant, failed: str) -> None:
        """Ends an answer, whatever became of it. failed: "cancelled" or "error" where it has no
        result."""
        answer.close()
        self._last_tokens.pop(answer, None)
        ran = answer.first_token is not None or answer.result is not None
        self._leave(self._places.pop(answer), ran=ran)
        if answer.result is None:
            self.metrics.note_finished(failed)
            return
        self.admission.note_usage(tenant, answer.result.usage, len(answer.result.samples))
        self.metrics.note_usage(answer.result.usage)
        for sample in answer.result.samples:
            self.metrics.note_finished(sample.finish_reason or failed)

    def _leave(self, place: Place, *, ran: bool) -> None:
        self.admission.leave(place, asyncio.get_running_loop().time(), ran=ran)

    def _note_tokens(self, answer: Answer, tokens: Mapping[int, int], now: float) -> None:
        """tokens: by sample. The client waits for the first one of those that come together."""
        last = self._last_tokens.setdefault(answer, {})
        if not last and answer in self._places:
            self.admission.note_begun(self._places[answer])
        latency = self.metrics.inter_token_latency
        for sample, count in tokens.items():
            if sample in last:
                latency.observe(now - last[sample])
            if count > 1:
                latency.observe(0.0, count - 1)
            last[sample] = now

    # ---- Health

    async def health(self) -> str | None:
        """Why the server cannot answer now; None if it can: a token was made within 10 s. Where
        nothing runs one is made, for all that ask at the time."""
        if self.draining:
            return "the server is ending"
        if self._fault is not None:
            return self._fault
        now = asyncio.get_running_loop().time()
        if now - max(self.streams.last_token, self._last_progress) <= _HEALTHY_SECONDS:
            return None
        if self.streams.answers:
            oldest = min(answer.submitted for answer in self.streams.answers)
            if now - oldest <= _HEALTHY_SECONDS:
                return None  # it was idle before
            return f"no token was made within {_HEALTHY_SECONDS:g} s"
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._make_token())
        return await asyncio.shield(self._probe)

    async def _make_token(self) -> str | None:
        options: dict[str, Any] = {
            "max_tokens": 1,
            "greedy": True,
            "ignore_eos": True,
            "cache_salt": _PROBE_SALT,
        }
        answer = None
        try:
            async with asyncio.timeout(_HEALTHY_SECONDS):
                prompts = [[_PROBE_TOKEN]]
                answer = await self.streams.submit(prompts, options, measured=False)  # type: ignore[arg-type]
                while await answer.next(_HEALTHY_SECONDS):
                    pass
        except TimeoutError:
            return f"no token was made within {_HEALTHY_SECONDS:g} s"
        except errors.QuireError as error:
            return str(error)
        finally:
            if answer is not None:
                answer.close()
        return None

    async def watch_progress(
        self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """Notes once a second whether the engine computed anything: a long prompt gives no token
        for a while, and is no standstill; and whether it has failed."""
        while True:
            try:
                computed = self.stats()["computed_tokens"]
                self._fault = None
            except errors.QuireError as error:
                computed = self._computed
                self._fault = f"the engine has failed: {error}"
            if computed != self._computed:
                self._computed = computed
                self._last_progress = asyncio.get_running_loop().time()
            await sleep(1.0)

    # ---- The end

    def begin_drain(self) -> None:
        """From now on requests are refused; what runs goes on."""
        self.draining = True

    @property
    def is_busy(self) -> bool:
        """Whether answers are in work or on their way to the engine, or prompts of others."""
        if self.streams.answers or self._submitting:
            return True
        return self.stats()["served_waiting"] > 0

    def end_answers(self) -> None:
        """Ends what still runs, and what still begins, each with an error that its client is
        told."""
        self._ends = True
        for answer in list(self.streams.answers):
            answer.fail(_ending())


def _ending() -> Problem:
    return Problem(503, "the server is ending; ask again", code="shutting_down")


def _characters(prompt: Any) -> float:
    """The characters of a prompt; a token id counts as what a token usually has."""
    if isinstance(prompt, str):
        return len(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return sum(_content_characters(message.get("content", "")) for message in prompt)
    return len(prompt) * _CHARACTERS_PER_TOKEN


def _content_characters(content: Any) -> int:
    parts = content if isinstance(content, list) else [{"text": content}]
    return sum(len(part["text"]) for part in parts)


def usage_of(result: Result) -> dict[str, Any]:
    """The usage in OpenAI's form, and where the KV of the prompt came from."""
    usage = result.usage
    return {
        **blend_of(usage),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **origin_of(usage)},
        "completion_tokens_details": guesses_of(usage),
    }


def blend_of(usage: Usage) -> dict[str, Any]:
    """How a prompt with `blend` was made; nothing of others."""
    return {} if usage.blend is None else {"blend": dataclasses.asdict(usage.blend)}


def origin_of(usage: Usage) -> dict[str, Any]:
    """Where the KV of a prompt came from, and why not all of it was there: fields that the clients
    of every API leave alone."""
    miss = usage.prefix_miss
    return {
        "memory_tokens": usage.memory_tokens,
        "ram_tokens": usage.ram_tokens,
        "disk_tokens": usage.disk_tokens,
        "redis_tokens": usage.redis_tokens,
        "recomputed_tokens": usage.recomputed_tokens,
        "remote_tokens": usage.remote_tokens,
        "miss": usage.miss,
        "prefix_miss": None if miss is None else dataclasses.asdict(miss),
    }


def guesses_of(usage: Usage) -> dict[str, int]:
    """The guesses that were kept, and those that were not."""
    return {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
    }
