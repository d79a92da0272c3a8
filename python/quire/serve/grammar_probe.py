"""Grammars of strangers are tried in a process of their own before the server compiles them.

XGrammar's time is cubic in optional parts that follow each other, and worse in others; nothing
stops it within a process. The process here has a bound of computing and one of memory for each
grammar, and is killed where one is passed. What it compiled within them costs the server the same.
"""

from __future__ import annotations

import pickle
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from quire import errors
from quire.engine import Engine
from quire.grammar import Grammar, compiler_options
from quire.serve.grammar_child import LENGTH

__all__ = ["GrammarProbe", "TooCostlyError"]

# The child's modules are those of this process, wherever it runs.
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from quire.serve.grammar_child import main; main()"
_ANSWER_BYTES_MAX = 1 << 20


class TooCostlyError(errors.BadArgumentError):
    """A grammar that was given up."""

    option = "grammar"


class GrammarProbe:
    """Tries grammars for one engine, for one thread; `close` may come from any.

    Args:
        seconds: of computing for one grammar; memory_bytes: that it may take.
        wait_seconds: in which one must be done whatever the machine does meanwhile.
    """

    def __init__(
        self, engine: Engine, seconds: float, memory_bytes: int, wait_seconds: float
    ) -> None:
        self.starts = 0  # of the process
        self._engine = engine
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._wait_seconds = wait_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._has: set[tuple[str, ...]] = set()  # the options that the child has
        self._lock = threading.Lock()  # of `_child` and `_closed`
        self._closed = False

    def check(self, grammar: Grammar, special_texts: tuple[str, ...]) -> None:
        """Returns if the grammar compiles within the bounds. TooCostlyError: it does not; else what
        :meth:`Engine.compile_grammar` raises."""
        child = self._running()
        try:
            if special_texts not in self._has:
                _send(child, ("options", special_texts, self._options(special_texts)))
                self._has.add(special_texts)
            bounds = (self._seconds, self._memory_bytes)
            _send(child, ("try", special_texts, grammar.kind, grammar.text, *bounds))
            answer = self._answer(child)
        except TimeoutError:
            self._end()
            raise _too_costly(f"{self._wait_seconds:g} s") from None
        except (OSError, EOFError):
            raise self._ended() from None
        if not answer:
            return
        error = errors.about(errors.from_text(answer), "grammar")
        raise TooCostlyError(str(error)) if isinstance(error, errors.TooLargeError) else error

    def close(self) -> None:
        """Ends the process, whatever it does."""
        with self._lock:
            self._closed = True
        self._end()

    def _options(self, special_texts: tuple[str, ...]) -> dict[str, Any]:
        info = self._engine.info
        tokenizer = self._engine.tokenizer
        return compiler_options(tokenizer, info.vocab_size, info.eos_token_ids, special_texts)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise errors.ClosedError("the server ends")
            if self._child is not None and self._child.poll() is not None:
                self._child = None  # somebody else ended it
            if self._child is None:
                command = [sys.executable, "-I", "-c", _CODE, *sys.path]
                pipe = subprocess.PIPE
                self._child = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
                )
                self._has = set()
                self.starts += 1
            return self._child

    def _answer(self, child: subprocess.Popen[bytes]) -> str:
        """TimeoutError, EOFError: there is none."""
        assert child.stdout is not None
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN)
        if not poll.poll(self._wait_seconds * 1000):
            raise TimeoutError
        length = LENGTH.unpack(_read(child, LENGTH.size))[0]
        if length > _ANSWER_BYTES_MAX:
            raise EOFError
        return _read(child, length).decode(errors="replace")

    def _ended(self) -> errors.QuireError:
        """Why the process has ended; the next grammar gets another one."""
        code = self._end()
        if self._closed:
            return errors.ClosedError("the server ends")
        if code == -signal.SIGPROF:
            return _too_costly(f"{self._seconds:g} s of computing")
        if code is not None and code < 0:
            return _too_costly(f"{self._memory_bytes >> 20} MiB")
        return errors.InternalError(f"the process that tries grammars ended with exit code {code}")

    def _end(self) -> int | None:
        """Its exit code; None where none ran."""
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return None
        with child:  # which waits
            child.kill()
        return child.returncode


def _too_costly(what: str) -> TooCostlyError:
    return TooCostlyError(
        f"grammar: it is too costly: to compile and to try it takes more than {what}; give it "
        "fewer optional parts, counted repetitions and choices that follow each other"
    )


def _read(child: subprocess.Popen[bytes], length: int) -> bytes:
    """EOFError: the process has ended."""
    assert child.stdout is not None
    found = b""
    while len(found) < length:
        part = child.stdout.read(length - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _send(child: subprocess.Popen[bytes], message: object) -> None:
    assert child.stdin is not None
    data = pickle.dumps(message)
    rest = memoryview(LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[child.stdin.write(rest) :]
