"""Which folder may include which: the arrows of docs/architecture.md, checked on every #include of
src and include."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import source_tree

ARCHITECTURE = Path("docs/architecture.md")
# Every layer may include these.
FOR_ALL = {"base", "quire"}
# The standard library aside: only src/ffi knows tvm-ffi, and a public header shows no third-party
# type but DLPack's structs.
_FFI_ONLY = "tvm/"
_PUBLIC_THIRD_PARTY = "dlpack/"

_INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def direct_arrows(text: str) -> dict[str, set[str]]:
    """a -> {b}: from every chain "a -> b -> c" of the page; a target may be a list "b, c"."""
    arrows: dict[str, set[str]] = {}
    for chain in re.findall(r"[\w/]+(?: -> [\w/]+(?:, ?[\w/]+)*)+", text):
        links = [
            [name.removeprefix("include/") for name in re.split(r", ?", part.strip())]
            for part in chain.split(" -> ")
        ]
        for sources, targets in zip(links, links[1:]):
            for source in sources:
                arrows.setdefault(source, set()).update(targets)
    return arrows


def reachable(arrows: dict[str, set[str]], start: str) -> set[str]:
    """A layer may include what lies behind an arrow as well."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for target in arrows.get(todo.pop(), set()) - found:
            found.add(target)
            todo.append(target)
    return found


def layer_of(path: Path) -> str:
    return path.parts[1]  # src/kv/x.cc -> kv; include/quire/x.h -> quire


def violations(path: Path, text: str, arrows: dict[str, set[str]]) -> list[str]:
    layer = layer_of(path)
    # The public headers are the definitions; they stand on nothing of src.
    allowed = {"quire"} if layer == "quire" else {layer} | FOR_ALL | reachable(arrows, layer)
    found = []
    for bracket, target in _INCLUDE.findall(text):
        if bracket == "<":
            if target.startswith(_FFI_ONLY) and layer != "ffi":
                found.append(f"{path}: <{target}> is for src/ffi only; C++ users need no tvm-ffi")
            elif layer == "quire" and "/" in target and not target.startswith(_PUBLIC_THIRD_PARTY):
                found.append(
                    f"{path}: <{target}> in a public header binds every user to it; hide it in a .cc"
                )
        elif "/" not in target:
            found.append(f'{path}: write "{target}" with its folder, as "{layer}/{target}"')
        elif target.split("/")[0] not in allowed:
            found.append(
                f'{path}: "{target}" lies outside of what {layer} may include ({", ".join(sorted(allowed))}). If '
                "the lower part must call up, let it declare a small interface (include/quire/seams.h) that the "
                "upper part implements; if the file stands in the wrong folder, move it"
            )
    return found


def arrows_of_the_page() -> dict[str, set[str]]:
    return direct_arrows(source_tree.read(ARCHITECTURE))


def test_every_include_goes_down():
    arrows = arrows_of_the_page()
    files = source_tree.cpp_files("src", "include")
    assert len(files) > 50
    found = [line for path in files for line in violations(path, source_tree.read(path), arrows)]
    assert not found, "\n".join(found)


def test_every_folder_of_src_has_its_arrow():
    arrows = arrows_of_the_page()
    named = set(arrows) | {target for targets in arrows.values() for target in targets}
    folders = {layer_of(path) for path in source_tree.cpp_files("src")}
    assert folders <= named, f"{ARCHITECTURE} has no arrow for {folders - named}"


def test_the_arrows_have_no_circle():
    arrows = arrows_of_the_page()
    circles = [name for name in arrows if name in reachable(arrows, name)]
    assert not circles, f"{ARCHITECTURE}: {circles} depend on themselves"


@pytest.mark.parametrize(
    "path,line,complaint",
    [
        (
            "src/kernels/x.cc",
            '#include "kv/page_pool.h"',
            "lies outside of what kernels may include",
        ),
        ("src/kv/x.h", '  # include "engine/request.h"', "lies outside of what kv may include"),
        ("src/ffi/x.cc", '#include "kv/page_pool.h"', "lies outside of what ffi may include"),
        ("include/quire/x.h", '#include "base/check.h"', "lies outside of what quire may include"),
        ("src/kv/x.cc", '#include "page_pool.h"', 'as "kv/page_pool.h"'),
        ("src/engine/x.cc", "#include <tvm/ffi/any.h>", "is for src/ffi only"),
        ("include/quire/x.h", "#include <nlohmann/json.hpp>", "in a public header"),
        ("src/engine/x.cc", '#include "tensor/dtype.h"', None),
        ("include/quire/x.h", "#include <dlpack/dlpack.h>", None),
        ("src/kv/x.cc", '#include "quire/kv_state.h"', None),
        ("src/tensor/x.cc", '#include "base/check.h"', None),
        ("src/ffi/x.cc", "#include <tvm/ffi/any.h>", None),
    ],
)
def test_the_rule_itself(path, line, complaint):
    found = violations(Path(path), f"// head\n{line}\n", arrows_of_the_page())
    assert bool(found) == bool(complaint)
    assert not complaint or complaint in found[0]
