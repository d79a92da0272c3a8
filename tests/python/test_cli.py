"""The program `quire`: what it prints, its exit codes, its manners as a process."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import quire
from program import process, run
from quire import cli
from quire.cli import arguments as cli_arguments
from tiny_model import Shape, TinyModel


# ---- generate


def test_an_answer_is_printed(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    code, out, err = run(capsys, "generate", *model, "--max-tokens", "12", "--prompt", "Hi")
    expected = engine.generate([{"role": "user", "content": "Hi"}], max_tokens=12)
    assert (code, out, err) == (0, expected.text + "\n", "")


def test_raw_takes_the_text_as_it_stands(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    code, out, _ = run(capsys, "generate", *model, "--raw", "--max-tokens", "12", "Hi")
    assert (code, out) == (0, engine.generate("Hi", max_tokens=12).text + "\n")


def test_json_is_one_object(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    code, out, err = run(
        capsys, "generate", *model, "--json", "--max-tokens", "5", "--logprobs", "2", "Hi"
    )
    expected = engine.generate([{"role": "user", "content": "Hi"}], max_tokens=5, logprobs=2)
    found = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert found["ids"] == expected.ids and found["text"] == expected.text
    assert (
        found["logprobs"] == expected.logprobs and found["finish_reason"] == expected.finish_reason
    )
    assert found["usage"] == {
        "prompt_tokens": len(expected.prompt_ids),
        "cached_tokens": 0,
        "completion_tokens": len(expected.ids),
    }
    assert [best["id"] for best in found["top_logprobs"][0]] == [
        id for id, _ in expected.top_logprobs[0]
    ]


def test_ids_as_prompt(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    code, out, _ = run(
        capsys, "generate", *model, "--json", "--max-tokens", "5", "--prompt-ids", "[7, 8,9]"
    )
    assert code == 0 and json.loads(out)["ids"] == engine.generate([7, 8, 9], max_tokens=5).ids


def test_sampling_options_reach_the_engine(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    arguments = [
        "--temperature",
        "1.5",
        "--seed",
        "9",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
    ]
    arguments += [
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.1",
        "--frequency-penalty",
        "0.2",
    ]
    code, out, _ = run(
        capsys,
        "generate",
        *model,
        "--json",
        "--max-tokens",
        "9",
        "--ignore-eos",
        *arguments,
        "--raw",
        "Hi",
    )
    expected = engine.generate(
        "Hi",
        max_tokens=9,
        ignore_eos=True,
        temperature=1.5,
        seed=9,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
    )
    assert code == 0 and json.loads(out)["ids"] == expected.ids


def test_a_stop_text(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    text = engine.generate("Hi", max_tokens=20, ignore_eos=True).text
    stop = text[len(text) // 2 :][:2]
    arguments = ["--raw", "--max-tokens", "20", "--ignore-eos", "--stop", stop, "Hi"]
    code, out, _ = run(capsys, "generate", *model, *arguments)
    assert (code, out) == (0, text[: text.index(stop)] + "\n")


def test_engine_options_change_no_answer(
    capsys: pytest.CaptureFixture[str], model: list[str]
) -> None:
    arguments = ["--max-tokens", "9", "The quick brown fox jumps"]
    plain = run(capsys, "generate", *model, *arguments)
    other = ["--page-size", "3", "--kv-bytes", "2M", "--prefill-chunk", "4"]
    assert run(capsys, "generate", *model, *other, *arguments) == plain


def test_a_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(capsys, "generate", *model, "--max-tokens", "5", "--prompt", "from stdin")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert run(capsys, "generate", *model, "--max-tokens", "5") == expected


def test_several_answers(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    arguments = ["--temperature", "1", "--n", "3", "--json", "--max-tokens", "6", "--raw"]
    code, out, _ = run(capsys, "generate", *model, "--page-size", "16", *arguments, "Hi")
    expected = engine.generate("Hi", temperature=1, n=3, max_tokens=6).samples
    assert code == 0
    assert [found["ids"] for found in json.loads(out)["samples"]] == [s.ids for s in expected]


def test_stats_go_to_standard_error(capsys: pytest.CaptureFixture[str], model: list[str]) -> None:
    _, _, err = run(
        capsys, "generate", *model, "--stats", "--max-tokens", "5", "--ignore-eos", "Hi"
    )
    assert "5 new tokens" in err and "tokens/s" in err


# ---- Errors: one line, exit code 1; 2 for usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/no/such/folder", "Hi"], "/no/such/folder"),
        (["generate", "/no/such/folder"], "/no/such/folder"),
        (["generate", "no/such/folder"], "no/such/folder"),
        (["generate", "--model", "no_such_folder", "Hi"], "no_such_folder"),
        (["generate", "MODEL", "Hi", "--temperature", "-1"], "temperature"),
        (["generate", "MODEL", "Hi", "--max-tokens", "100000"], "100000"),
        (["generate", "MODEL", "--prompt-ids", "99999999"], "99999999"),
        (["generate", "MODEL", "Hi", "--kernel-path", "abacus"], "abacus"),
        (["generate", "MODEL", "bad \udc80 text"], "surrogate"),
        (["import", "/no/such/file.gguf", "/tmp/no_such_out"], "/no/such/file.gguf"),
        (["inspect", "/no/such/folder"], "/no/such/folder"),
        (["chat", "/no/such/folder"], "/no/such/folder"),
        (["chat", "MODEL", "--threads", "-1"], "threads"),
        (["generate", "--file", "/no/such/file.txt"], "/no/such/file.txt: No such file"),
        (["generate", "--file", "/tmp"], "/tmp: Is a directory"),
        (["generate", "/no/such/folder", "--dry-run"], "/no/such/folder"),
    ],
    ids=str,
)
def test_a_failure_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, arguments: list[str], message: str
) -> None:
    arguments = [str(tiny.directory) if word == "MODEL" else word for word in arguments]
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == ""
    assert err.startswith("quire: error: ") and err.count("\n") == 1 and message in err
    assert "Traceback" not in err and "Errno" not in err


@pytest.mark.parametrize("arguments", [["generate", "Hi"], ["import", "FILE.gguf", "DIR"]], ids=str)
def test_a_missing_package_is_one_line_that_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))  # where the embedded model is not made yet
    for name in list(sys.modules):
        if name.split(".")[0] == "gguf" or name.startswith("quire.importer."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "" and err.count("\n") == 1 and "pip install 'quire[import]'" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["generate", "--no-such-option"],
        ["generate", "MODEL", "one", "two"],
        ["generate", "MODEL", "one", "--prompt", "two"],
        ["generate", "MODEL", "--prompt-ids", "1,x"],
        ["generate", "MODEL", "--prompt-ids", ""],
        ["generate", "MODEL", "--prompt-ids", "1", "--prompt", "x"],
        ["generate", "MODEL", "x", "--dtype", "int8"],
        ["generate", "MODEL", "x", "--kv-bytes", "lots"],
        ["generate", "MODEL", "x", "--raw", "--system", "s"],
        ["generate", "MODEL", "x", "--n", "2"],
        ["generate", "MODEL", "x", "--output", "answers.jsonl"],
        ["generate", "MODEL", "x", "--format", "txt"],
        ["generate", "MODEL", "x", "--file", "prompts.txt"],
        ["generate", "MODEL", "--prompt", "x", "--file", "prompts.txt"],
        ["chat", "MODEL", "too", "many"],
        ["import", "one"],
    ],
    ids=str,
)
def test_wrong_usage_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, arguments: list[str]
) -> None:
    arguments = [str(tiny.directory) if word == "MODEL" else word for word in arguments]
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and "quire" in err and "Traceback" not in err


def test_a_file_in_place_of_a_folder_gets_a_hint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code, _, err = run(capsys, "generate", "--model", str(tmp_path / "model.gguf"), "Hi")
    assert code == 1 and "quire import" in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("4k", 4096),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2 tb", 2 << 40),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert cli_arguments.size(text) == expected


# ---- Help


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(
        f"quire {command}" in out for command in ("generate", "chat", "import", "inspect")
    )
    assert run(capsys, "--version") == (0, f"quire {quire.__version__}\n", "")


def test_without_arguments_it_introduces_itself_and_answers(
    capsys: pytest.CaptureFixture[str], embedded_model: str
) -> None:
    code, out, err = run(capsys)
    assert code == 0 and "quire generate" in out
    answer = out.split(cli.DEMO_PROMPT)[-1].strip(' "\n')
    assert len(answer) > 20 and "tokens/s" in err


# ---- As a process


@pytest.fixture(scope="module")
def long_answer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for an answer of 50 000 tokens: it is under way when its first byte is here."""
    model = TinyModel(tmp_path_factory.mktemp("long"), Shape(positions=60000))
    return [
        "generate",
        str(model.directory),
        "--raw",
        "--ignore-eos",
        "--max-tokens",
        "50000",
        "Hi",
    ]


