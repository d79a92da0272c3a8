"""`quire blend`: documents that are known before they are asked about, and what blending costs a
model in quality."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import random
from typing import TYPE_CHECKING, Any

from quire import _blend_verdict
from quire import _ranges as ranges
from quire._blend_verdict import BlendVerdict
from quire.cli import arguments, models, text_input
from quire.cli.arguments import UsageError

if TYPE_CHECKING:
    from quire.engine import BlendUsage, Engine, Result

# The likeliest tokens with their log-probabilities.
Best = list[tuple[int, float]]

_ABOUT = """\
  quire blend add [MODEL] FILE... --kv-dir DIR   computes documents, once: prompts of
                                                 `quire generate --document` find them in DIR
  quire blend eval [MODEL]                       blended answers against full prefill

KV of a document is that behind the beginning of a prompt: give --system where prompts have one.

eval asks about documents that are made from a seed: notes about invented people, and lists whose
facts are cut by the borders of documents; or, with --text, about pieces of texts of your own. Along
the answer of full prefill it prints, for each ratio of recomputed tokens, the mean Kullback-Leibler
divergence of the next token (in nats, over the 256 likeliest tokens and the rest as one), how often
the likeliest token is the same, the log-probability of the right answer where a sentence has begun
that it ends, and how often it would be the answer. Ratio 1 is full prefill; metric random computes
again tokens that were drawn at random; anchor none takes documents that were computed behind the
begin token alone.

