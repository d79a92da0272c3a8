"""A client in a process of its own: its times have nothing of the clients that a test runs beside it
in threads. Asks HOST PORT for a first token, again and again; ends after COUNT of them,
or, where COUNT is 0, at the end of its input, and prints the seconds of each."""

from __future__ import annotations

import http.client
import select
import subprocess
import sys
import time
from types import TracebackType

BODY = b'{"prompt": [5, 6, 7], "max_tokens": 1}'


def first_token_seconds(host: str, port: int) -> float:
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request(
        "POST", "/v1/completions", BODY, {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    content = answer.read()
    seconds = time.perf_counter() - begin
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {content!r}")
    return seconds


class HonestClient:
    """It runs from the beginning of the context to `end`; count: first tokens, 0: until `end`."""

    def __init__(self, host: str, port: int, count: int = 0) -> None:
        command = [sys.executable, __file__, host, str(port), str(count)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> HonestClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> list[float]:
        """The seconds of each first token."""
        printed, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0
        return [float(line) for line in printed.split()]


def main(host: str, port: str, count: str) -> None:
    seconds: list[float] = []
    most = int(count)
    while len(seconds) < most if most else not select.select([sys.stdin], [], [], 0)[0]:
        seconds.append(first_token_seconds(host, int(port)))
    print("\n".join(map(str, seconds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
