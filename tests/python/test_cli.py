"""The program `quire`: what it prints, its exit codes, its manners as a process."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import quire
import tiny_gguf
from program import ROOT, process, run
from quire import cli
from quire.cli import arguments as cli_arguments
from quire import _ranges as cli_ranges
from quire.cli import terminal as cli_terminal
from tiny_model import Shape, TinyModel


# ---- generate


def test_an_answer_is_printed(
    capsys: pytest.CaptureFixture[str], model: list[str], engine: quire.Engine
) -> None:
    code, out, err = run(capsys, "generate", *model, "--max-tokens", "12", "--prompt", "Hi")
    expected = engine.generate([{"role": "user", "content": "Hi"}], max_tokens=12)
    assert (code, out) == (0, expected.text + "\n") and expected.finish_reason == "length"
    assert err == "(cut after 12 tokens: --max-tokens)\n"


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
    usage = found["usage"]
    for name in ("queue_seconds", "prompt_seconds", "decode_seconds"):
        assert usage.pop(name) > 0
    assert usage == {
        "prompt_tokens": len(expected.prompt_ids),
        "cached_tokens": 0,
        "completion_tokens": len(expected.ids),
        "steps": 5,
        "prefix_miss": {"kind": "new", "position": 0, "evicted_ms": 0},
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
    arguments = ["--temperature", "1", "--seed", "0", "--n", "3", "--json"]
    arguments += ["--max-tokens", "6", "--raw"]
    code, out, _ = run(capsys, "generate", *model, "--page-size", "16", *arguments, "Hi")
    expected = engine.generate("Hi", temperature=1, seed=0, n=3, max_tokens=6).samples
    assert code == 0 and json.loads(out)["seed"] == 0
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
        (["import", "/no/such/file.gguf", "/tmp/no_such_out"], "/no/such/file.gguf"),
        (["inspect", "/no/such/folder"], "/no/such/folder"),
        (["chat", "/no/such/folder"], "/no/such/folder"),
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


@pytest.mark.parametrize(
    "arguments",
    [["generate", "Hi"], ["import", "FILE.gguf", "DIR"], ["inspect", "model.gguf"]],
    ids=str,
)
def test_a_missing_package_is_one_line_that_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))  # where the embedded model is not made yet
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF")
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
        ["generate", "MODEL", "x", "--sinks", "0"],
        ["generate", "MODEL", "x", "--kv-load-timeout", "0"],
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


_POSITIONS = "256 positions"  # of the tiny model
_NEEDS_A_STORE = "--kv-dir or --kv-redis"

# Command, option, a bad value, and what is said of the range.
_BAD_VALUES = [
    *(
        (command, option, value, words)
        for command in ("generate", "chat", "snapshot save FILE")
        for option, values, words in (
            ("--max-tokens", ("0", "-1", "x", "1.5", "9" * 30, "9" * 5000), "from 1 to 2^63 - 1"),
            ("--temperature", ("-1", "nan", "inf", "1e39", "x"), "at least 0"),
            ("--top-k", ("-1", "9" * 30, "x"), "from 0 to 2^63 - 1"),
            ("--top-p", ("0", "1.5", "nan", "1e-60"), "above 0 and at most 1"),
            ("--min-p", ("-0.1", "1.1", "nan"), "at least 0 and at most 1"),
            ("--repetition-penalty", ("0", "-1", "nan", "inf"), "above 0"),
            ("--presence-penalty", ("nan", "inf", "x"), "a finite number"),
            ("--frequency-penalty", ("nan", "inf", "x"), "a finite number"),
            ("--seed", ("-1", str(2**64), "x"), "from 0 to 2^64 - 1"),
            ("--window", ("-1", "x"), "from 0 to 2^63 - 1"),
            ("--sinks", ("-1", "x"), "from 0 to 2^63 - 1"),
            ("--cache-salt", ("", "x" * 4097), "1 to 4096 bytes"),
            ("--dtype", ("int8",), "choose from"),
            ("--kv-dtype", ("int4", "int8,int8,int8", ","), "float32, float16, int8, fp8"),
            ("--threads", ("-1", "1025", "x"), "from 0 to 1024"),
            ("--page-size", ("-1", "1048577", "x"), "from 0 to 1048576"),
            ("--kv-bytes", ("lots", "-1", "1e9", "9" * 30), "bytes"),
            ("--prefill-chunk", ("0", "1048577"), "from 1 to 1048576"),
            ("--max-num-sequences", ("0", "1048577"), "from 1 to 1048576"),
            ("--speculate", ("magic",), "choose from"),
            ("--draft-tokens", ("0", "256"), "from 1 to 255"),
            ("--draft-branches", ("0", "17"), "from 1 to 16"),
            ("--kernel-path", ("abacus", ""), "this machine can run"),
        )
        for value in values
    ),
    *(
        (command, option, value, words)
        for command in ("generate", "chat")
        for option, value, words in (
            ("--kv-load-timeout", "-1", "at least 0 and at most 86400"),
            ("--kv-load-timeout", "nan", "at least 0 and at most 86400"),
            ("--kv-io-timeout", "0", "at least 0.001 and at most 86400"),
            ("--kv-quota", "lots", "512M"),
            ("--kv-durability", "paper", "choose from"),
            ("--kv-key-file", "/no/such/key", "No such file"),
            ("--kv-key-file", "/dev/null", "at least 16"),
        )
    ),
    ("generate", "--n", "0", "from 1 to 1048576"),
    ("generate", "--logprobs", "-1", "from 0 to 256"),
    ("generate", "--logprobs", "257", "from 0 to 256"),
    ("generate", "--prompt-ids", "-1", "from 0 to 2^31 - 1"),
    ("generate", "--prompt-ids", "9" * 30, "from 0 to 2^31 - 1"),
    ("generate", "--json", "--stats", "--stats has no effect"),
    ("generate", "--stop", "", "it is empty"),
    ("generate", "--kv-dir", "", "it is empty"),
    ("generate", "--max-token", "5", "did you mean --max-tokens?"),
    ("kv-quality", "--context", "1", "from 2 to 2^63 - 1"),
    ("kv-quality", "--tokens", "1", "from 2 to 2^63 - 1"),
    ("kv-quality", "--types", "int4", "int8"),
    ("kv-quality", "--against", "int4", "int8"),
    ("pack", "--threads", "-1", "from 0 to 1024"),
    # What only the model can judge.
    ("generate", "--max-tokens", "100000", _POSITIONS),
    ("generate", "--window", "100000", _POSITIONS),
    ("generate", "--kv-bytes", "100", "at least"),
    ("generate --model MODEL", "--prompt-ids", "99999999", "the vocabulary is [0, "),
    # Without effect.
    ("generate", "--sinks", "4", "--window"),
    ("generate", "--draft-tokens", "4", "--speculate"),
    ("generate", "--draft-branches", "4", "--speculate"),
    ("generate", "--speculate", "model", "--draft-model"),
    ("generate", "--kv-quota", "1G", "--kv-dir"),
    ("generate", "--kv-durability", "sync", "--kv-dir"),
    ("generate", "--kv-key-file", "KEY", _NEEDS_A_STORE),
    ("generate", "--kv-load-timeout", "1", _NEEDS_A_STORE),
    ("generate", "--kv-io-timeout", "1", _NEEDS_A_STORE),
    ("generate", "--logprobs", "1", "--json"),
    ("generate", "--n", "2", "--json"),
    ("generate", "--temperature", "0 --top-k 5", "--top-k has no effect"),
    ("generate", "--draft-model", "x --speculate ngram", "--speculate ngram"),
    ("generate", "--prompt-ids", "1 --system x", "--system has no effect"),
    ("generate", "--prompt-ids", "1 --raw", "--raw has no effect"),
    ("generate", "--file", "x --json", "--json has no effect"),
    ("generate", "--file", "x --stats", "--stats has no effect"),
    ("snapshot show FILE", "--threads", "1", "has no effect"),
    ("snapshot restore FILE", "--prompt", "x --raw", "--raw has an effect with save only"),
    ("snapshot save FILE", "--prompt", "x --any-numerics", "--any-numerics has an effect with restore only"),
    ("store ls redis://127.0.0.1:1", "--kv-quota", "1G", "no effect on Redis"),
    ("store ls redis://127.0.0.1:1", "--kv-durability", "sync", "no effect on Redis"),
]


@pytest.mark.parametrize(("command", "option", "value", "words"), _BAD_VALUES, ids=str)
def test_a_bad_value_is_told_by_its_option_with_its_range(
    capsys: pytest.CaptureFixture[str],
    tiny: TinyModel,
    tmp_path: Path,
    command: str,
    option: str,
    value: str,
    words: str,
) -> None:
    (tmp_path / "key").write_bytes(b"k" * 16)
    value = value.replace("KEY", str(tmp_path / "key"))
    name, *rest = command.replace("MODEL", str(tiny.directory)).split()
    values = value.split(" ") if " --" in value else [value]
    arguments = [name, *rest, option, *values]
    if name == "pack":
        arguments += [str(tiny.directory), str(tmp_path / "packed")]
    elif name == "generate" and option not in ("--prompt-ids", "--file"):
        arguments += ["--model", str(tiny.directory), "--prompt", "Hi"]
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 500
    assert words in err and (option in err or words.startswith("--")), err
    assert "Options::" not in err and "Traceback" not in err and "Engine::" not in err


def test_every_option_with_a_value_has_a_range() -> None:
    """An option that takes any text is one of these."""
    texts = {"prompt", "system", "stop", "model", "draft_model", "kv_dir", "kv_redis"}
    texts |= {"file", "output", "words", "directory", "text", "against"}
    for name in cli._COMMANDS:
        command = importlib.import_module(cli._COMMANDS[name]).parser()
        for action in command._actions:
            is_text = action.type is None and action.choices is None and action.nargs != 0
            assert not is_text or action.dest in texts, f"{name}: {action.dest}"
            assert action.type not in (int, float), f"{name}: {action.dest}"


def test_members_become_options_and_paths_stay() -> None:
    for message, expected in (
        ("EngineOptions::threads is -1", "--threads is -1"),
        ("SamplingOptions::speculation.branches is 0", "--draft-branches is 0"),
        ("raise EngineOptions::kv_bytes or max_tokens", "raise --kv-bytes or --max-tokens"),
        ("prefill_chunk_size is 0", "--prefill-chunk is 0"),
        ("/models/max_tokens/kv_bytes: damaged", "/models/max_tokens/kv_bytes: damaged"),
        ("max_tokens.json: damaged", "max_tokens.json: damaged"),
        ("window is open", "window is open"),
    ):
        assert cli_arguments.in_typed_words(message) == expected


def test_a_name_of_a_hub_says_that_nothing_is_downloaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "generate", "Some-Org/Some-Model-1.5B", "Hi")
    assert (code, out) == (1, "") and "does not download" in err and "hf download" in err
    with pytest.raises(quire.NotFoundError, match="does not download"):
        quire.Engine("Some-Org/Some-Model-1.5B")


def test_a_hub_name_of_gguf_files_says_how_to_fetch_one_of_them() -> None:
    """All of them would be a hundred GB and no model folder."""
    name = "Some-Org/Some-Model-1.5B-GGUF"
    with pytest.raises(
        quire.NotFoundError, match=f"hf download {name} FILE.gguf .*Some-Model-1.5B-GGUF/FILE.gguf"
    ):
        quire.Engine(name)


def test_a_folder_of_gguf_files_names_them(
    capsys: pytest.CaptureFixture[str], gguf: Path, tmp_path: Path
) -> None:
    code, out, err = run(capsys, "generate", str(tmp_path), "Hi")
    assert (code, out) == (1, "") and f"give one of them, such as {gguf}" in err
    gguf.rename(tmp_path / "one.gguf")
    (tmp_path / "config.json").write_text("{}")  # some repositories have one beside them
    for index in range(9):
        (tmp_path / f"other-{index}.gguf").touch()
    with pytest.raises(quire.NotFoundError, match=r"other-6.gguf, \.\.\.\)"):
        quire.Engine(tmp_path)


def test_a_single_word_that_names_a_gguf_file_is_the_model(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gguf: Path,
    tmp_path: Path,
) -> None:
    """It was taken for a prompt to the embedded model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    code, out, err = run(capsys, "generate", gguf.name, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["longest_context"] == 256
    code, _, err = run(capsys, "generate", "absent.gguf")
    assert code == 1 and "absent.gguf: there is no such GGUF file; if it is meant as" in err


_LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:"
    + "0" * 64
    + "\nsize 269060552\n"
)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.directory, folder)
    (folder / file).write_text(_LFS_POINTER)
    code, out, err = run(capsys, "generate", str(folder), "Hi")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert str(folder / file) in err and "Git LFS pointer" in err and "lfs pull" in err


