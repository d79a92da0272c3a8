"""Redis URLs: what is in one, and a server that lets nobody in without a password."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from program import run
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
        ("redis://u:hidden@h:1/?prefix=x&ttl=3", "the parameter 'ttl'"),
    ],
)
def test_says_what_is_wrong_without_the_password(text: str, message: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=message) as raised:
        redis_url.parse(text)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("name", ["redis_username", "redis_password", "redis_prefix"])
def test_nothing_is_given_twice(name: str) -> None:
    with pytest.raises(quire.BadArgumentError, match=f"{name} is given twice"):
        quire.ChunkStore(redis="redis://u:p@h:1/?prefix=x", **{name: "y"})  # type: ignore[arg-type]


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
        with subprocess.Popen([program, config], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            log = ""
            while "ready to accept connections" not in log:
                line = server.stdout.readline()
                assert line, log
                log += line
            yield path
            server.kill()


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
