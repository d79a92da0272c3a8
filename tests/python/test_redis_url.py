"""Redis URLs: what is in one, and a server that lets nobody in without a password."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from program import Certificates, free_port, run
from quire import redis_url
from quire.redis_url import RedisPlace
from tiny_model import Shape, TinyModel

PASSWORD = "s3cr@t/:%"
ENCODED = "s3cr%40t%2F%3A%25"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", RedisPlace("")),
        ("h:1,g:2", RedisPlace("h:1,g:2")),
        ("unix:/run/r@1?.sock", RedisPlace("unix:/run/r@1?.sock")),
        ("redis://h:1", RedisPlace("h:1")),
        ("redis://h:1,g:2/", RedisPlace("h:1,g:2")),
        ("redis://[::1]:6379/?prefix=", RedisPlace("[::1]:6379")),
        ("redis://:pw@h:1", RedisPlace("h:1", "", "pw")),
        (f"redis://al%20ice:{ENCODED}@h:1/", RedisPlace("h:1", "al ice", PASSWORD)),
        ("redis://a:b:c@h:1?prefix=x%2Fy:", RedisPlace("h:1", "a", "b:c", "x/y:")),
        ("redis://unix:/run/r@1.sock?prefix=p", RedisPlace("unix:/run/r@1.sock", prefix="p")),
        ("redis://a:b@unix:/run/r.sock", RedisPlace("unix:/run/r.sock", "a", "b")),
        ("redis://a:b@c@unix:/run/r@1", RedisPlace("unix:/run/r@1", "a", "b@c")),
        ("redis://a:b@c@h:1", RedisPlace("h:1", "a", "b@c")),
        ("rediss://h:1", RedisPlace("h:1", tls=True)),
        (
            "rediss://a:b@h:1/?ca=%2Fetc/ca.pem&cert=c.pem&key=k.pem&name=redis.example&prefix=x",
            RedisPlace(
                "h:1", "a", "b", "x", True, "/etc/ca.pem", "c.pem", "k.pem", "redis.example"
            ),
        ),
        ("rediss://h:1/?verify=no", RedisPlace("h:1", tls=True, tls_verify=False)),
        ("rediss://h:1/?verify=yes", RedisPlace("h:1", tls=True)),
    ],
)
def test_parses(text: str, place: RedisPlace) -> None:
    assert redis_url.parse(text) == place
    assert not place.password or place.password not in repr(place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis://", "names no server"),
        ("redis://?prefix=x", "names no server"),
        ("redis://hidden@h:1", "a user and no password"),
        ("redis://u:hidden@h:1/3", "ends with /3"),
        ("redis://u:pass/hidden@h:1", 'write "/" as %2F'),
        ("redis://u:pass?hidden@h:1", r'write "\?" as %3F'),
        ("redis://u:hidden@h:1/?prefix=x&ttl=3", "the parameter 'ttl'"),
        ("redis://u:hidden@h:1/?ca=x", "the parameter 'ca'"),
        ("rediss://u:hidden@h:1/?verify=maybe", "verify='maybe'"),
        ("rediss://", "names no server"),
    ],
)
def test_says_what_is_wrong_without_the_password(text: str, message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message) as raised:
        redis_url.parse(text)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["redis_username", "redis_password", "redis_prefix", "redis_tls_ca_file"]
)
def test_nothing_is_given_twice(name: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=f"{name} is given twice"):
        quire.ChunkStore(redis="rediss://u:p@h:1/?prefix=x&ca=f", **{name: "y"})  # type: ignore[arg-type]


@contextlib.contextmanager
def started(program: str, config: Path) -> Iterator[None]:
    """redis-server, from when it accepts connections until the end of the block."""
    with subprocess.Popen([program, config], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            log = ""
            while "ready to accept connections" not in log.lower():
                line = server.stdout.readline()
                assert line, log
                log += line
            yield
        finally:
            server.kill()


@pytest.fixture
def socket() -> Iterator[Path]:
    """Of a server with one user."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as folder:  # paths of sockets are short
        path = Path(folder) / "redis.sock"
        config = Path(folder) / "redis.conf"
        config.write_text(
            f'port 0\nunixsocket {path}\nsave ""\ndir {folder}\n'
            f"user default off\nuser alice on >{PASSWORD} ~* &* +@all\n",
            encoding="utf-8",
        )
        with started(program, config):
            yield path