def test_a_tokenizer_of_sentencepiece_says_how_to_convert_it(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.directory, folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    code, out, err = run(capsys, "generate", str(folder), "Hi")
    assert (code, out) == (1, "") and "tokenizer.model" in err and "save_pretrained" in err
    ids = ("--prompt-ids", "1,2", "--max-tokens", "2")
    assert run(capsys, "generate", str(folder), *ids)[0] == 0


def test_a_file_in_place_of_a_folder_gets_a_hint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    code, _, err = run(capsys, "generate", "--model", str(tmp_path / "model.bin"), "Hi")
    assert code == 1 and "neither the folder of a model nor a GGUF file" in err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code, _, err = run(capsys, "generate", "--model", str(tmp_path / "model.gguf"), "Hi")
    assert code == 1 and "shorter than a GGUF header" in err


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
    assert cli_ranges.size(text) == expected


# ---- Help


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(
        f"quire {command}" in out for command in ("generate", "chat", "import", "inspect")
    )
    assert run(capsys, "--version") == (0, f"quire {quire.__version__}\n", "")


def test_help_of_import_names_the_models_of_all_architectures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It named two families."""
    from quire.importer import model_shape

    code, out, _ = run(capsys, "import", "--help")
    assert code == 0
    for architecture in model_shape.ARCHITECTURES:
        assert architecture in re.findall(r"\w+", out)


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
    assert child.returncode == code and b"Traceback" not in err and err.count(b"\n") == 1
    assert err.startswith(b"quire: error: " if code else b"(cut after 3 tokens")


def test_a_closed_standard_output_is_no_traceback(model: list[str]) -> None:
    child = process(
        "generate", *model, "--max-tokens", "3", "Hi", stdout=None, preexec_fn=lambda: os.close(1)
    )
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"(cut after 3 tokens: --max-tokens)\n")


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


# ---- Long work that writes


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    tiny_gguf.write_model(path, tiny_gguf.random_weights(1, tiny_gguf.vocab_size()))
    return path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_import_and_pack_tell_how_much_is_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gguf: Path,
    tmp_path: Path,
) -> None:
    from quire import packing
    from quire.importer import import_gguf

    seen: list[tuple[int, int]] = []
    folder = import_gguf(gguf, tmp_path / "model", progress=lambda *at: seen.append(at))
    assert seen == sorted(seen) and len(seen) > 3 and seen[-1][0] == seen[-1][1]
    size = (folder / "model.safetensors").stat().st_size
    assert 0 < size - seen[-1][1] < 1 << 20  # the header
    monkeypatch.setattr(cli_terminal.FileProgress, "_LINE_SECONDS", 0.0)
    code, _, err = run(capsys, "import", str(gguf), str(tmp_path / "other"))
    assert code == 0 and "MiB written" in err
    monkeypatch.setattr(packing, "_WATCH_SECONDS", 0.0)
    code, _, err = run(capsys, "pack", str(folder), str(tmp_path / "packed"))
    assert code == 0


def test_the_current_folder_is_filled_if_it_is_empty(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModel,
    tmp_path: Path,
) -> None:
    """The message was that it is not empty: of the half-written folder in it."""
    folder = tmp_path / "packed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, _, err = run(capsys, "pack", str(tiny.directory), ".")
    assert (code, err) == (0, "")
    assert "model.safetensors" in files(folder) and files(tmp_path) == {"packed"}


def test_progress_of_a_file_is_a_bar_on_a_terminal_and_few_lines_elsewhere() -> None:
    for is_terminal in (True, False):
        screen = io.StringIO()
        screen.isatty = lambda: is_terminal  # type: ignore[method-assign]
        now = [0.0]
        progress = cli_terminal.FileProgress("written", 100 << 20, screen, clock=lambda: now[0])
        for second in range(101):
            now[0] = float(second)
            progress.update(second << 20)
        progress.clear()
        text = screen.getvalue()
        if is_terminal:
            assert "[##########----------] 50 of 100 MiB written, 50 s left" in text
            assert "\n" not in text and text.endswith("\r")
        else:
            assert text.count("\n") == 10 and "(50 of 100 MiB written)" in text


def test_a_disk_without_room_is_told_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModel,
    gguf: Path,
    tmp_path: Path,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    out = tmp_path / "new" / "model"
    for command in (["import", str(gguf)], ["pack", str(tiny.directory)]):
        code, text, err = run(capsys, *command, str(out))
        assert (code, text) == (1, "") and err.count("\n") == 1
        assert str(out) in err and "GiB are free" in err
        assert files(tmp_path) == {"model.gguf"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_an_import_that_ends_early_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gguf: Path,
    tmp_path: Path,
    error: BaseException,
) -> None:
    from quire.importer import safetensors_writer

    def fail(*_: object) -> None:
        assert any(name.endswith(".part") for name in files(tmp_path))
        raise error

    monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "write", fail)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(capsys, "import", str(gguf), str(tmp_path / "model"))
    signal.signal(signal.SIGINT, before)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert (code, out) == (130 if interrupted else 1, "")
    assert err == "\n" if interrupted else "No space left" in err
    assert files(tmp_path) == {"model.gguf"}


# The import stops in the middle until the signal comes.
_STOPPED_IMPORT = """
import sys, time
from quire import cli
from quire.importer import safetensors_writer
def wait(*_):
    print("here", flush=True)
    time.sleep(600)
safetensors_writer.SafetensorsWriter.write = wait
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_no_half_folder(
    gguf: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    def by_default() -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)

    child = subprocess.Popen(
        [sys.executable, "-c", _STOPPED_IMPORT, "import", str(gguf), str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=by_default,
    )
    assert child.stdout is not None and child.stdout.readline() == b"here\n"
    assert any(name.endswith(".part") for name in files(tmp_path))
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err.strip()) == (code, b"")
    assert files(tmp_path) == {"model.gguf"}


def test_a_reader_that_has_gone_before_the_first_byte_is_no_traceback(model: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    child = process("generate", *model, "--json", "--max-tokens", "3", "Hi", stdout=write_end)
    os.close(write_end)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, b"")


# Whatever the tests themselves run with.
BUFFERED = ["PYTHONUNBUFFERED="]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_text_that_nobody_reads_is_no_traceback(option: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    child = process(option, stdout=write_end, environment=BUFFERED)
    os.close(write_end)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, b"")


@pytest.mark.parametrize("words", [["--version"], ["inspect", "MODEL", "--dry-run"]], ids=str)
def test_a_text_that_a_full_disk_does_not_take_is_an_error(
    tiny: TinyModel, words: list[str]
) -> None:
    """The exit code was 120, by Python's own last try."""
    words = [str(tiny.directory) if word == "MODEL" else word for word in words]
    with open("/dev/full", "w") as file:
        child = process(*words, stdout=file, environment=BUFFERED)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, b"quire: error: No space left on device\n")


@pytest.mark.parametrize("folder", ["/proc/no/kv", "/dev/null/kv", "/etc/passwd"])
def test_a_folder_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], model: list[str], folder: str
) -> None:
    code, out, err = run(capsys, "generate", *model, "--kv-dir", folder, "Hi")
    assert (code, out) == (1, "") and err.count("\n") == 1 and folder in err


def test_kv_that_no_tier_takes_is_told(
    capsys: pytest.CaptureFixture[str], model: list[str], tmp_path: Path
) -> None:
    arguments = ("--kv-dir", str(tmp_path / "kv"), "--max-tokens", "2", "--prompt", "Hi " * 60)
    code, out, err = run(capsys, "generate", *model, *arguments, "--kv-quota", "1")
    assert code == 0 and out and "chunks of KV are not kept: disk" in err
    code, _, err = run(capsys, "generate", *model, *arguments)
    assert code == 0 and "not kept" not in err
