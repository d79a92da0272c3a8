"""The server under programs that others wrote to hurt servers: slowhttptest and wrk (R8). An
ordinary run is small; tools/soak, which installs them, has full sizes and the server's own limits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import DEADLINE, Server, running
from test_serve_soak import SOAK, status_of
from tiny_model import TinyModel

Report = Callable[[str, Any], None]
CONNECTIONS = 1_000 if SOAK else 40
ASKED = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
LIMITS = {"connections_per_address": 4 * CONNECTIONS}
# So short that an ordinary run is over in seconds.
NEAR = {"header_seconds": 1, "body_grace_seconds": 3, "slow_client_seconds": 1}


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(program) is None,
        reason=f"{program} is not installed (Debian has a package; tools/soak installs it)",
    )


@contextlib.contextmanager
def attacked(model: TinyModel, *options: str) -> Iterator[Server]:
    """A server that is the same before and after what is done to it. Its memory: R8's bound."""
    limits = LIMITS | ({} if SOAK else NEAR)
    words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value}")]
    options = ("--no-prefix-cache", "--page-size", "16", *words, *options)
    with running(model.directory, *options) as server:
        if "--api-keys" in options:
            server.key = "bob-key-0123456789"
        server.post("/v1/completions", ASKED)
        before = status_of(server, "VmRSS")
        yield server
        assert server.request("GET", "/health")[0] == 200
        still = ('quire:kv_pages{state="used"}', "quire:num_requests_running")
        found = server.wait_metrics(
            lambda m: all(m[name] == 0 for name in still) and m["quire:http_connections"] == 1
        )
        assert not [name for name in found if 'status="500"' in name]
        grown = status_of(server, "VmHWM") - before
        assert grown <= (64 << 20) + CONNECTIONS * (16 << 10), grown
        assert server.stop() == 0


def answers_meanwhile(server: Server, command: list[str]) -> str:
    """What a program prints. While it runs another client asks, and gets what it always gets."""
    expected = server.post("/v1/completions", ASKED)["choices"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            subprocess.run, command, capture_output=True, text=True, timeout=4 * DEADLINE
        )
        while not done.done():
            assert server.post("/v1/completions", ASKED)["choices"] == expected
    found = done.result()
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    return str(found.stdout)


# ---- slowhttptest

# What makes it slow, and the limits that may end its connections.
SLOW = {
    "headers": (["-H", "-i", "1", "-x", "10"], ("header_seconds", "header_bytes")),
    "body": (
        ["-B", "-i", "1", "-s", "4096", "-x", "2", "-f", "application/json"],
        ("body_seconds",),
    ),
    "read": (["-X", "-w", "16", "-y", "32", "-n", "1", "-z", "8", "-k", "10"], ("slow_client",)),
}


@needs("slowhttptest")
@pytest.mark.parametrize("kind", SLOW)
def test_slowhttptest(tiny: TinyModel, kind: str, record_property: Report) -> None:
    how, limits = SLOW[kind]
    path: str = "/v1/completions"
    options: tuple[str, ...] = ()
    if kind == "read":  # of more than the server's buffers take
        path, options = "/metrics", ("--limit", "write_buffer_bytes=4K")
    seconds = "60" if SOAK else "6"
    with attacked(tiny, *options) as server:
        command = ["slowhttptest", *how, "-c", str(CONNECTIONS), "-r", "200", "-l", seconds]
        said = answers_meanwhile(server, [*command, "-p", "3", "-u", server.url + path])
        counts = {name: last_count(said, name) for name in ("closed", "error", "connected")}
        assert "YES" in said.rsplit("service available:", 1)[1].splitlines()[0], said[-2000:]
        found = server.metrics()
        ended = sum(found.get(f'quire:http_limit_total{{limit="{name}"}}', 0) for name in limits)
        assert counts["error"] == 0 and ended >= CONNECTIONS * 0.9, (counts, ended)
    record_property("connections", CONNECTIONS)


def last_count(said: str, name: str) -> int:
    """Of the last report of slowhttptest, which colours its words."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", said)
    return int(re.findall(rf"^{name}:\s+(\d+)", plain, re.MULTILINE)[-1])


# ---- wrk

SCRIPT = """\
local threads = {}
function setup(thread) table.insert(threads, thread) end
function init(args)
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  wrk.headers["authorization"] = "Bearer ann-key-0123456789"
  wrk.body = args[1]
  expected, right, refused, wrong = args[2], 0, 0, 0
end
function response(status, headers, body)
  if status == 200 and body:find(expected, 1, true) then right = right + 1
  elseif status == 429 or status == 503 then refused = refused + 1
  else wrong = wrong + 1 end
end
function done(summary, latency, requests)
  local sums = {right = 0, refused = 0, wrong = 0}
  for _, thread in ipairs(threads) do
    for name, _ in pairs(sums) do sums[name] = sums[name] + thread:get(name) end
  end
  local errors = summary.errors
  print(string.format('COUNTS {"right": %d, "refused": %d, "wrong": %d, "broken": %d}', sums.right,
    sums.refused, sums.wrong, errors.connect + errors.read + errors.write + errors.timeout))
end
"""


@needs("wrk")
def test_wrk(
    tiny: TinyModel, tmp_path: Path, keys_file: Path, record_property: Report
) -> None:
    """Hundreds of connections of one key that ask without a pause: each gets the right answer or
    is refused, and another key has its own all the time."""
    script = tmp_path / "ask.lua"
    script.write_text(SCRIPT)
    connections = 400 if SOAK else 100
    with attacked(tiny, "--api-keys", str(keys_file)) as server:
        text = server.post("/v1/completions", ASKED)["choices"][0]["text"]
        expected = f'"text":{json.dumps(text, ensure_ascii=False)}'
        command = ["wrk", "-t", "1", "-c", str(connections), "-d", "30s" if SOAK else "3s"]
        command += ["--timeout", "30s", "-s", str(script), server.url + "/v1/completions", "--"]
        said = answers_meanwhile(server, [*command, json.dumps(ASKED), expected])
        counts = json.loads(said.rsplit("COUNTS ", 1)[1].splitlines()[0])
        assert counts["wrong"] == counts["broken"] == 0, counts
        assert counts["right"] > 0 and counts["refused"] > 0, counts
    record_property("connections", connections)
