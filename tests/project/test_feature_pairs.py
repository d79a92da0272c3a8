"""docs/feature-pairs.md: all features of the source, no empty cell, no pair that is too rare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import source_tree

sys.path.insert(0, str(source_tree.ROOT / "tools"))
import feature_pairs

_PAGE = feature_pairs.PAGE.relative_to(source_tree.ROOT)
_UNITS = {"": 1, "k": 1000, "M": 1_000_000}


def features_of_source() -> dict[str, str]:
    """Name and meaning, in the order of the source."""
    source = source_tree.read(Path("src/kv/testing/feature_pairs.cc"))
    texts = source.split("kTexts = {{", 1)[1].split("}};", 1)[0]
    return dict(re.findall(r'\{"([^"]+)",\s*"([^"]+)"\}', texts))


def rows_of(page: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def faults_of(page: str, features: dict[str, str]) -> list[str]:
    rows = rows_of(page)
    listed = {row[1]: row[2] for row in rows if len(row) == 3 and row[0].isdigit()}
    if list(listed.items()) != list(features.items()):
        return [f"it lists {list(listed.items())}, the source {list(features.items())}"]
    reasons = {row[0]: row[1] for row in rows if len(row) == 2 and re.fullmatch("[a-z]", row[0])}
    names = list(features)
    table = {row[0]: row[1:] for row in rows if len(row) == len(names) + 1}
    faults = []
    for i, a in enumerate(names):
        cells = table.get(f"{i + 1} {a}", [])
        for b, cell in zip(names[: i + 1], [*cells, *[""] * len(names)]):
            count = re.fullmatch("([0-9]+)([kM]?)", cell)
            if count is None and (cell not in reasons or a == b):
                faults.append(f"{a} with {b}: neither a count nor a reason, but {cell!r}")
            if count and int(count[1]) * _UNITS[count[2]] < feature_pairs.OCCURRENCES_MIN:
                faults.append(f"{a} with {b}: {cell} times only")
    return faults


def test_the_walks_exercise_every_pair_of_features():
    table = feature_pairs.read_table()
    assert table.meanings == features_of_source(), "old counts; run all walks: ./test release"
    faults = table.faults()
    assert not faults, "draw other walks, then tools/feature_pairs.py:\n" + "\n".join(faults)


def test_the_page_shows_every_pair_of_features():
    features = features_of_source()
    assert len(features) > 40
    faults = faults_of(source_tree.read(_PAGE), features)
    assert not faults, "run tools/feature_pairs.py, draw more walks:\n" + "\n".join(faults)


def test_faults_of_the_page_are_noticed():
    features = {"one": "first", "two": "second", "three": "third"}
    page = (
        "| | feature | |\n| ---: | --- | --- |\n"
        "| 1 | one | first |\n| 2 | two | second |\n| 3 | three | third |\n"
        "\n| | 1 | 2 | 3 |\n| --- | ---: | ---: | ---: |\n"
        "| 1 one | 12k | | |\n| 2 two | 3k | 2M | |\n| 3 three | a | 1k | 1000 |\n"
        "\n| | never together, because |\n| --- | --- |\n| a | they differ |\n"
    )
    assert not faults_of(page, features)
    for good, bad in [
        ("| 2 | two | second |\n", ""),
        ("second", "another"),
        ("| 3k |", "| |"),
        ("| 3k |", "| 999 |"),
        ("| 3k |", "| b |"),
        ("| 12k |", "| a |"),
        ("| 2 two | 3k | 2M | |\n", ""),
    ]:
        assert good in page
        assert faults_of(page.replace(good, bad), features), (good, bad)


def test_shards_are_added_and_their_faults_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_pairs, "SHARDS", 40)
    with pytest.raises(SystemExit, match="run all walks"):
        feature_pairs.read_table(tmp_path)
    shard = "feature\tone\tfirst\nfeature\ttwo\tsecond\npair\tone\tone\t25\n"
    shards = [shard + "never\ttwo\tone\tthey differ\npair\ttwo\ttwo\t25\n"] * 40
    for i, text in enumerate(shards):
        (tmp_path / str(i)).write_text(text, encoding="utf-8")
    table = feature_pairs.read_table(tmp_path)
    assert table.counts == {("one", "one"): 1000, ("two", "two"): 1000}
    assert not table.faults()
    assert not faults_of(feature_pairs.page_of(table), table.meanings)
    (tmp_path / "7").write_text(shard + "pair\ttwo\tone\t3\n", encoding="utf-8")
    assert feature_pairs.read_table(tmp_path).faults() == [
        "two with two: 975 times; at least 1000 are wanted",
        "two with one occurs, and is said never to",
    ]