def test_it_streams_and_ctrl_c_ends_it_cleanly(long_answer: list[str]) -> None:
    # The signal is ignored where the tests run in the background, and would be by the child.
    child = process(*long_answer, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert child.stdout is not None and child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, b"\n")


def test_a_reader_that_goes_away_is_no_traceback(long_answer: list[str]) -> None:
    child = process(*long_answer)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert (child.wait(timeout=60), err) == (1, b"")


@pytest.mark.parametrize(("stdout", "code"), [("/dev/null", 0), ("/dev/full", 1)])
def test_where_the_answer_goes_is_minded(model: list[str], stdout: str, code: int) -> None:
    with open(stdout, "w") as file:
        child = process("generate", *model, "--max-tokens", "3", "Hi", stdout=file)
        _, err = child.communicate(timeout=60)
    assert child.returncode == code and b"Traceback" not in err and err.count(b"\n") == code


def test_a_closed_standard_output_is_no_traceback(model: list[str]) -> None:
    child = process(
        "generate", *model, "--max-tokens", "3", "Hi", stdout=None, preexec_fn=lambda: os.close(1)
    )
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")


def test_a_name_that_is_no_utf8_is_one_line(tiny: TinyModel, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.symlink(tiny.directory, folder)
    child = process("generate", os.fsdecode(folder), "Hi")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1 and err.startswith(b"quire: error: ") and err.count(b"\n") == 1


def test_a_terminal_without_utf8_gets_no_traceback(
    model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    child = process("generate", *model, "--raw", "--json", "--max-tokens", "20", "你好")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and err == b"" and len(json.loads(out)["ids"]) <= 20
