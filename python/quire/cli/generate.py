"""`quire generate`: one answer, printed as it comes, or many of a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from quire import _ranges as ranges
from quire import errors
from quire._model_folder import check_model_folder
from quire.cli import answers, arguments, batch, memory, models, text_input
from quire.cli.arguments import UsageError
from quire.cli.prompt_file import PromptFile

if TYPE_CHECKING:
    from quire.grammar import Grammar

_GRAMMARS = ("json_schema", "regex", "choice", "grammar")


def parser() -> argparse.ArgumentParser:
    command = arguments.Parser(
        prog="quire generate",
        description="Answers a prompt and prints the answer as it is computed; with --file, many "
        "prompts.",
    )
    command.add_argument(
        "words",
        nargs="*",
        metavar="MODEL | TEXT",
        help="folder of the model (default: the embedded one), and the prompt (default: stdin)",
    )
    command.add_argument("--model", type=ranges.place, metavar="DIR", help="folder of the model")
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-ids",
        metavar="IDS",
        type=ranges.token_ids,
        help='the prompt as token ids: "1,2,3"',
    )
    command.add_argument("--system", metavar="TEXT", help="system message of the chat")
    arguments.add_template(command)
    command.add_argument(
        "--raw", action="store_true", help="no chat template: continue the prompt itself"
    )
    command.add_argument(
        "--json", action="store_true", help="print one object: ids, text, logprobs, usage"
    )
    command.add_argument(
        "--stats", action="store_true", help="print counts and speed to standard error"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="compute nothing: print the memory needed, and whether the prompts fit",
    )
    _add_file_options(command)
    _add_documents(command)
    sampling = arguments.add_sampling(command, most_tokens="what there is room for")
    arguments.add_flags(sampling, "samples")
    _add_grammars(command)
    arguments.add_engine(command)
    arguments.add_store(command)
    arguments.add_peers(command)
    command.set_defaults(run=_run)
    return command


def _add_file_options(command: argparse.ArgumentParser) -> None:
    many = command.add_argument_group("many prompts at once, answered in one batch")
    many.add_argument(
        "--file",
        type=ranges.place,
        metavar="PROMPTS",
        help='a prompt per line, or (.jsonl) an object with "prompt", "messages" or "prompt_ids" '
        "and options of its own; -: stdin",
    )
    many.add_argument(
        "--format", choices=("txt", "jsonl"), help="format of PROMPTS (default: by its file name)"
    )
    many.add_argument(
        "--output",
        type=ranges.place,
        metavar="FILE",
        help="write answers there, an object per line (default: stdout)",
    )


def _ratio(text: str) -> float | str:
    return text if text == "auto" else float(ranges.Number(0, 1)(text))


def _add_documents(command: argparse.ArgumentParser) -> None:
    documents = command.add_argument_group("documents that stand before the prompt")
    documents.add_argument(
        "--document",
        action="append",
        type=ranges.place,
        metavar="FILE",
        help="a text that stands before the prompt; may be repeated",
    )
    documents.add_argument(
        "--find-documents",
        action="store_true",
        help="the documents do not stand before the prompt: they are computed first, and looked "
        "for in its tokens, wherever they stand and in parts; needs --blend",
    )
    documents.add_argument(
        "--blend",
        type=_ratio,
        metavar="RATIO",
        help="use KV of the documents wherever they stand, and compute this part of their tokens "
        "again (0.15 is usual; auto: what can be computed in the time that loading takes); the "
        "answer is APPROXIMATE. Without it the prompt is computed, and the answer exact",
    )


def _documents(options: argparse.Namespace) -> dict[str, Any]:
    """The documents and how they are blended, as options of the answer."""
    if not options.document:
        if options.blend is not None:
            raise UsageError("generate: --blend has no effect without --document")
        if options.find_documents:
            raise UsageError("generate: --find-documents has no effect without --document")
        return {}
    if options.find_documents and options.blend is None:
        raise UsageError("generate: --find-documents needs --blend")
    for name in ("file", "prompt_ids", "dry_run"):
        if getattr(options, name):
            raise UsageError(
                f"generate: --document does not go with {arguments.option_name(name)}"
            )
    texts = [text_input.read_file(name) for name in options.document]
    for name, text in zip(options.document, texts):
        if not text.strip():
            raise UsageError(f"generate: --document: {name} is empty")
    found: dict[str, Any] = {"documents": texts}
    return found if options.blend is None else {**found, "blend": options.blend}


def _add_grammars(command: argparse.ArgumentParser) -> None:
    grammars = command.add_argument_group(
        "what the answer must look like; one of them (needs the package xgrammar)"
    )
    grammars.add_argument(
        "--json-schema", type=ranges.place, metavar="FILE", help="JSON of the schema in FILE"
    )
    grammars.add_argument(
        "--regex", type=ranges.place, metavar="TEXT", help="a text that TEXT matches as a whole"
    )
    grammars.add_argument(
        "--choice",
        action="append",
        type=ranges.place,
        metavar="TEXT",
        help="one of these texts; may be repeated",
    )
    grammars.add_argument(
        "--grammar", type=ranges.place, metavar="FILE", help="a text of the EBNF grammar in FILE"
    )


def _grammar(options: argparse.Namespace) -> Grammar | None:
    """The grammar that the options ask for, which takes their place."""
    given = [name for name in _GRAMMARS if getattr(options, name) is not None]
    if len(given) > 1:
        first, second = (arguments.option_name(name) for name in given[:2])
        raise UsageError(f"generate: {first} and {second} are two grammars; give one")
    if not given:
        return None
    (name,) = given
    if options.ignore_eos:
        raise UsageError(
            f"generate: --ignore-eos does not go with {arguments.option_name(name)}, which says "
            "where the answer ends"
        )
    from quire.grammar import Grammar

    value = getattr(options, name)
    if name in ("json_schema", "grammar"):
        value = text_input.read_file(value)
    else:
        for text in value if isinstance(value, list) else [value]:
            text_input.check_argument(text, arguments.option_name(name))
    try:
        return Grammar.of({name: value})
    except errors.BadArgumentError as error:
        message = str(error).removeprefix("grammar: ")
        raise UsageError(f"generate: {arguments.option_name(name)}: {message}") from None


def _run(options: argparse.Namespace) -> int:
    _check_modes(options)
    grammar = _grammar(options)
    documents = _documents(options)
    model, text = _model_and_text(options)
    if options.file is not None:
        return batch.run(options, model, PromptFile.read(options.file, options.format), grammar)
    if options.dry_run:
        return _dry_run(options, model, text)
    folder = models.model_folder(model)
    if text is None and options.prompt_ids is None:
        text = text_input.read_stdin()
    if options.prompt_ids is None:
        _check_not_empty(text, options.raw)
    sampling = {**arguments.given(options, arguments.SAMPLING), **documents}
    if grammar is not None:
        sampling["grammar"] = grammar
    engine_options = arguments.given(options, arguments.ENGINE)
    if "blend" in documents:
        engine_options.setdefault("blend_piece", batch.BLEND_PIECE)
    with models.open_engine(folder, engine_options) as engine:
        prompt = options.prompt_ids or models.text_prompt(
            models.tokenizer_of(engine), text or "", options.system, options.raw
        )
        if options.find_documents:
            engine.prepare(sampling["documents"], prompt)
            sampling["documents"] = "auto"
        if options.json:
            result = engine.generate(prompt, **sampling)
            print(json.dumps(answers.result_object(result), ensure_ascii=False))
            answers.print_sources(engine, result)
            answers.print_remote(engine, result)
            answers.print_blend(result)
            answers.print_lost(engine)
            return 0
        answer = answers.print_answer(engine, prompt, sampling)
        answers.print_sources(engine, answer.result)
        answers.print_remote(engine, answer.result)
        answers.print_blend(answer.result)
        answers.print_cut(engine, answer.result, sampling)
        answers.print_lost(engine)
    if options.stats:
        answers.print_stats(answer)
    return 0


def _dry_run(options: argparse.Namespace, model: str | None, text: str | None) -> int:
    folder = models.model_folder(model)
    plan = memory.plan_memory(folder, arguments.given(options, arguments.ENGINE))
    facts: dict[str, Any] = {}
    if text is not None or options.prompt_ids is not None:
        tokenizer = models.read_tokenizer(folder)
        if options.prompt_ids is None:
            _check_not_empty(text, options.raw)
        prompt = options.prompt_ids or models.text_prompt(
            tokenizer, text or "", options.system, options.raw
        )
        length = models.count_tokens(tokenizer, prompt, options.template_args)
        facts = batch.length_facts(plan, [(length, options.max_tokens, options.window)])
    return memory.print_plan(plan, facts, options.json)


def _check_modes(options: argparse.Namespace) -> None:
    if options.file is None:
        if options.output is not None or options.format is not None:
            raise UsageError("generate: --output and --format have no effect without --file")
        if not options.json and options.n not in (None, 1):
            raise UsageError("generate: --n: several answers need --json or --file")
        if options.json and options.stats:
            raise UsageError("generate: --stats has no effect with --json, which has the usage")
        if not options.json and options.logprobs is not None:
            raise UsageError("generate: --logprobs has no effect without --json or --file")
    elif not options.dry_run:
        for name in ("json", "stats"):
            if getattr(options, name):
                raise UsageError(
                    f"generate: --{name} has no effect with --file, whose answers are objects"
                )
    if options.prompt_ids is not None:
        for name in ("system", "raw", "template_args"):
            if getattr(options, name):
                option = arguments.option_name(name)
                raise UsageError(f"generate: {option} has no effect on --prompt-ids")
    if options.raw and options.template_args and options.file is None:
        raise UsageError("generate: --template-arg has no effect with --raw")


def _check_not_empty(text: str | None, raw: bool) -> None:
    """A chat question must be more than blanks; a raw text may continue them."""
    if not text or not (raw or text.strip()):
        raise UsageError("generate: the prompt is empty")


def _model_and_text(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The folder (None: embedded) and the text (None: it stands elsewhere, or in standard
    input)."""
    for name in ("prompt", "system"):
        if getattr(options, name) is not None:
            text_input.check_argument(getattr(options, name), f"--{name}")
    words: list[str] = list(options.words)
    model = options.model
    sources = [
        name for name in ("prompt", "prompt_ids", "file") if getattr(options, name) is not None
    ]
    if len(sources) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in sources)
        raise UsageError(f"generate: {names} are two sources of prompts; give one")
    if model is None and words and (len(words) > 1 or sources or _means_folder(words[0])):
        model = words.pop(0)
        hint = "; if it is meant as the prompt, quote it whole or give it with --prompt"
        check_model_folder(os.path.expanduser(model), hint)
    if sources and words or len(words) > 1:
        raise UsageError(
            f"generate: more than one prompt: {words[-1]!r}; quote a text of several words"
        )
    if words:
        return model, text_input.check_argument(words[0], "the prompt")
    if sources or options.dry_run:
        return model, options.prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            'generate: no prompt; for example: quire generate "What is a quire of paper?"'
        )
    return model, None


def _means_folder(word: str) -> bool:
    """Whether a single word is the model and not the prompt: it is a folder or is written like a
    path or a GGUF file."""
    return os.path.isdir(word) or re.fullmatch(r"~\S*|\S*/\S*|\S+\.gguf", word) is not None
