"""The process that tries grammars for `quire.serve.grammar_probe`, which may end it at any time.

Messages come on standard input, each as its length in 8 bytes and a pickled tuple:
("options", special_texts, what GrammarCompiler takes) once for each special_texts, and
("try", special_texts, kind, text, seconds of computing, bytes of memory). Each "try" is answered on
standard output by a length and a text: "" or an error as `quire.errors.from_text` takes it. A bound
that is passed ends the process by a signal, a defect by its exit code.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
import threading
import traceback
from typing import Any, BinaryIO

from quire import errors
from quire.grammar import Grammar, GrammarCompiler

__all__ = ["LENGTH", "main"]

LENGTH = struct.Struct("<Q")
_NICE = 5  # the steps of the engine go first
_CACHE_BYTES = 1 << 20
_TOKENS = 200  # of each grammar: a token that takes long is found here, and not by the engine


def main() -> None:
    """Until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what XGrammar prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # of a whole service; the server ends this process
    compilers: dict[tuple[str, ...], GrammarCompiler | errors.QuireError] = {}
    while (message := _read(sys.stdin.buffer)) is not None:
        if message[0] == "options":
            _, special_texts, options = message
            compilers[special_texts] = _compiler({**options, "cache_bytes": _CACHE_BYTES})
            continue
        _, special_texts, kind, text, seconds, bytes_max = message
        compiler = compilers[special_texts]
        if isinstance(compiler, GrammarCompiler):
            answer = _tried(compiler, Grammar(kind, text), seconds, bytes_max).encode()
        else:
            answer = f"{compiler.code}: {compiler}".encode()
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _compiler(options: dict[str, Any]) -> GrammarCompiler | errors.QuireError:
    try:
        return GrammarCompiler(options)
    except errors.QuireError as error:
        return error


def _read(file: BinaryIO) -> Any:
    """None at the end."""
    head = file.read(LENGTH.size)
    return pickle.loads(file.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def _tried(compiler: GrammarCompiler, grammar: Grammar, seconds: float, bytes_max: int) -> str:
    answer = ""

    def run() -> None:  # in a thread, as in the server: a stack of the same size
        nonlocal answer
        try:
            compiler.try_tokens(compiler.compile(grammar), _TOKENS)
        except (MemoryError, errors.OutOfMemoryError):
            os.abort()
        except errors.QuireError as error:
            answer = f"{error.code}: {error}"
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    _bound_memory(bytes_max)
    thread = threading.Thread(target=run)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of all threads together; it kills
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _bound_memory(more: int) -> None:
    """What the process has now, and `more`."""
    with open("/proc/self/statm") as file:
        bytes_now = int(file.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bytes_max = bytes_now + more
    if hard != resource.RLIM_INFINITY:
        bytes_max = min(bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_max, hard))
