"""docs/serve.md and docs/metrics.md name what there is, and nothing else."""

from __future__ import annotations

import dataclasses
import re

from program import ROOT
from quire.serve.app import ROUTES
from quire.serve.limits import Limits
from server_process import Server, running
from tiny_model import TinyModel

PAGE = (ROOT / "docs" / "serve.md").read_text()


def rows(page: str, heading: str) -> str:
    """The first cells of the table below a heading."""
    table = page.split(heading, 1)[1].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    return "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))


def test_limits() -> None:
    found = re.findall(r"`(\w+)`", rows(PAGE, "## Limits"))
    assert sorted(found) == sorted(field.name for field in dataclasses.fields(Limits))


def test_paths() -> None:
    found = set(re.findall(r"`(?:POST|GET|DELETE) ([^`]+)`", rows(PAGE, "## Paths")))
    assert found == {path.replace("{name:path}", "NAME") for _, path, _ in ROUTES}


def test_metrics(tiny: TinyModel, tmp_path_factory: object, server: Server) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(r"`(quire:\w+)", page))
    folder = str(tmp_path_factory.mktemp("kv"))  # type: ignore[attr-defined]
    options = ("--kv-dir", folder, "--prefill-from", f"unix:{folder}/nobody")
    with running(tiny.directory, *options) as stored:
        _, _, text = stored.request("GET", "/metrics")
        assert stored.stop() == 0
    assert named == set(re.findall(r"# TYPE (\S+) ", text))