def test_a_server_with_users(
    tmp_path: Path,
    socket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    tiny = TinyModel(tmp_path / "model", Shape(positions=2048))
    prompt = [3 + i % 90 for i in range(1100)]
    url = f"redis://alice:{ENCODED}@unix:{socket}"

    def cached(place: str) -> int:
        with quire.Engine(
            tiny.directory,
            dtype="float32",
            threads=1,
            kv_bytes=8 << 20,
            kv_load_always=True,
            kv_load_timeout=60,
            kv_redis=place,
        ) as engine:
            engine.wait_for_store()
            usage = engine.generate(prompt, max_tokens=4).usage
            return usage.redis_tokens

    assert cached(f"{url}?prefix=one:") == 0
    assert cached(f"{url}?prefix=one:") == len(prompt) - 1
    assert cached(f"{url}?prefix=two:") == 0
    code, out, _ = run(capsys, "store", "ls", f"{url}?prefix=one:")
    assert code == 0
    assert len(out.splitlines()) == 2
    code, out, _ = run(capsys, "store", "ls", f"{url}?prefix=three:")
    assert (code, out) == (0, "")
    for wrong in (f"redis://alice:hidden@unix:{socket}", f"redis://unix:{socket}"):
        code, out, err = run(capsys, "store", "ls", wrong)
        assert code == 1
        assert out == ""
        assert "hidden" not in err


@pytest.fixture
def tls_server() -> Iterator[tuple[int, Path]]:
    """Port of a server for TLS alone, and the file of its authority."""
    redis = shutil.which("redis-server")
    if redis is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates = Certificates(folder)
        port = free_port()
        config = folder / "redis.conf"
        config.write_text(
            f'port 0\ntls-port {port}\nbind 127.0.0.1\nsave ""\ndir {folder}\n'
            f"tls-cert-file {folder}/server.pem\ntls-key-file {folder}/server.key\n"
            f"tls-ca-cert-file {folder}/ca.pem\ntls-auth-clients no\n",
            encoding="utf-8",
        )
        with started(redis, config):
            yield port, certificates.ca


def test_a_server_with_tls(
    tls_server: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, authority = tls_server
    place = f"rediss://127.0.0.1:{port}/?ca={authority}"
    code, out, _ = run(capsys, "store", "ls", place)
    assert (code, out) == (0, "")
    for wrong, why in (
        (f"rediss://127.0.0.1:{port}/", "certificate is refused"),
        (f"{place}&name=redis.example", "not redis.example's"),
        (f"redis://127.0.0.1:{port}", "Redis"),
        (f"rediss://127.0.0.1:{port}/?ca={tmp_path}/none.pem", "tls_ca_file"),
    ):
        code, out, err = run(capsys, "store", "ls", wrong)
        assert (code, out) == (1, "")
        assert why in err
    code, out, _ = run(capsys, "store", "ls", f"rediss://127.0.0.1:{port}/?verify=no")
    assert (code, out) == (0, "")
    with quire.ChunkStore(
        redis=f"127.0.0.1:{port}", redis_tls=True, redis_tls_ca_file=authority
    ) as store:
        assert store.list("redis") == []


def test_chunks_of_a_server(
    tmp_path: Path,
    socket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    tiny = TinyModel(tmp_path / "model", Shape(positions=2048))
    prompt = [3 + i % 90 for i in range(1100)]
    url = f"redis://alice:{ENCODED}@unix:{socket}"
    folder = str(tmp_path / "kv")
    for place in ({"kv_redis": url}, {"kv_dir": folder}):
        with quire.Engine(
            tiny.directory, dtype="float32", threads=1, kv_bytes=8 << 20, **place
        ) as engine:
            engine.wait_for_store()
            engine.generate(prompt if "kv_redis" in place else prompt[:40], max_tokens=1)
            engine.flush_store()
    of = ("--prompt-ids", ",".join(str(id) for id in prompt))
    model = ("--model", str(tiny.directory))

    def store(*words: str) -> dict[str, object]:
        code, out, err = run(capsys, "store", *words, "--json")
        assert code == 0, err
        found: dict[str, object] = json.loads(out)
        return found

    came = store("prefetch", folder, *of, *model, "--kv-redis", url)
    assert came == {"tokens": 1100, "prompt_tokens": 1100, "miss": None}
    assert store("stats", folder)["tokens"] == 1140
    lines = run(capsys, "store", "ls", url, "--json")[1].splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    code, _, err = run(capsys, "store", "pin", url, *of)
    assert code == 2 and "no effect on Redis" in err
    assert store("ttl", url, "3600", *of)["chunks"] == 2
    assert store("rm", url, keys[0]) == {"removed": 1}
    assert store("ttl", url, "0.001", keys[1])["chunks"] == 1
    deadline = time.monotonic() + 120
    while run(capsys, "store", "ls", url)[1] != "":  # a millisecond may not be over yet
        assert time.monotonic() < deadline
    assert run(capsys, "store", "rm", url, *of)[0] == 1
    assert store("rm", url, "--all") == {"removed": 0}
