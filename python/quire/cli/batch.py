"""The answers of `quire generate --file`: computed together, written in the order of the lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from quire import errors
from quire._sampling import merged
from quire.cli import answers, arguments, memory, models
from quire.cli.arguments import UsageError
from quire.cli.prompt_file import PromptFile, PromptLine
from quire.cli.terminal import Progress, note

if TYPE_CHECKING:
    from quire.engine import Engine, MemoryPlan, Result
    from quire.grammar import Grammar
    from quire.text import Tokenizer


_TREE_NODES = 64  # as an engine has that guesses for all requests (kTreeNodesDefault)
# Room for blended prompts: enough for several documents, and little beside what a forward takes.
BLEND_PIECE = 2048


def run(
    options: argparse.Namespace, model: str | None, file: PromptFile, grammar: Grammar | None
) -> int:
    folder = models.model_folder(model)
    engine_arguments = arguments.given(options, arguments.ENGINE)
    if any(line.sampling.get("speculate") in ("ngram", "model") for line in file.lines):
        # Room for guesses, which an engine has by itself only if it makes them for all requests.
        engine_arguments["max_tree_nodes"] = options.max_tree_nodes or _TREE_NODES
    if any(line.sampling.get("blend") is not None for line in file.lines):
        engine_arguments.setdefault("blend_piece", BLEND_PIECE)
    if options.dry_run:
        plan = memory.plan_memory(folder, engine_arguments)
        tokenizer = models.read_tokenizer(folder)
        lengths = []
        for line in file.lines:
            own = {**vars(options), **line.sampling}
            prompt = _prompt(file, line, tokenizer, options)
            template_args = own["template_args"] if models.is_chat(prompt) else None
            length = models.count_tokens(tokenizer, prompt, template_args)
            lengths.append((length, own["max_tokens"], own["window"]))
        return memory.print_plan(plan, length_facts(plan, lengths), options.json)
    with models.open_engine(folder, engine_arguments) as engine:
        requests = _requests(engine, file, options, grammar)
        # Not before: a line that is refused leaves the answers of an earlier run as they are.
        with _open_output(options.output, options.file) as output:
            code = _answer_all(engine, file, requests, output)
        answers.print_total_sources(engine)
        answers.print_total_remote(engine)
        answers.print_lost(engine)
        return code


def length_facts(
    plan: MemoryPlan,
    prompts: Iterable[tuple[int, int | None, int | None]],
) -> dict[str, Any]:
    """How long the prompts are, and how many cannot be answered, from their tokens, their
    max_tokens (None: what there is room for) and windows. With a window none is too long."""
    sizes = []
    too_long = 0
    for size, most, window in prompts:
        sizes.append(size)
        too_long += not window and size + (1 if most is None else most) > plan.longest_context
    return {
        "prompts": len(sizes),
        "prompt_tokens": sum(sizes),
        "longest_prompt": max(sizes),
        "too_long": too_long,
    }


def _prompt(
    file: PromptFile, line: PromptLine, tokenizer: Tokenizer | None, options: argparse.Namespace
) -> Any:
    """The prompt of a line as the engine takes it."""
    if not isinstance(line.prompt, str):
        return line.prompt
    raw = options.raw if line.raw is None else line.raw
    system = options.system if line.system is None else line.system
    try:
        return models.text_prompt(tokenizer, line.prompt, system, raw)
    except UsageError as error:
        raise file.failure([(line.number, error)]) from None


def _requests(
    engine: Engine, file: PromptFile, options: argparse.Namespace, grammar: Grammar | None
) -> list[tuple[Any, Any]]:
    """Prompts and their sampling options, all of them checked. Lines that can never be answered
    stop everything; those that only do not fit get their error in the output."""
    tokenizer = models.tokenizer_of(engine)
    defaults = {"logprobs": None, **arguments.given(options, arguments.SAMPLING)}
    defaults["grammar"] = grammar
    requests = []
    bad: list[tuple[int, object]] = []
    for line in file.lines:
        prompt, sampling = _prompt(file, line, tokenizer, options), merged(defaults, line.sampling)
        if line.sampling.get("window") == 0 and "sinks" not in line.sampling:
            sampling.pop("sinks", None)  # those of the command line are of its window
        if not models.is_chat(prompt) and "template_args" not in line.sampling:
            sampling.pop("template_args", None)  # that of the command line is of its chats
        try:
            engine.check(prompt, **sampling)
        except errors.TooLargeError:
            pass
        except errors.QuireError as error:
            bad.append((line.number, arguments.in_field_words(str(error))))
        requests.append((prompt, sampling))
    if bad:
        raise file.failure(bad)
    return requests


def _answer_all(
    engine: Engine, file: PromptFile, requests: list[tuple[Any, Any]], output: TextIO
) -> int:
    progress = Progress(len(requests), sys.stderr)
    done = written = failed = cut = 0
    # Rows that wait for one before them.
    waiting: dict[int, dict[str, Any]] = {}
    before = engine.stats()["completion_tokens"]

    def new_tokens() -> int:
        return engine.stats()["completion_tokens"] - before

    try:
        outcomes = engine.generate_each(
            requests, on_step=lambda: progress.update(done, new_tokens())
        )
        with contextlib.closing(outcomes):
            for index, outcome in outcomes:
                waiting[index] = _row(file.lines[index], outcome)
                done += 1
                failed += "error" in waiting[index]
                cut += _is_cut(outcome)
                while written in waiting:
                    text = json.dumps(waiting.pop(written), ensure_ascii=False)
                    print(text, file=output, flush=True)
                    written += 1
    finally:
        progress.clear()
    note(f"({progress.summary(done, new_tokens())})")
    if cut:
        note(f'({cut} of {done} answers were cut; their finish_reason is "length")')
    if failed:
        note(f'quire: error: {failed} of {done} requests failed; their rows have an "error"')
    return 1 if failed else 0


def _is_cut(outcome: Result | errors.QuireError) -> bool:
    return not isinstance(outcome, errors.QuireError) and any(
        sample.finish_reason == "length" for sample in outcome.samples
    )


def _row(line: PromptLine, outcome: Result | errors.QuireError) -> dict[str, Any]:
    row: dict[str, Any] = {"line": line.number}
    if line.id is not None:
        row["id"] = line.id
    if isinstance(outcome, errors.QuireError):
        return {**row, "error": {"code": outcome.code, "message": str(outcome)}}
    return {**row, **answers.result_object(outcome)}


@contextlib.contextmanager
def _open_output(name: str | None, source: str) -> Iterator[TextIO]:
    """The file of the answers, or standard output. Whatever was in the file before is replaced."""
    if name is None:
        yield sys.stdout
        return
    if os.path.exists(name) and os.path.exists(source) and os.path.samefile(name, source):
        raise UsageError(f"generate: --output {name} is the file of the prompts")
    try:
        # What is no Unicode (a lone surrogate in an "id") is written as JSON's own escape.
        with open(name, "w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
    except errors.QuireError:
        raise
    except OSError as error:  # of a write, which does not name the file
        error.filename = error.filename or name
        raise
