"""The one internal request: what every API asks of the engine, checked field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

from quire.engine import Prompt
from quire.serve.bounded_json import parse_object
from quire.serve.fields import Fields, check_text
from quire.serve.grammars import Wanted
from quire.serve.limits import Limits
from quire.serve.prefill_pairs import Handover, least_tokens
from quire.serve.problems import Problem

__all__ = [
    "CACHE_MARKS",
    "TOKENS_MAX",
    "Content",
    "Generation",
    "ModelFacts",
    "check_text",
    "content_of",
    "document_part",
    "joined_parts",
    "read_max_tokens",
    "read_messages",
    "read_salt",
    "read_sampling",
    "read_stop",
    "read_stream",
    "read_template_args",
    "text_of_content",
    "text_of_part",
    "unsupported_content",
]

TOKENS_MAX = 2**31 - 1
_PENALTY_MAX = 1e4
_SALT_BYTES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""What clients say in parts about caches of others: here each prefix is found again."""
# What answers have beside their texts, and what comes back with them in the next turn.
_TEXT_MARKS = (*CACHE_MARKS, "annotations", "citations", "logprobs")
_PARTS_MAX = 4096

Content: TypeAlias = str | list[dict[str, Any]]
"""A content as the engine takes it: a text, or parts of which one is a document."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against. names: that clients may call the model; the first one is
    told in answers. created: when the server began, in seconds since 1970."""

    names: tuple[str, ...]
    vocab_size: int
    positions: int
    created: int

    def check_name(self, fields: Fields) -> None:
        """Problem (404) for a model that is not served; no name stands for the one that is."""
        name = fields.text("model", 512)
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise Problem(
                404,
                f"the model {name[:80]!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )


@dataclasses.dataclass
class Generation:
    """prompts and options are the engine's; all prompts have the same options.

    cache_salt: the client's; the server's own comes from the API key.
    stream, include_usage: how the answer is sent. logprobs: whether the client wants them, and of
    how many alternatives. return_ids: whether it wants token ids beside texts.
    tool_parser: the format of calls in the answer; None: all of it is text. grammar_field: of the
    body, which the `grammar` of the options comes from. reads_samples: whether the end of a stream
    shows something of all of its tokens. prompt_field: of the body, which the prompts come from.
    handover: the other server of a pair. held_bytes: of memory, about, that the view of the answer
    takes from its beginning.
    """

    prompts: list[Prompt]
    options: dict[str, Any]
    cache_salt: str | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    return_ids: bool = False
    tool_parser: str | None = None
    grammar_field: str | None = None
    reads_samples: bool = False
    prompt_field: str = "messages"
    handover: Handover = Handover()
    held_bytes: int = 0

    @property
    def keep(self) -> bool:
        """Whether the result must have the whole answer, as of Engine.stream."""
        return self.reads_samples or not self.stream

    def hold(self, wanted: Wanted | None) -> Generation:
        """This request, with an answer that must look like that."""
        if wanted is not None:
            self.options["grammar"], self.grammar_field = wanted
        return self

    def hand_over(self, handover: Handover) -> Generation:
        """This request, of which another server computes the prompt or the answer."""
        self.handover = handover
        if handover.keeps:
            self.options["held_for_peer"] = True
        if handover.peer is not None:
            self.options["prefill_peer"] = handover.peer
        return self

    @property
    def samples(self) -> int:
        """The number of answers: n for each prompt."""
        return int(self.options.get("n", 1)) * len(self.prompts)


def read_sampling(fields: Fields, limits: Limits, facts: ModelFacts) -> dict[str, Any]:
    """The sampling options that all APIs have in common; those that are absent are the model's."""
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 1e4),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "min_p": fields.number("min_p", 0, 1),
        "top_k": _top_k(fields, facts),
        "presence_penalty": fields.number("presence_penalty", -_PENALTY_MAX, _PENALTY_MAX),
        "frequency_penalty": fields.number("frequency_penalty", -_PENALTY_MAX, _PENALTY_MAX),
        "repetition_penalty": fields.number("repetition_penalty", 0, _PENALTY_MAX, above=True),
        "seed": fields.integer("seed", -(2**63), 2**64 - 1),
        "n": fields.integer("n", 1, limits.samples),
        "ignore_eos": fields.boolean("ignore_eos") or None,
        "window": fields.integer("window", 0, TOKENS_MAX),
        "sinks": fields.integer("sinks", 0, TOKENS_MAX),
        "logit_bias": _logit_bias(fields, limits, facts),
        "prediction": _prediction(fields),
    }
    if options["seed"] is not None:
        options["seed"] %= 2**64
    if options["sinks"] and not options["window"]:
        fields.refuse("sinks", "given together with window")
    fields.only("best_of", 1, options["n"] or 1)
    fields.only("use_beam_search", False)
    fields.only("min_tokens", *least_tokens(fields))
    fields.only("skip_special_tokens", True)
    fields.only("spaces_between_special_tokens", True)
    fields.only("include_stop_str_in_output", False)
    fields.only("truncate_prompt_tokens")
    fields.only("priority", 0)
    fields.only("no_stop_trim", False)
    fields.only("return_hidden_states", False)
    fields.only("length_penalty", 1, 1.0)
    fields.only("early_stopping", False)
    fields.ignore("user", "metadata", "store", "service_tier", "safety_identifier")
    fields.ignore("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
    # vllm-router sends them; nothing is told apart as reasoning here.
    fields.ignore("separate_reasoning", "stream_reasoning", "include_reasoning")
    return {name: value for name, value in options.items() if value is not None}


def _prediction(fields: Fields) -> str | None:
    """The text that the answer is likely to repeat: guesses come from it."""
    prediction = fields.object("prediction")
    if prediction is None:
        return None
    prediction.only("type", "content")
    text = text_of_content(prediction, "content")
    if text is None:
        prediction.refuse("content", "a text, or a list of text parts")
    fields.leave(prediction)
    return text or None


def _top_k(fields: Fields, facts: ModelFacts) -> int | None:
    value = fields.integer("top_k", -1, TOKENS_MAX)
    return value if value is None else max(0, min(value, facts.vocab_size))  # -1: off, as 0 is


def _logit_bias(fields: Fields, limits: Limits, facts: ModelFacts) -> dict[int, float] | None:
    bias = fields.object("logit_bias")
    if bias is None:
        return None
    names = bias.unknown()  # all of them, as none was read
    if len(names) > limits.logit_biases:
        fields.refuse("logit_bias", f"an object of at most {limits.logit_biases} entries")
    found: dict[int, float] = {}
    for place in names:
        token = place.removeprefix(bias.name(""))
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            fields.refuse("logit_bias", f"an object whose keys are token ids, not {token[:20]!r}")
        if int(token) >= facts.vocab_size:
            fields.refuse("logit_bias", f"of token ids below {facts.vocab_size}, not {token}")
        found[int(token)] = bias.number(token, -1e4, 1e4) or 0.0
    return found


def read_max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of the fields that is given; None: what there is room for. 0: the prompt alone,
    whose KV is kept."""
    values = [fields.integer(name, 0, TOKENS_MAX) for name in names]
    return next((value for value in values if value is not None), None)


def read_stop(fields: Fields, limits: Limits, name: str = "stop") -> list[str] | None:
    value = fields.any(name)
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > limits.stops:
        fields.refuse(name, f"a text or a list of at most {limits.stops} texts")
    for index, stop in enumerate(stops):
        place = f"{fields.name(name)}[{index}]"
        if not isinstance(stop, str) or not 1 <= check_text(stop, place) <= limits.stop_bytes:
            raise Problem(
                400,
                f"{place} must be a text of 1 to {limits.stop_bytes} bytes",
                param=place,
                code="invalid_value",
            )
    return stops or None


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether the usage comes at the end of the stream."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise Problem(400, "stream_options goes with stream: true", param="stream_options")
    include_usage = options.boolean("include_usage")
    options.ignore("include_obfuscation")
    options.only("continuous_usage_stats", False)
    fields.leave(options)
    return stream, include_usage


def read_salt(fields: Fields) -> str | None:
    salt = fields.text("cache_salt", _SALT_BYTES)
    if salt == "":
        fields.refuse("cache_salt", f"a text of 1 to {_SALT_BYTES} bytes")
    return salt


def read_template_args(fields: Fields) -> dict[str, Any]:
    """Arguments of the chat template. The engine refuses names that the template does not use."""
    value = fields.any("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        fields.refuse("chat_template_kwargs", "an object")
    if "tools" in value:
        fields.refuse("chat_template_kwargs", "without tools, which have a field of their own")
    return dict(value)


def read_messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The messages of a chat as the engine takes them: contents are texts, or lists of parts where
    documents are among these."""
    entries = fields.objects("messages", limits.messages)
    if not entries:
        fields.refuse("messages", f"a list of 1 to {limits.messages} messages")
    messages = [_message(entry) for entry in entries]
    for entry in entries:
        fields.leave(entry)
    return messages


def _message(entry: Fields) -> dict[str, Any]:
    role = entry.choice("role", _ROLES, "")
    if not role:
        entry.refuse("role", "one of " + ", ".join(_ROLES))
    # Templates were trained with "system", which OpenAI has renamed since.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = _tool_calls(entry)
    content = content_of(entry, "content")
    if content is None and not calls:
        entry.refuse("content", "a text")
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = entry.text(name)
        if text is not None:
            message[name] = text
    entry.only("audio")
    entry.only("function_call")
    entry.ignore("refusal", "annotations", "parsed", *CACHE_MARKS)
    return message


def text_of_content(entry: Fields, field: str) -> str | None:
    """A content that is a text, or a list of parts that are. Problem (400), by name, for others."""
    if not isinstance(entry.any(field), list):
        return entry.text(field)
    parts = entry.objects(field, _PARTS_MAX) or []
    text = "".join(text_of_part(part) for part in parts)
    for part in parts:
        entry.leave(part)
    return text


def text_of_part(part: Fields) -> str:
    """The text of a part that is one. Problem (400), by name, for others."""
    kind = part.any("type")
    if kind not in _TEXT_PARTS:
        raise unsupported_content(part)
    text = part.text("refusal" if kind == "refusal" else "text")
    if text is None:
        part.refuse("text", "a text")
    part.ignore(*_TEXT_MARKS)
    return text


def content_of(entry: Fields, field: str) -> Content | None:
    """As text_of_content, but documents may be among the parts."""
    if not isinstance(entry.any(field), list):
        return entry.text(field)
    parts = entry.objects(field, _PARTS_MAX) or []
    found = [
        document_part(part)
        if part.any("type") == "document"
        else {"type": "text", "text": text_of_part(part)}
        for part in parts
    ]
    for part in parts:
        entry.leave(part)
    return joined_parts(found)


def joined_parts(parts: Iterable[dict[str, Any]]) -> Content:
    """The parts of a content: one text where no document is among them."""
    found = list(parts)
    if any(part["type"] == "document" for part in found):
        return found
    return "".join(part["text"] for part in found)


def document_part(part: Fields) -> dict[str, Any]:
    """A document in a content, with a text of its own or, as in Anthropic's API, a source."""
    holder, field = part, "text"
    source = part.object("source")
    if source is not None:
        part.only("text", why="is a second text beside source")
        if source.any("type") != "text":
            raise unsupported_content(source)
        source.only("media_type", "text/plain")
        holder, field = source, "data"
    text = holder.text(field)
    if text is None or not text.strip():
        holder.refuse(field, "a text that is not empty")
    for name in ("title", "context"):  # no template has a place for them
        part.only(name)
    citations = part.object("citations")
    if citations is not None:
        citations.only("enabled", False)
        part.leave(citations)
    if source is not None:
        part.leave(source)
    part.ignore(*CACHE_MARKS)
    part.refuse_unknown()
    return {"type": "document", "text": text}


def unsupported_content(part: Fields) -> Problem:
    """The refusal of a part of a content whose type is none that the server takes."""
    place = part.name("type")
    return Problem(
        400,
        f"{place} is {str(part.any('type'))[:40]!r}; this model takes text alone: no images, audio "
        "or files",
        param=place,
        code="unsupported_content",
    )


def _tool_calls(entry: Fields) -> list[dict[str, Any]]:
    """Calls of an earlier answer; arguments as objects, which is what templates take."""
    found = []
    for call in entry.objects("tool_calls", 256) or []:
        call.only("type", "function")
        function = call.object("function")
        name = None if function is None else function.text("name", 256)
        if function is None or not name:
            call.refuse("function", "an object with a name")
        arguments = function.any("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_object((arguments or "{}").encode())
            except (Problem, UnicodeEncodeError):
                function.refuse("arguments", "a JSON object as a text")
        if not isinstance(arguments, dict):
            function.refuse("arguments", "a JSON object as a text")
        found.append(
            {
                "id": call.text("id", 256) or "",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
        call.ignore("index")
        function.ignore("parsed_arguments")
        call.leave(function)
        entry.leave(call)
    return found
