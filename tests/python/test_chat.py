"""`quire chat`: turns, commands, what is reused, and how it ends."""

from __future__ import annotations

import io
import json
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
        # Not splitlines: answers of a random model have every kind of line end in them. That an
        # answer is cut is told of nearly each one, and has a test of its own.
        notes = [line for line in err.split("\n") if not line.startswith("(cut after ")]
        return code, out.split("\n")[:-1], "\n".join(notes)

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
    for command in ("help", "reset", "undo", "regen", "system", "read", "save", "load", "set"):
        assert f"/{command}" in err
    assert "/stats" in err and "/exit" in err


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
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code, out, err = run(capsys, "chat", *model, "--ignore-eos", "--stats")
    assert code == 0 and err.startswith("(cut after ") and "the model has 256 positions" in err
    found = re.search(r"\((\d+) prompt tokens.*?(\d+) new tokens", err)
    assert found is not None and int(found[1]) + int(found[2]) == 256


def test_what_max_tokens_cut_is_told(
    capsys: pytest.CaptureFixture[str], model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    _, _, err = run(capsys, "chat", *model, "--ignore-eos", "--max-tokens", "6")
    assert err == "(cut after 6 tokens: --max-tokens)\n"


# ---- Messages of several lines


def test_quotes_hold_a_message_of_several_lines(say: Say, engine: quire.Engine) -> None:
    expected = [answer(engine, "One\n\n/exit")]
    assert say('"""One\n\n/exit"""\n')[1] == expected
    assert say('"""\nOne\n\n/exit\n"""\n')[1] == expected
    assert say('"""\nOne\n\n/exit\n')[1] == expected  # the end of input ends it as well
    assert say('"""/exit"""\n')[1] == [answer(engine, "/exit")]
    assert say('""""""\n')[1] == []


def test_a_file_is_a_message(say: Say, engine: quire.Engine, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeff/One\nTwo\n".encode())
    assert say(f"/read {file}\n") == (0, [answer(engine, "/One\nTwo\n")], "")
    file.write_bytes(b"ab\xff")
    code, lines, err = say(f"/read {file}\n/read\n/read {tmp_path}/none\n/read {tmp_path}\n")
    assert (code, lines, err.count("\n")) == (1, [], 4)
    assert "text.txt: is not UTF-8: invalid start byte at byte 2" in err


# ---- Conversations in files


def test_a_saved_conversation_goes_on(say: Say, engine: quire.Engine, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    first = answer(engine, "Hello", system="Be brief.")
    say(f"Hello\n/save {file}\n", "--system", "Be brief.", "--top-k", "3", "--cache-salt", "x")
    state = json.loads(file.read_text())
    assert state == {
        "format": "quire-chat",
        "version": 1,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first},
        ],
        "options": {"max_tokens": 6, "top_k": 3},
    }
    code, lines, err = say(f"Something else\n/load {file}\nWhy?\n/save {file}\n")
    second = answer(engine, "Hello", first, "Why?", system="Be brief.")
    assert code == 0 and lines[1:] == [first, second]
    assert len(json.loads(file.read_text())["messages"]) == 5 and "(loaded 2 messages" in err


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"format": "quire-chat", "version": 2, "messages": [], "options": {}}',
        b'{"format": "quire-chat", "version": 1}',
        b'{"format": "quire-chat", "version": 1, "messages": [1], "options": {}}',
        b'{"format": "quire-chat", "version": 1, "messages": [], "options": {"stop": 5}}',
        b'{"format": "quire-chat", "version": 1, "messages": [], "options": {"n": 2}}',
        b'{"format": "quire-chat", "version": 1, "messages": [], "options": {"temperature": -1}}',
        b'{"format": "quire-chat", "version": 1, "messages": [], "options": {"top_k": 1e999}}',
    ],
)
def test_what_is_no_conversation_changes_nothing(
    say: Say, engine: quire.Engine, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    first = answer(engine, "Hello")
    code, lines, err = say(f"Hello\n/load {file}\nWhy?\n")
    assert code == 1 and lines == [first, answer(engine, "Hello", first, "Why?")]
    assert err.count("\n") == 1 and "chat.json: " in err


def test_no_other_file_is_written_over(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("important")
    code, _, err = say(
        f"/save {file}\n/save\n/save {tmp_path}/none/chat.json\n"
        f"/save {tmp_path}/a\0b\n/load a\0b\n/read a\0b\n"
    )
    assert code == 1 and err.count("\n") == 6 and file.read_text() == "important"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["thesis.txt"]


def test_a_file_that_is_named_like_a_part_is_kept(say: Say, tmp_path: Path) -> None:
    part = tmp_path / "chat.json.part"
    part.write_text("important")
    code, _, err = say(f"/save {tmp_path}/chat.json\n")
    assert code == 1 and "chat.json.part: File exists" in err
    assert part.read_text() == "important" and [*tmp_path.glob("*.json")] == []


# ---- Options


def test_options_are_set_and_given_back(say: Say, engine: quire.Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    drawn = engine.generate(messages, max_tokens=6, temperature=2.0, seed=5).text
    _, lines, err = say(
        "/set temperature 2\n/set seed 5\nHello\n/undo\n/set greedy true\nHello\n/undo\n"
        "/set greedy default\n/set --max-tokens=2\nHello\n/set\n"
    )
    assert lines[:2] == [drawn, answer(engine, "Hello")]
    assert lines[2] == engine.generate(messages, max_tokens=2).text
    assert err.splitlines()[-1] == "(set here: max_tokens 2, seed 5; the model's own: greedy)"


def test_what_cannot_be_set(say: Say) -> None:
    values = ("temperature -1", "temperature=hot", "seed -1", "top_p 0", "n 2", "greedy yes")
    values += ("max_tokens 0", "sinks 3", "template_arg x=1", "template_arg x", "foo 1", "= 1")
    values += ("seed " + "9" * 5000,)
    code, lines, err = say("".join(f"/set {value}\n" for value in values))
    assert (code, lines) == (1, []) and err.count("\n") == len(values), err


def test_an_answer_is_drawn_again(say: Say, engine: quire.Engine) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    # Nobody knows what is drawn with another seed, so an answer ends before a line end.
    drawn = engine.generate(messages, max_tokens=6, temperature=2.0, seed=5, stop=["\n"]).text
    options = ("--temperature", "2", "--seed", "5", "--stop", "\n", "--stats")
    _, lines, err = say("/regen\nHello\n/regen\nWhy?\n", *options)
    assert "(nothing was said yet)" in err and lines[0] == drawn and len(lines) == 3
    # The question stands there once: the prompt is as long as before.
    lengths = [int(n) for n in re.findall(r"\((\d+) prompt tokens", err)]
    assert lengths[0] == lengths[1] < lengths[2]
    _, lines, err = say("Hello\n/regen\n")
    assert lines == [answer(engine, "Hello")] * 2 and "greedy" in err


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

    def __init__(self, *arguments: str, term: str = "dumb") -> None:
        self._own, child_side = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "quire", *arguments],
            stdin=child_side,
            stdout=child_side,
            stderr=child_side,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "TERM": term},
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

    def interrupt_until(self, text: str) -> None:
        """Python loses a signal between the prompt and its wait for a key: then another one."""
        for _ in range(20):
            self.interrupt()
            try:
                self.wait_for(text, seconds=3)
                return
            except AssertionError:
                continue
        raise AssertionError(f"{text!r} did not come; there was {self.text!r}")

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
    terminal.interrupt_until("/exit ends the chat")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.child.wait(timeout=60) == 0


def test_a_pasted_text_is_one_message(tiny: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    terminal = Terminal("chat", str(tiny.directory), "--max-tokens", "3", "--stats", term="xterm")
    try:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~One\nTwo\n/exit\nFour\x1b[201~")
        terminal.wait_for("Four")
        terminal.type("\r")
        terminal.wait_for(" prompt tokens")
        terminal.wait_for("> ")
        terminal.type(f"/save {file}\r")
        terminal.wait_for("(saved 2 messages")
        state = json.loads(file.read_text())
        assert state["messages"][0]["content"] == "One\nTwo\n/exit\nFour"
        terminal.type("/exit\r")
        assert terminal.child.wait(timeout=60) == 0
    finally:
        terminal.close()


def test_a_long_message_shows_how_far_it_is(tmp_path: Path) -> None:
    slow = TinyModel(tmp_path / "slow", Shape(positions=4000))
    (tmp_path / "long.txt").write_text("x" * 2000)
    terminal = Terminal("chat", str(slow.directory), "--prefill-chunk", "8", "--max-tokens", "3")
    try:
        terminal.wait_for("> ")
        terminal.type(f"/read {tmp_path}/long.txt\n")
        terminal.wait_for(" prompt tokens")
        terminal.wait_for("(cut after 3 tokens")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.child.wait(timeout=60) == 0
    finally:
        terminal.close()


def test_bytes_that_are_no_text_end_no_chat_at_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    os.write(terminal._own, b"\xff\n")
    terminal.wait_for("quire: ")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.child.wait(timeout=60) == 0


def test_any_byte_of_a_terminal_without_a_locale_ends_no_chat(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the locale C Python hands on what is no UTF-8; it was written by /save, which failed."""
    monkeypatch.setenv("LC_ALL", "C")
    terminal = Terminal("chat", str(tiny.directory), "--max-tokens", "3")
    try:
        terminal.wait_for("> ")
        os.write(terminal._own, b"/system \xff\n")
        terminal.wait_for("quire: the message is not UTF-8")
        terminal.wait_for("> ")
        terminal.type(f"/save {tmp_path}/chat.json\n")
        terminal.wait_for("(saved 0 messages")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.child.wait(timeout=60) == 0
    finally:
        terminal.close()
