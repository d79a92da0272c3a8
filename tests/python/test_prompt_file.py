"""`quire generate --file`: what is read, what is refused before anything is computed, what is
written."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quire
from program import process, run
from quire.cli.terminal import Progress
from tiny_model import Shape, TinyModel

Answer = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], model: list[str], tmp_path: Path) -> Answer:
    """Answers a file with this content; exit code, rows, standard error."""

    def call(
        content: str | bytes, *arguments: str, name: str = "prompts.jsonl"
    ) -> tuple[int, list[dict[str, Any]], str]:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        # Small pages, so that the cache of the tiny model has room for several answers.
        options = ["--page-size", "16", *arguments]
        code, out, err = run(capsys, "generate", *model, *options, "--file", str(path))
        return code, [json.loads(line) for line in out.split("\n")[:-1]], err

    return call


def lines(*objects: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in objects)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# ---- What is read


def test_a_prompt_per_line(answer: Answer, engine: quire.Engine) -> None:
    code, rows, err = answer("Hello\n\n  Why? \r\nlast", "--max-tokens", "5", name="prompts.txt")
    expected = [engine.generate(chat(text), max_tokens=5) for text in ("Hello", "  Why? ", "last")]
    assert code == 0 and "Traceback" not in err
    assert [row["line"] for row in rows] == [1, 3, 4]
    assert [row["ids"] for row in rows] == [result.ids for result in expected]
    assert [row["text"] for row in rows] == [result.text for result in expected]
    assert rows[0]["usage"]["prompt_tokens"] == len(expected[0].prompt_ids)
    assert "logprobs" not in rows[0] and rows[0]["finish_reason"] in ("stop", "length")


def test_every_kind_of_prompt(answer: Answer, engine: quire.Engine) -> None:
    system = [{"role": "system", "content": "Be brief."}, *chat("Hi")]
    _, rows, _ = answer(
        lines(
            {"prompt": "Hi"},
            {"prompt": "Hi", "raw": True},
            {"prompt": "Hi", "system": "Be brief."},
            {"messages": system},
            {"prompt_ids": [5, 6, 7]},
        ),
        "--max-tokens",
        "5",
    )
    expected = [
        engine.generate(prompt, max_tokens=5)
        for prompt in (chat("Hi"), "Hi", system, system, [5, 6, 7])
    ]
    assert [row["ids"] for row in rows] == [result.ids for result in expected]


def test_options_of_a_line_go_before_those_of_the_command(
    answer: Answer, engine: quire.Engine
) -> None:
    own = {
        "max_tokens": 7,
        "temperature": 1.2,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 2**64 - 1,
        "n": 2,
        "logprobs": 2,
        "ignore_eos": True,
        "stop": ["never said", [300, 301]],
    }
    options = ["--max-tokens", "4", "--temperature", "0.5", "--seed", "3"]
    _, rows, _ = answer(
        lines(
            {"prompt": "Hi", "raw": True, **own, "logit_bias": {"7": -2, "8": 1.5}},
            {"prompt": "Hi", "raw": True},
        ),
        *options,
    )
    expected = engine.generate("Hi", **own, logit_bias={7: -2.0, 8: 1.5})
    assert [sample["ids"] for sample in rows[0]["samples"]] == [s.ids for s in expected.samples]
    assert rows[0]["samples"][1]["logprobs"] == expected.samples[1].logprobs
    assert len(rows[0]["samples"][0]["top_logprobs"][0]) == 2
    plain = engine.generate("Hi", max_tokens=4, temperature=0.5, seed=3)
    assert rows[1]["ids"] == plain.ids


def test_windows_guesses_and_salts_of_a_line(answer: Answer, engine: quire.Engine) -> None:
    ids = [3 + i % 90 for i in range(60)]
    window = {"window": 24, "sinks": 4, "max_tokens": 6}
    guesses = {"speculate": "ngram", "draft_tokens": 3, "draft_branches": 1}
    code, rows, err = answer(
        lines(
            {"prompt_ids": ids, **window},
            {"prompt_ids": ids, **guesses, "max_tokens": 150, "ignore_eos": True, "window": 0},
            {"prompt_ids": ids, "window": 0},
            {"prompt_ids": ids, "cache_salt": "ann"},
            {"prompt_ids": ids, "cache_salt": "bob"},
            {"prompt_ids": ids, "speculate": "none"},
        ),
        *("--max-tokens", "8", "--window", "40", "--sinks", "2", "--max-num-sequences", "1"),
    )
    assert code == 0, err
    windowed = engine.generate(ids, window=40, sinks=2, max_tokens=8)
    assert rows[0]["ids"] == engine.generate(ids, **window).ids
    assert rows[2]["ids"] == engine.generate(ids, max_tokens=8).ids
    for row in rows[3:]:
        assert row["ids"] == windowed.ids
    assert rows[1]["ids"] == engine.generate(ids, max_tokens=150, ignore_eos=True).ids
    assert rows[1]["usage"].get("drafted_tokens", 0) > 0
    assert rows[3]["usage"]["cached_tokens"] == rows[4]["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 4097}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"speculate": "magic"}, "speculate"),
        ({"speculate": "model"}, "draft"),
        ({"speculate": None}, "speculate"),
        ({"draft_tokens": 4}, "speculate"),
        ({"speculate": "ngram", "draft_branches": 17}, "draft_branches is 17"),
        ({"sinks": 4}, "sinks"),
        ({"window": -1}, "window"),
        ({"window": "x"}, "window"),
    ],
    ids=str,
)
def test_what_is_wrong_with_them_is_told_by_line(
    answer: Answer, field: dict[str, Any], word: str
) -> None:
    code, rows, err = answer(lines({"prompt": "Hi"}, {"prompt": "Hi", **field}))
    assert code == 1 and rows == [] and ":2: " in err and word in err
    assert "Options::" not in err and "--" not in err and err.count("\n") == 1


def test_an_id_comes_back(answer: Answer) -> None:
    _, rows, _ = answer(
        lines({"prompt": "a", "id": "x\ud800"}, {"prompt": "b", "id": {"deep": [1]}}),
        "--max-tokens",
        "1",
        "--output",
        "/dev/null",
    )
    assert rows == []
    _, rows, _ = answer(lines({"prompt": "b", "id": {"deep": [1]}}), "--max-tokens", "1")
    assert rows[0]["id"] == {"deep": [1]}


def test_standard_input(
    capsys: pytest.CaptureFixture[str],
    model: list[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
) -> None:
    for text, format in (("one\ntwo\n", []), (lines({"prompt": "one"}), ["--format", "jsonl"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        arguments = [*model, "--file", "-", *format, "--max-tokens", "3"]
        code, out, _ = run(capsys, "generate", *arguments)
        _, rows, _ = answer(text, "--max-tokens", "3", name="p.jsonl" if format else "p.txt")
        found = [json.loads(line)["ids"] for line in out.split("\n")[:-1]]
        assert code == 0 and found == [row["ids"] for row in rows]


# ---- What is written


def test_a_closed_standard_input_is_one_line(
    capsys: pytest.CaptureFixture[str], model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run(capsys, "generate", *model, "--file", "-")
    assert (code, out, err) == (1, "", "quire: error: standard input: is closed\n")


def test_many_prompts_are_answered_in_order(answer: Answer, engine: quire.Engine) -> None:
    """More than are submitted at a time; the long ones end late and must not hold the order."""
    prompts = [{"prompt_ids": [5 + i % 200, 9], "max_tokens": 1 + i * 7 % 20} for i in range(300)]
    code, rows, err = answer(lines(*prompts), "--ignore-eos", "--max-num-sequences", "16")
    assert code == 0 and [row["line"] for row in rows] == list(range(1, 301))
    for index in (0, 17, 150, 299):
        prompt = prompts[index]
        expected = engine.generate(
            prompt["prompt_ids"], max_tokens=prompt["max_tokens"], ignore_eos=True
        )
        assert rows[index]["ids"] == expected.ids
    assert "300/300 requests" in err


def test_output_goes_to_a_file_and_replaces_it(answer: Answer, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("old\n" * 100)
    code, rows, err = answer(
        lines({"prompt": "Hi", "id": "\ud800"}), "--max-tokens", "2", "--output", str(output)
    )
    assert code == 0 and rows == [] and "1/1 requests" in err
    (line,) = output.read_text().splitlines()
    assert json.loads(line)["id"] == "\ud800" and json.loads(line)["line"] == 1


def test_a_refused_line_leaves_the_answers_of_an_earlier_run(
    answer: Answer, tmp_path: Path
) -> None:
    """The file was emptied before the model had seen the lines."""
    output = tmp_path / "answers.jsonl"
    output.write_text("earlier answers\n")
    code, _, err = answer(lines({"prompt_ids": [10**9]}), "--output", str(output))
    assert code == 1 and "nothing was computed" in err
    assert output.read_text() == "earlier answers\n"


def test_a_full_disk_is_one_line(answer: Answer) -> None:
    code, _, err = answer(lines({"prompt": "Hi"}), "--max-tokens", "2", "--output", "/dev/full")
    assert code == 1
    assert err.splitlines()[-1] == "quire: error: /dev/full: No space left on device"


def test_what_is_done_is_written_at_once(tmp_path: Path) -> None:
    """The first row is there while the second answer, of 50 000 tokens, is under way; Ctrl-C then
    ends it and leaves the row."""
    slow = TinyModel(tmp_path / "slow", Shape(positions=60000))
    path, output = tmp_path / "p.jsonl", tmp_path / "rows.jsonl"
    path.write_text(lines({"prompt_ids": [7], "max_tokens": 1}, {"prompt_ids": [7]}))
    child = process(
        *("generate", str(slow.directory), "--file", str(path), "--output", str(output)),
        *("--ignore-eos", "--max-tokens", "50000"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not output.exists() or not output.read_text().endswith("\n"):
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and b"Traceback" not in err
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1]


def test_the_prompts_are_not_overwritten(answer: Answer, tmp_path: Path) -> None:
    code, _, err = answer(lines({"prompt": "Hi"}), "--output", str(tmp_path / "prompts.jsonl"))
    assert code == 2 and "prompts.jsonl" in err
    assert (tmp_path / "prompts.jsonl").read_text() == lines({"prompt": "Hi"})


def test_a_request_that_fails_has_its_error_in_its_row(
    answer: Answer, engine: quire.Engine
) -> None:
    code, rows, err = answer(
        lines(
            {"prompt_ids": [5], "max_tokens": 3},
            {"prompt_ids": [6], "max_tokens": 5000, "id": "long"},
            {"prompt_ids": [7], "max_tokens": 3},
        )
    )
    assert code == 1 and "1 of 3 requests failed" in err
    assert rows[0]["ids"] == engine.generate([5], max_tokens=3).ids
    assert rows[1]["line"] == 2 and rows[1]["id"] == "long"
    assert rows[1]["error"]["code"] == "TooLarge" and "5000" in rows[1]["error"]["message"]
    assert rows[2]["ids"] == engine.generate([7], max_tokens=3).ids


def test_no_request_at_all_may_fit(answer: Answer) -> None:
    code, rows, _ = answer(lines(*[{"prompt_ids": [6], "max_tokens": 5000}] * 300))
    assert code == 1 and len(rows) == 300 and all("error" in row for row in rows)


# ---- What is refused


BAD_LINES = {
    "no JSON": ('{"prompt": ', "is not JSON"),
    "not a number": ('{"prompt": "x", "top_p": NaN}', "NaN"),
    "a number of many digits": ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "JSON"),
    "nested": ("[" * 100_000, "nested"),
    "a list": ("[1]", "must be an object"),
    "empty": ("{}", "exactly one of"),
    "two prompts": ('{"prompt": "x", "prompt_ids": [1]}', "prompt and prompt_ids"),
    "an unknown field": ('{"prompt": "x", "temprature": 1}', "temprature"),
    "a number as prompt": ('{"prompt": 3}', '"prompt" must be a text that is not empty, not 3'),
    "no messages": ('{"messages": []}', '"messages" must be'),
    "a text as message": ('{"messages": ["x"]}', '"messages" must be'),
    "a message without role": ('{"messages": [{"content": "x"}]}', '"messages" must be'),
    "a template that refuses": ('{"messages": [{"role": "user", "content": {"a": 1}}]}', None),
    "text as ids": ('{"prompt_ids": ["x"]}', '"prompt_ids" must be'),
    "no ids": ('{"prompt_ids": []}', '"prompt_ids" must be'),
    "true as id": ('{"prompt_ids": [true]}', '"prompt_ids" must be'),
    "a negative id": ('{"prompt_ids": [-1]}', "-1"),
    "an id beyond the vocabulary": ('{"prompt_ids": [320000]}', "320000"),
    "an id of 100 bits": ('{"prompt_ids": [' + str(2**100) + "]}", '"prompt_ids" must be'),
    "a lone surrogate": ('{"prompt": "\\ud800"}', "surrogate"),
    "system beside messages": ('{"messages": [{"role": "user"}], "system": "x"}', '"system"'),
    "raw beside ids": ('{"prompt_ids": [1], "raw": true}', '"raw"'),
    "a system message without template": ('{"prompt": "x", "raw": true, "system": "s"}', "system"),
    "temperature": ('{"prompt": "x", "temperature": -1}', "temperature"),
    "temperature as text": ('{"prompt": "x", "temperature": "1"}', '"temperature" must be'),
    "a float beyond doubles": ('{"prompt": "x", "top_p": 1e999}', '"top_p" must be'),
    "an int beyond doubles": ('{"prompt": "x", "top_p": ' + "9" * 400 + "}", '"top_p" must be'),
    "top_k of 100 bits": ('{"prompt": "x", "top_k": ' + str(2**100) + "}", '"top_k" must be'),
    "half a token": ('{"prompt": "x", "max_tokens": 1.5}', '"max_tokens" must be'),
    "a negative seed": ('{"prompt": "x", "seed": -1}', '"seed" must be'),
    "no answers": ('{"prompt": "x", "n": 0}', "n is 0"),
    "ignore_eos as number": ('{"prompt": "x", "ignore_eos": 1}', '"ignore_eos" must be'),
    "an empty stop": ('{"prompt": "x", "stop": ""}', "stop"),
    "a stop of floats": ('{"prompt": "x", "stop": [[1.5]]}', '"stop" must be'),
    "a stop beyond 32 bits": ('{"prompt": "x", "stop": [[99999999999]]}', "99999999999"),
    "a bias for a word": ('{"prompt": "x", "logit_bias": {"the": 1}}', '"logit_bias" must be'),
    "a bias beyond the vocabulary": ('{"prompt": "x", "logit_bias": {"99999999": 1}}', "99999999"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_before_anything_is_computed(answer: Answer, name: str) -> None:
    line, message = BAD_LINES[name]
    code, rows, err = answer('{"prompt": "fine"}\n\n' + line + '\n{"prompt": "fine"}\n')
    if message is None:  # whether a template takes it is its own affair
        assert code == 0 or "prompts.jsonl:3: " in err
        return
    assert (code, rows) == (1, []) and err.count("\n") == 1
    assert "prompts.jsonl:3: " in err and message in err and "nothing was computed" in err


def test_the_other_bad_lines_are_counted(answer: Answer) -> None:
    code, _, err = answer('{"prompt": "fine"}\nx\ny\nz\n')
    assert code == 1 and ":2: " in err and "2 more bad lines" in err


def test_text_that_is_no_utf8_is_named(answer: Answer) -> None:
    code, _, err = answer(b"fine\n\xff\xfe\n", name="prompts.txt")
    assert code == 1 and "prompts.txt:2: is not UTF-8" in err


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts_is_refused(answer: Answer, content: str) -> None:
    code, _, err = answer(content)
    assert code == 1 and "has no prompts" in err


# ---- Progress


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def shown(terminal: bool) -> str:
    """200 requests of 8 tokens in 200 seconds. (Eighths of a second are exact in binary.)"""
    now = [0.0]
    screen = Screen(terminal)
    progress = Progress(200, screen, clock=lambda: now[0])
    for eighth in range(1601):
        now[0] = eighth / 8
        progress.update(eighth // 8, eighth)
    progress.clear()
    return screen.getvalue()


def test_a_terminal_gets_a_bar_over_itself() -> None:
    text = shown(terminal=True)
    assert "\n" not in text and text.count("\r") > 1000
    bars = text.split("\r")
    assert bars[1].startswith("[--------------------] 0/200")
    assert "[##########----------] 100/200, 800 tokens, 8.0 tokens/s, 100 s left" in text
    assert bars[-1] == "" and bars[-2].strip() == ""  # removed at the end
    assert max(map(len, bars)) < 80 + 1


def test_a_log_gets_a_line_now_and_then() -> None:
    text = shown(terminal=False)
    assert "\r" not in text and "#" not in text
    assert text.count("\n") == 20
    assert "100/200 requests, 800 new tokens, 8.0 tokens/s, 100.0 s\n" in text
