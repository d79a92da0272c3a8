"""packaging: what the unit starts runs and notifies, and what its head says installs it; the steps
of the Dockerfile that need no image. Its wheel is that of test_wheel.py. Whether the image is built
and whether systemd starts the unit is not tried here: packaging/README.md."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from program import ROOT, process, run
from quire import _ffi
from quire.serve.notify import notify
from server_process import DEADLINE, Server, head, read_answer
from tiny_model import TinyModel

PACKAGING = ROOT / "packaging"
UNIT = (PACKAGING / "quire.service").read_text()
DOCKERFILE = (PACKAGING / "Dockerfile").read_text().replace("\\\n", " ")


def test_what_the_unit_starts_notifies(tiny: TinyModel, tmp_path: Path) -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, *arguments = shlex.split(command)
    assert program == "/opt/quire/bin/quire" and arguments[:2] == ["serve", "--config"]
    options = yaml.safe_load((PACKAGING / "serve.yaml").read_text())
    options |= {"model": str(tiny.directory), "port": 0, "kv-dir": str(tmp_path / "kv")}
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump(options))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE)
        variables = [f"NOTIFY_SOCKET={tmp_path / 'notify'}", f"QUIRE_HOME={tmp_path}"]
        server = process(*arguments[:2], str(config), environment=variables)
        try:
            assert manager.recv(100) == b"READY=1"
            ready = server.stdout.readline().decode()
            port = int(ready.rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as peer:
                more = ("connection: close",)
                peer.sendall(head("/health", None, *more, method="GET"))
                assert read_answer(peer)[0] == 200
            server.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait(DEADLINE) == 0
        finally:
            server.kill()
            server.wait(DEADLINE)


def test_the_example_has_options_that_there_are(
    capsys: pytest.CaptureFixture[str], tiny: TinyModel
) -> None:
    example = str(PACKAGING / "serve.yaml")
    code, out, err = run(capsys, "serve", str(tiny.directory), "--config", example, "--dry-run")
    assert code == 0 and "/var/lib/quire/kv" in out, err


def test_the_steps_at_the_head_of_the_unit_install_it(tmp_path: Path) -> None:
    """Those that need neither a network nor systemd, below a folder that stands for the root."""
    steps = re.findall(r"^#   (install .*?)(?: +#.*)?$", UNIT, re.MULTILINE)
    for step in steps:
        *words, target = shlex.split(step)
        subprocess.run([*words, f"{tmp_path}{target}"], cwd=PACKAGING, check=True)
    found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    (config,) = re.findall(r"^ExecStart=.* --config /(.*)$", UNIT, re.MULTILINE)
    assert found == {Path(config), Path("etc/systemd/system/quire.service")}
    assert {(tmp_path / path).stat().st_mode & 0o777 for path in found} == {0o644}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "quire.service"
    unit.write_text(UNIT.replace("/opt/quire/bin/quire", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "quire.service" not in done.stderr, done.stderr


def test_notifying_without_a_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    with pytest.raises(OSError):
        notify("READY=1")


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # the kernel chooses a name
        name = manager.getsockname()
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name[1:].decode())
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


# ---- The Dockerfile


def test_the_image_has_what_the_build_asks_for() -> None:
    """The packages of the build are those that ./run installs."""
    setup = (ROOT / "tools" / "setup.sh").read_text()
    needed = re.search(r"missing_run_packages\(\) \{(.*?)\n\}", setup, re.DOTALL)
    assert needed is not None
    wanted = set(re.findall(r"\b(?:lib[a-z0-9]+-dev|nlohmann-json3-dev|build-essential)\b", needed[1]))
    wanted |= {"cmake", "ninja-build", "python3", "python3-venv"}
    build = DOCKERFILE.split("\nFROM ")[1]
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends (.*)", build)
    assert wanted <= set(installed.split())


def test_the_image_starts_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    (words,) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert yaml.safe_load(entry) == ["/opt/quire/bin/quire"]
    code, out, _ = run(capsys, *yaml.safe_load(words))
    assert code == 0 and "quire serve" in out


def test_the_image_asks_the_server_whether_it_is_healthy(server: Server) -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*?CMD (.*)$", DOCKERFILE, re.MULTILINE)
    program, option, code = yaml.safe_load(check)
    assert (program, option) == ("python3", "-c") and ":8000/health'" in code
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        for port, healthy in ((server.port, True), (unused.getsockname()[1], False)):
            command = [sys.executable, "-c", code.replace(":8000/", f":{port}/")]
            done = subprocess.run(command, capture_output=True, check=False)
            assert (done.returncode == 0) == healthy, done.stderr


def test_the_image_has_the_libraries_that_are_loaded() -> None:
    """libcrypto and liburing are linked as static libraries: the last stage needs no package for
    them."""
    everywhere = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6"}
    everywhere |= {"ld-linux-x86-64.so.2", "libtvm_ffi.so"}  # the latter comes with the wheel
    table = subprocess.run(
        ["readelf", "-d", str(_ffi.LIBRARY_PATH)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", table))
    assert "libtvm_ffi.so" in needed and needed <= everywhere


def test_what_is_copied_is_there() -> None:
    for source in re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).exists(), source


def test_what_git_ignores_is_not_sent_to_the_build() -> None:
    ignored = (PACKAGING / "Dockerfile.dockerignore").read_text().splitlines()
    lines = (ROOT / ".gitignore").read_text().splitlines()
    folders = {line.removesuffix("/") for line in lines if "*" not in line}  # /.venv may be a link
    assert {"/build", "/.venv", "/.quire"} <= set(ignored)
    assert {name for name in ignored if "*" not in name and name != "/.git"} <= folders
