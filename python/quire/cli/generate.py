"""`quire generate`: one answer, printed as it comes, or many of a file."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

from quire.cli import answers, arguments, batch, memory, models
from quire.cli.arguments import UsageError
from quire.cli.prompt_file import PromptFile


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="quire generate",
        description="Answers a prompt and prints the answer as it comes; with --file many.",
    )
    command.add_argument(
        "words",
        nargs="*",
        metavar="MODEL | TEXT",
        help="folder of the model (default: the embedded one), and the prompt (default: stdin)",
    )
    command.add_argument("--model", metavar="DIR", help="folder of the model")
    command.add_argument("--prompt", metavar="TEXT", help="the prompt")
    command.add_argument(
        "--prompt-ids",
        metavar="IDS",
        type=arguments.token_ids,
        help='the prompt as token ids: "1,2,3"',
    )
    command.add_argument("--system", metavar="TEXT", help="system message of the chat")
    command.add_argument(
        "--raw", action="store_true", help="no chat template: go on from the prompt as it stands"
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
        help="compute nothing: say what memory it would take, and whether the prompts fit",
    )
    _add_file_options(command)
    sampling = arguments.add_sampling(command, most_tokens="128")
    sampling.add_argument(
        "--n", type=int, metavar="N", help="with --json or --file: answers per prompt"
    )
    sampling.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="with --json or --file: log-probabilities, and those of the K best tokens",
    )
    arguments.add_engine(command)
    arguments.add_store(command)
    command.set_defaults(run=_run)
    return command


def _add_file_options(command: argparse.ArgumentParser) -> None:
    many = command.add_argument_group("many prompts at once, answered in one batch")
    many.add_argument(
        "--file",
        metavar="PROMPTS",
        help='a prompt per line, or (.jsonl) an object with "prompt", "messages" or "prompt_ids" '
        "and options of its own; -: stdin",
    )
    many.add_argument(
        "--format", choices=("txt", "jsonl"), help="of PROMPTS (default: by the end of its name)"
    )
    many.add_argument(
        "--output", metavar="FILE", help="the answers, an object per line (default: stdout)"
    )


def _run(options: argparse.Namespace) -> int:
    _check_modes(options)
    model, text = _model_and_text(options)
    if options.file is not None:
        return batch.run(options, model, PromptFile.read(options.file, options.format))
    if options.dry_run:
        return _dry_run(options, model, text)
    sampling = arguments.given(options, arguments.SAMPLING)
    with models.open_engine(model, arguments.given(options, arguments.ENGINE)) as engine:
        prompt = options.prompt_ids or models.text_prompt(
            models.tokenizer_of(engine),
            sys.stdin.read() if text is None else text,
            options.system,
            options.raw,
        )
        if options.json:
            result = engine.generate(prompt, **sampling)
            print(json.dumps(answers.result_object(result), ensure_ascii=False))
            answers.print_sources(engine, result)
            return 0
        answer = answers.print_answer(engine, prompt, sampling)
        answers.print_sources(engine, answer.result)
    if options.stats:
        answers.print_stats(answer)
    return 0


def _dry_run(options: argparse.Namespace, model: str | None, text: str | None) -> int:
    folder = models.model_folder(model)
    plan = memory.plan_memory(folder, arguments.given(options, arguments.ENGINE))
    facts: dict[str, Any] = {}
    if text is not None or options.prompt_ids is not None:
        tokenizer = models.read_tokenizer(folder)
        prompt = options.prompt_ids or models.text_prompt(
            tokenizer, text or "", options.system, options.raw
        )
        facts = batch.length_facts(plan, tokenizer, [(prompt, options.max_tokens)], options.window)
    return memory.print_plan(plan, facts, options.json)


def _check_modes(options: argparse.Namespace) -> None:
    if options.file is None:
        if options.output is not None or options.format is not None:
            raise UsageError("generate: --output and --format go with --file")
        if not options.json and options.n not in (None, 1):
            raise UsageError("generate: several answers need --json or --file")


def _model_and_text(options: argparse.Namespace) -> tuple[str | None, str | None]:
    """The folder (None: embedded) and the text (None: it stands elsewhere, or in standard
    input)."""
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
    if sources and words or len(words) > 1:
        raise UsageError(
            f"generate: more than one prompt: {words[-1]!r}; quote a text of several words"
        )
    if words:
        return model, words[0]
    if sources or options.dry_run:
        return model, options.prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            'generate: no prompt; for example: quire generate "What is a quire of paper?"'
        )
    return model, None


def _means_folder(word: str) -> bool:
    """Whether a single word is the model and not the prompt: it is a folder or is written like a
    path."""
    return os.path.isdir(word) or re.fullmatch(r"~\S*|\S*/\S*", word) is not None
