"""`quire chat`: turns, commands, what is reused, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import quire
from program import ROOT, run
from tiny_model import Shape, TinyModel

Say = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def say(
    capsys: pytest.CaptureFixture[str], model: list[str], monkeypatch: pytest.MonkeyPatch
) -> Say:
    """Runs a chat of these lines; its exit code, the lines it printed, standard error."""

    def chat(text: str, *arguments: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code, out, err = run(capsys, "chat", *model, "--max-tokens", "6", *arguments)
        # Not splitlines: answers of a random model have every kind of line end in them.
        return code, out.split("\n")[:-1], err

    return chat


def answer(engine: quire.Engine, *texts: str, system: str | None = None) -> str:
    """The answer to the last of these texts, of user and assistant in turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[index % 2], "content": text})
    text = engine.generate(messages, max_tokens=6).text
    assert text is not None and "\n" not in text  # so that a line of output is an answer
    return text


def test_a_turn_knows_the_turns_before(say: Say, engine: quire.Engine) -> None:
    first = answer(engine, "Hello")
    second = answer(engine, "Hello", first, "Why?")
    assert say("Hello\nWhy?\n") == (0, [first, second], "")
    assert second != answer(engine, "Why?")


def test_the_system_message_comes_first(say: Say, engine: quire.Engine) -> None:
    expected = answer(engine, "Hello", system="Be brief.")
    assert say("Hello\n", "--system", "Be brief.")[1] == [expected]
    assert say("/system Be brief.\nHello\n")[1] == [expected]
    plain = answer(engine, "Hello")
    assert plain != expected
    assert say("/system\nHello\n", "--system", "Be brief.")[1] == [plain]


def test_each_turn_takes_the_one_before_from_the_cache(say: Say, tiny: TinyModel) -> None:
    _, _, err = say("Hello there, how are you?\nWhy?\n", "--stats")
    first, second = err.splitlines()
    assert "cached" not in first
    found = re.search(r"(\d+) prompt tokens, (\d+) of them cached", second)
    assert found is not None
    first_prompt = re.match(r"\((\d+) prompt tokens", first)
    assert first_prompt is not None
    # All of the first prompt and all of its answer but the last token, whose KV nobody needed.
    assert int(first_prompt[1]) <= int(found[2]) < int(found[1])


def test_reset_forgets_all_but_the_system_message(say: Say, engine: quire.Engine) -> None:
    _, lines, err = say("Hello\n/reset\nWhy?\n", "--system", "Be brief.")
    assert lines[1] == answer(engine, "Why?", system="Be brief.") and err == "(forgotten)\n"


def test_undo_forgets_one_turn(say: Say, engine: quire.Engine) -> None:
    first = answer(engine, "Hello")
    _, lines, err = say("/undo\nHello\nWhy?\n/undo\nHow?\n")
    assert lines[2] == answer(engine, "Hello", first, "How?")
    assert err.splitlines() == ["(nothing was said yet)", "(forgotten)"]


def test_stats_can_be_switched(say: Say) -> None:
    _, lines, err = say("Hello\n/stats\nWhy?\n/stats\nHow?\n")
    assert len(lines) == 3 and err.count("prompt tokens") == 1


def test_exit_ends_it_and_help_names_every_command(say: Say) -> None:
    code, lines, err = say("/help\n/exit\nHello\n")
    assert (code, lines) == (0, [])
    for command in ("/help", "/reset", "/undo", "/system", "/stats", "/exit"):
        assert command in err


def test_an_unknown_command_is_no_message(say: Say) -> None:
    code, lines, err = say("/frobnicate now\n")
    assert (code, lines) == (1, []) and "/frobnicate" in err and "/help" in err


def test_two_slashes_say_one(say: Say, engine: quire.Engine) -> None:
    assert say("//exit\n")[1] == [answer(engine, "/exit")]


def test_a_backslash_goes_on_in_the_next_line(say: Say, engine: quire.Engine) -> None:
    assert say("Hello\\\nthere\n")[1] == [answer(engine, "Hello\nthere")]
    assert say("Hello\\")[1] == [answer(engine, "Hello")]  # the end of input ends it as well


def test_blank_lines_are_no_messages(say: Say, engine: quire.Engine) -> None:
    assert say("\n  \nHello\n\n")[1] == [answer(engine, "Hello")]


def test_a_conversation_that_is_too_long_goes_on_after_undo(say: Say, engine: quire.Engine) -> None:
    """The message that did not fit is forgotten, so that the chat is what it was before."""
    code, lines, err = say("Hello\n" + "x" * 2000 + "\nWhy?\n")
    first = answer(engine, "Hello")
    assert code == 1 and lines == [first, answer(engine, "Hello", first, "Why?")]
    assert "positions" in err and "/reset" in err and "Traceback" not in err


def test_without_max_tokens_the_room_is_the_limit(
    capsys: pytest.CaptureFixture[str], model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 positions: no answer may ask for the 1024 tokens that are usual."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nWhy?\n"))
    code, out, err = run(capsys, "chat", *model)
    assert (code, err) == (0, "") and out.count("\n") >= 2


def test_bytes_that_are_no_text_are_one_line(model: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "quire", "chat", *model],
        input=b"\xff\xfe\n",
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "PYTHONUTF8": "1"},
        timeout=60,
    )
    assert result.returncode == 1 and result.stderr.count(b"\n") == 1
    assert b"Traceback" not in result.stderr


def test_a_model_without_template_says_what_it_can_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = TinyModel(tmp_path / "base", chat=False)
    code, _, err = run(capsys, "chat", str(base.directory))
    assert code == 2 and "chat template" in err and "quire generate" in err


# ---- At a terminal


class Terminal:
    """The program with a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._own, child_side = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "quire", *arguments],
            stdin=child_side,
            stdout=child_side,
            stderr=child_side,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "TERM": "dumb"},
            # The signal is ignored where the tests run in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
        os.close(child_side)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Reads until `text` has come since the last call; that and what was before it is
        dropped."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} did not come; there was {self.text!r}"
            if select.select([self._own], [], [], 1)[0]:
                self.text += os.read(self._own, 65536).decode(errors="replace")
        self.text = self.text.split(text, 1)[1]

    def wait_for_more(self) -> None:
        """Until anything has come that was not waited for."""
        while not self.text:
            self.text += os.read(self._own, 65536).decode(errors="replace")

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._own)


@pytest.fixture
def terminal(tmp_path: Path):
    """A chat with answers of up to 50 000 tokens, which nobody waits for."""
    slow = TinyModel(tmp_path / "slow", Shape(positions=60000))
    terminal = Terminal(
        "chat", str(slow.directory), "--ignore-eos", "--max-tokens", "50000", "--stats"
    )
    yield terminal
    terminal.close()


def test_ctrl_c_ends_the_answer_and_not_the_chat(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("Hello\n")
    terminal.wait_for("\n")  # the echo
    terminal.wait_for_more()
    terminal.interrupt()
    terminal.wait_for("(interrupted)")
    terminal.wait_for("> ")
    terminal.type("/undo\n")
    terminal.wait_for("(forgotten)")
    terminal.wait_for("> ")
    terminal.interrupt()
    terminal.wait_for("/exit ends the chat")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.child.wait(timeout=60) == 0