With at least 20 questions the verdict is kept: it allows or refuses blends of this model with these
types of KV.
"""
_BLEND_PIECE = 2048
_RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)
# Beside the ratios: what else may be worth its cost.
_MORE: tuple[dict[str, Any], ...] = (
    {"ratio": 0.0, "link_tokens": 0},
    {"ratio": 0.05, "link_tokens": 0},
    {"ratio": 0.15, "link_tokens": 0},
    {"ratio": 0.15, "link_tokens": 0, "metric": "random"},
    {"ratio": 0.15, "metric": "k_l2"},
    {"ratio": 0.15, "metric": "kv_l2"},
    {"ratio": 0.15, "metric": "cosine"},
    {"ratio": 0.15, "metric": "random"},
    {"ratio": 0.15, "anchor": "none"},
)
# What a request gets that says nothing: the verdict is about it.
_DEFAULT = {"ratio": 0.15}
_QUESTIONS_OF_VERDICT = 20
# Options that only `eval` has, and what they are if they are not given.
_OF_EVAL: dict[str, Any] = {"text": None, "questions": _QUESTIONS_OF_VERDICT, "seed": 1}
# Last: it leaves exact KV of the whole prompt, which the others would find and move nothing.
_WHOLE = {"ratio": 1.0}
_TOP = 256
_ANSWER_TOKENS = 12


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire blend",
        usage="quire blend add | eval [MODEL] [FILE ...] [options]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("words", nargs="+", metavar="add | eval", help=argparse.SUPPRESS)
    command.add_argument("--model", type=ranges.place, metavar="DIR", help="folder of the model")
    command.add_argument("--system", metavar="TEXT", help="system message of the prompts to come")
    command.add_argument(
        "--text",
        action="append",
        type=ranges.place,
        metavar="FILE",
        help="eval: asks about this text; may be repeated (default: texts made from the seed)",
    )
    command.add_argument(
        "--questions",
        type=ranges.Integer(1, 10_000),
        metavar="N",
        help="eval: number of questions (default: 20)",
    )
    command.add_argument(
        "--seed",
        type=ranges.Integer(0, 2**63),
        metavar="N",
        help="eval: of the texts (default: 1)",
    )
    command.add_argument("--json", action="store_true", help="print one object")
    arguments.add_engine(command)
    arguments.add_store(command)
    command.set_defaults(run=_run)
    return command


def _run(options: argparse.Namespace) -> int:
    action, *words = options.words
    if action == "add":
        for name in _OF_EVAL:
            if getattr(options, name) is not None:
                raise UsageError(f"blend: add: {arguments.option_name(name)} has no effect")
        return _add(options, words)
    if action == "eval":
        if len(words) + (options.model is not None) > 1:
            raise UsageError("blend: eval takes one MODEL")
        for name, default in _OF_EVAL.items():
            if getattr(options, name) is None:
                setattr(options, name, default)
        return _eval(options, words[0] if words else options.model)
    raise UsageError(f"blend: there is no action {action!r}; actions are add and eval")


# ---- Documents


def _add(options: argparse.Namespace, words: list[str]) -> int:
    model = options.model
    if model is None and words and models.is_model(words[0]):
        model = words.pop(0)
    if not words:
        raise UsageError("blend: add: which documents? give files")
    if not options.kv_dir and not options.kv_redis:
        raise UsageError("blend: add: give --kv-dir or --kv-redis, where the documents are kept")
    texts = [text_input.read_file(name) for name in words]
    for name, text in zip(words, texts):
        if not text.strip():
            raise UsageError(f"blend: add: {name} is empty")
    with models.open_engine(model, arguments.given(options, arguments.ENGINE)) as engine:
        is_chat = models.is_chat_model(models.tokenizer_of(engine))
        prompt: Any = None
        if options.system is not None:
            if not is_chat:
                raise UsageError("blend: --system needs a model with a chat template")
            prompt = [*models.chat_messages(options.system), {"role": "user", "content": ""}]
        usages = engine.prepare(texts, prompt)
        engine.flush_store()
    found = [
        {"file": name, "tokens": usage.prompt_tokens, "known": usage.cached_tokens}
        for name, usage in zip(words, usages)
    ]
    if options.json:
        print(json.dumps({"documents": found}))
        return 0
    for entry in found:
        known = f", {entry['known']} of them known" if entry["known"] else ""
        print(f"{entry['file']}: {entry['tokens']} tokens with what stands before it{known}")
    return 0


# ---- Quality


@dataclasses.dataclass
class Question:
    """Documents, a question about them, its right answer, and how a sentence begins that goes on
    with this answer."""

    kind: str
    documents: list[str]
    text: str
    answer: str
    cue: str


@dataclasses.dataclass
class BlendQuality:
    """One way to blend against full prefill, over all tokens of its answers.

    divergence: in nats. right: mean log-probability of the right answers. left: the part of the
    moved tokens that was not computed again. answered: the part of the questions whose right answer
    the model would give.
    """

    kind: str
    blend: dict[str, Any]
    divergence: float
    agreement: float
    right: float
    moved_tokens: int
    left: float
    answered: float


_NAMES = "Arvo Belit Cadoc Dunja Eskil Fenna Goran Hilda Ivor Jorunn Kasper Liv".split()
_SURNAMES = "Tarn Velk Moss Quill Brand Osk Holt Pirn Stave Wick Lund Marr".split()
_CITIES = "Narvik Ghent Tartu Bergen Oulu Split Cork Turku Basel Graz Lille Porto".split()
_TRADES = "glazier cooper baker pilot printer surveyor weaver brewer sailor mason".split()
_THINGS = "lamp ladder kettle saddle anvil compass barrel mirror lantern spade".split()


def notes(source: random.Random) -> Question:
    """Notes about six people; the question is about one of them."""
    people = source.sample([f"{a} {b}" for a in _NAMES for b in _SURNAMES], 6)
    cities = source.sample(_CITIES, 6)
    documents = []
    for person, city in zip(people, cities):
        first = person.split()[0]
        documents.append(
            f"Notes about {person}. {person} is a {source.choice(_TRADES)} and lives in {city}. "
            f"In {source.randint(1950, 2005)} {first} bought a {source.choice(_THINGS)} and a "
            f"{source.choice(_THINGS)}, and has kept both since. On most days {first} works "
            f"until {source.randint(4, 9)} o'clock and then reads."
        )
    index = source.randrange(6)
    person = people[index]
    text = f"In which city does {person} live?"
    return Question("notes", documents, text, cities[index], f"{person} lives in")


def cut_facts(source: random.Random) -> Question:
    """A list whose lines are cut in the middle by the borders of documents."""
    things = source.sample(_THINGS, 8)
    cities = source.sample(_CITIES, 8)
    lines = [f"The {thing} is kept in the city of {city}." for thing, city in zip(things, cities)]
    documents = ["A list of things and places."]
    for index, line in enumerate(lines):
        head, tail = line.split(" is kept ")
        documents[-1] += f" {head}"
        if index % 2 == 0:  # the border is inside of this fact
            documents.append(f"is kept {tail}")
        else:
            documents[-1] += f" is kept {tail}"
    index = source.randrange(4) * 2
    text, cue = f"Where is the {things[index]} kept?", f"The {things[index]} is kept in the city of"
    return Question("cut facts", documents, text, cities[index], cue)


_PIECE_CHARACTERS = 400
_CUE_WORDS, _ANSWER_WORDS = 8, 3


def pieces_of(source: random.Random, text: str) -> Question:
    """Six pieces of a text, which begin anywhere in it; the question is how a sentence goes on."""
    words = text.split()
    size = max(_CUE_WORDS + _ANSWER_WORDS, len(words) * _PIECE_CHARACTERS // max(1, len(text)))
    documents = []
    for _ in range(6):
        begin = source.randrange(max(1, len(words) - size))
        documents.append(" ".join(words[begin : begin + size]))
    asked = source.choice(documents).split()
    at = source.randrange(max(1, len(asked) - _CUE_WORDS - _ANSWER_WORDS))
    cue = " ".join(asked[at : at + _CUE_WORDS])
    answer = " ".join(asked[at + _CUE_WORDS : at + _CUE_WORDS + _ANSWER_WORDS])
    return Question("text", documents, f'How does the text go on behind "{cue}"?', answer, cue)


def _questions(options: argparse.Namespace) -> list[list[Question]]:
    """As many of each kind of texts as are asked for."""
    if not options.text:
        kinds = []
        for make in (notes, cut_facts):
            source = random.Random(options.seed)
            kinds.append([make(source) for _ in range(options.questions)])
        return kinds
    text = "\n\n".join(text_input.read_file(name) for name in options.text)
    least = 2 * (_CUE_WORDS + _ANSWER_WORDS)
    if len(text.split()) < least:
        raise UsageError(f"blend: --text: the texts have fewer than {least} words")
    source = random.Random(options.seed)
    return [[pieces_of(source, text) for _ in range(options.questions)]]


def _eval(options: argparse.Namespace, model: str | None) -> int:
    given = {**arguments.given(options, arguments.ENGINE), "blend_unverified": True}
    given.setdefault("blend_piece", _BLEND_PIECE)
    ways: list[dict[str, Any]] = [{"ratio": ratio} for ratio in _RATIOS]
    ways += [dict(way) for way in (*_MORE, _WHOLE)]
    found: list[BlendQuality] = []
    kinds = _questions(options)
    with models.open_engine(model, given) as engine:
        if not models.is_chat_model(models.tokenizer_of(engine)):
            raise UsageError("blend: eval needs a model with a chat template, which is asked")
        name = str(engine.model_dir)
        for questions in kinds:
            sums = [_Sums() for _ in ways]
            for question in questions:
                _measure(engine, options.system, question, ways, sums)
            found += [each.quality(questions[0].kind, way) for each, way in zip(sums, ways)]
        verdict = _verdict(found, datetime.date.today().isoformat(), options.questions)
        # First: where it cannot be kept, hours of measuring are not lost.
        _print_quality(options, name, found, verdict)
        if options.questions >= _QUESTIONS_OF_VERDICT:
            engine.keep_blend_verdict(verdict)
    return 0


def _print_quality(
    options: argparse.Namespace, name: str, found: list[BlendQuality], verdict: BlendVerdict
) -> None:
    if options.json:
        rows = [dataclasses.asdict(item) for item in found]
        head = {"model": name, "date": verdict.date, "questions": verdict.questions}
        print(json.dumps({**head, "passes": verdict.passes, "rows": rows}), flush=True)
        return
    asked = f"{verdict.questions} questions of each kind, seed {options.seed}"
    print(f"{name}, {verdict.date}: {asked}")
    _print_rows(found)
    _print_verdict(verdict)


def _verdict(found: list[BlendQuality], date: str, questions: int) -> BlendVerdict:
    """About the default blend, in the kind of texts that it costs most."""
    rows = [item for item in found if item.blend == _DEFAULT]
    divergence = max(item.divergence for item in rows)
    return BlendVerdict(date, questions, divergence, min(item.agreement for item in rows))


def _print_rows(found: list[BlendQuality]) -> None:
    columns = f"{'KL':>9}{'same':>8}{'log p(right)':>14}{'right':>8}{'left':>8}"
    print(f"{'texts':<11}{'blend':<36}{columns}")
    for item in found:
        way = ", ".join(f"{key} {value}" for key, value in item.blend.items())
        print(
            f"{item.kind:<11}{way:<36}{item.divergence:>9.4f}{item.agreement:>8.1%}"
            f"{item.right:>14.3f}{item.answered:>8.1%}{item.left:>8.1%}"
        )


def _print_verdict(verdict: BlendVerdict) -> None:
    divergence_most, agreement_least = _blend_verdict.limits()
    allowed = "blends are allowed" if verdict.passes else "blends are refused unless forced"
    print(
        f"verdict: {allowed}: KL {verdict.divergence:.3f} (at most {divergence_most}), same "
        f"{verdict.agreement:.1%} (at least {agreement_least:.0%})"
    )
    if verdict.questions < _QUESTIONS_OF_VERDICT:
        print(f"It is not kept: it takes at least {_QUESTIONS_OF_VERDICT} questions.")


class _Sums:
    def __init__(self) -> None:
        self.tokens = self.same = self.questions = self.moved = self.left = self.answered = 0
        self.divergence = self.right = 0.0

    def quality(self, kind: str, way: dict[str, Any]) -> BlendQuality:
        return BlendQuality(
            kind,
            way,
            self.divergence / max(1, self.tokens),
            self.same / max(1, self.tokens),
            self.right / max(1, self.questions),
            self.moved,
            self.left / max(1, self.moved),
            self.answered / max(1, self.questions),
        )

    def add_blend(self, usage: BlendUsage | None) -> None:
        if usage is not None:
            self.moved += usage.moved_tokens
            self.left += usage.moved_tokens - usage.recomputed_tokens

    def add_answer(self, reference: list[Best], ours: list[Best]) -> None:
        """The tokens along the answer of full prefill."""
        for theirs, mine in zip(reference, ours, strict=True):
            self.tokens += 1
            self.same += mine[0][0] == theirs[0][0]
            self.divergence += divergence(dict(theirs), dict(mine))

    def add_right(self, right: list[int], ours: list[Best]) -> None:
        """The tokens along the right answer."""
        self.questions += 1
        self.right += sum(_log_probability(best, token) for best, token in zip(ours, right))
        self.answered += all(best[0][0] == token for best, token in zip(ours, right))


def _measure(
    engine: Engine,
    system: str | None,
    question: Question,
    ways: list[dict[str, Any]],
    sums: list[_Sums],
) -> None:
    messages: list[Any] = [
        *models.chat_messages(system),
        {"role": "user", "content": question.text + " Answer with the name alone."},
    ]
    options: dict[str, Any] = {"documents": question.documents}
    full = engine.generate(
        messages, greedy=True, max_tokens=_ANSWER_TOKENS, cache_salt="full", **options
    )
    cue, right = _split(engine, question)
    spans = engine.document_ranges(messages, **options)
    answer = full.ids or right
    ends = [answer[:i] for i in range(len(answer))] + [cue + right[:i] for i in range(len(right))]
    reference, _ = _next(engine, full.prompt_ids, ends[: len(answer)], {"cache_salt": "full"})
    for way, each in zip(ways, sums):
        ours, usage = _next(engine, full.prompt_ids, ends, _blended(way, spans))
        each.add_blend(usage)
        each.add_answer(reference, ours[: len(answer)])
        each.add_right(right, ours[len(answer) :])


def _split(engine: Engine, question: Question) -> tuple[list[int], list[int]]:
    """The tokens of the cue, and those with which the right answer goes on from it."""
    whole = engine.tokenizer.encode(f"{question.cue} {question.answer}", add_special_tokens=False)
    cue = engine.tokenizer.encode(question.cue, add_special_tokens=False)
    if whole[: len(cue)] != cue:  # the tokenizer joins the two words
        return [], engine.tokenizer.encode(question.answer, add_special_tokens=False)
    return cue, whole[len(cue) :]


def _blended(way: dict[str, Any], spans: list[tuple[int, int]]) -> dict[str, Any]:
    """The options of a prompt with documents in `spans`. What full prefill left is not found."""
    blend = dict(way)
    if blend.pop("anchor", None) == "none":
        spans = [(0, spans[0][0]), *spans]  # nothing stands before the first document
    return {"cache_salt": "blend", "documents": spans, "blend": blend}


def _next(
    engine: Engine, prompt: list[int], ends: list[list[int]], options: dict[str, Any]
) -> tuple[list[Best], BlendUsage | None]:
    """The likeliest tokens behind the prompt with each of the ends, of which the first is empty;
    and how the prompt was blended, whose KV the other ones find."""
    options = {**options, "greedy": True, "max_tokens": 1, "logprobs": _TOP, "ignore_eos": True}
    first = engine.generate(prompt, **options)
    rest = [prompt + end for end in ends[1:]]
    results: list[Result] = [first, *(engine.generate(rest, **options) if rest else [])]
    return [(result.top_logprobs or [[]])[0] for result in results], first.usage.blend


def _log_probability(best: Best, token: int) -> float:
    """The token's; if it is none of the best, that of the last one: an upper bound."""
    return dict(best).get(token, best[-1][1])


def divergence(full: dict[int, float], ours: dict[int, float]) -> float:
    """Kullback-Leibler divergence over the tokens that both have, and all others as one."""
    common = [token for token in full if token in ours]
    p = [math.exp(full[token]) for token in common]
    q = [math.exp(ours[token]) for token in common]
    p.append(max(1e-12, 1 - sum(p)))
    q.append(max(1e-12, 1 - sum(q)))
    return max(0.0, sum(a * math.log(a / b) for a, b in zip(p, q)))
