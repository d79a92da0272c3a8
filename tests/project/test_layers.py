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


def names_of(arrows: dict[str, set[str]]) -> set[str]:
    return set(arrows) | {target for targets in arrows.values() for target in targets}


def layer_of(folder: Path, names: set[str]) -> str:
    """The deepest folder that the page names: kv/pages/x.h -> kv/pages, kernels/cpu/x.cc -> kernels."""
    for part in folder.parents:
        if str(part) in names:
            return str(part)
    return folder.parts[0]


def is_test(path: Path) -> bool:
    return "testing" in path.parts or bool(re.search(r"_(test|bench|fuzz)$", path.stem))


def allowed_layers(layer: str, test: bool, arrows: dict[str, set[str]]) -> set[str]:
    """A test, or what supports tests, may use all of its top folder and what that stands on."""
    if layer == "quire":  # the public headers are the definitions; they stand on nothing of src
        return {"quire"}
    if not test:
        return {layer} | FOR_ALL | reachable(arrows, layer)
    top = layer.split("/")[0]
    own = {top, layer} | {name for name in names_of(arrows) if name.split("/")[0] == top}
    allowed = own | FOR_ALL
    for name in own:
        allowed |= reachable(arrows, name)
    return allowed | {name.split("/")[0] for name in allowed}


def violations(path: Path, text: str, arrows: dict[str, set[str]]) -> list[str]:
    names = names_of(arrows)
    below = path.relative_to(path.parts[0])  # src/kv/pages/x.cc -> kv/pages/x.cc
    layer, test = layer_of(below, names), is_test(path)
    allowed = allowed_layers(layer, test, arrows)
    found = []
    for bracket, target in _INCLUDE.findall(text):
        target_layer = layer_of(Path(target), names) if "/" in target else ""
        if bracket == "<":
            if target.startswith(_FFI_ONLY) and layer.split("/")[0] != "ffi":
                found.append(f"{path}: <{target}> is for src/ffi only; C++ users need no tvm-ffi")
            elif layer == "quire" and "/" in target and not target.startswith(_PUBLIC_THIRD_PARTY):
                found.append(
                    f"{path}: <{target}> in a public header binds every user to it; hide it in a .cc"
                )
        elif "/" not in target:
            found.append(f'{path}: write "{target}" with its folder, as "{below.parent}/{target}"')
        elif is_test(Path(target)) and not test:
            found.append(f'{path}: "{target}" supports tests; the product may not use it')
        elif target_layer not in allowed:
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
    names = names_of(arrows_of_the_page())
    folders = {
        path.parent.relative_to("src")
        for path in source_tree.cpp_files("src")
        if "testing" not in path.parts
    }
    unnamed = {
        folder
        for folder in folders
        if str(folder) not in names and not any(str(part) in names for part in folder.parents)
    }
    assert not unnamed, f"{ARCHITECTURE} has no arrow for {unnamed}"


def test_the_arrows_have_no_circle():
    arrows = arrows_of_the_page()
    circles = [name for name in arrows if name in reachable(arrows, name)]
    assert not circles, f"{ARCHITECTURE}: {circles} depend on themselves"


def circles_of(included: dict[str, list[str]]) -> list[str]:
    """Chains of files that include each other, the first file again at the end."""
    circles: list[str] = []
    chain: list[str] = []
    done: set[str] = set()

    def follow(name: str) -> None:
        if name in chain:
            circles.append(" -> ".join([*chain[chain.index(name) :], name]))
        elif name not in done:
            chain.append(name)
            for target in included.get(name, []):
                follow(target)
            done.add(chain.pop())

    for name in included:
        follow(name)
    return circles


def test_no_headers_include_each_other():
    files = source_tree.cpp_files("src", "include")
    included = {
        "/".join(path.parts[1:]): [target for _, target in _INCLUDE.findall(source_tree.read(path))]
        for path in files
    }
    assert len(included) > 500
    assert sum(target in included for targets in included.values() for target in targets) > 1000
    assert circles_of(included) == [], "move what both need into a header of its own"


def test_a_circle_of_headers_is_found():
    included = {"a.h": ["b.h", "c.h"], "b.h": ["c.h"], "c.h": ["d.h"], "d.h": ["b.h", "vector"]}
    assert circles_of(included) == ["b.h -> c.h -> d.h -> b.h"]
    assert circles_of(included | {"d.h": ["vector"]}) == []


@pytest.mark.parametrize(
    "path,line,complaint",
    [
        (
            "src/kernels/x.cc",
            '#include "kv/pages/page_pool.h"',
            "lies outside of what kernels may include",
        ),
        (
            "src/kv/cache/x.h",
            '  # include "engine/request/request.h"',
            "lies outside of what kv/cache may include",
        ),
        (
            "src/kv/plan/x.cc",
            '#include "kv/cache/page_counts.h"',
            "lies outside of what kv/plan may include",
        ),
        ("src/kv/cache/x.cc", '#include "kv/testing/kv_model.h"', "supports tests"),
        ("src/kv/cache/x_test.cc", '#include "kv/testing/kv_model.h"', None),
        ("src/kv/pages/x_test.cc", '#include "kv/composite/composite_state.h"', None),
        (
            "src/kv/pages/x_test.cc",
            '#include "engine/request/request.h"',
            "lies outside of what kv/pages may include",
        ),
        ("src/ffi/x.cc", '#include "kv/pages/page_pool.h"', "lies outside of what ffi may include"),
        ("include/quire/x.h", '#include "base/check.h"', "lies outside of what quire may include"),
        ("src/kv/pages/x.cc", '#include "page_pool.h"', 'as "kv/pages/page_pool.h"'),
        ("src/engine/x.cc", "#include <tvm/ffi/any.h>", "is for src/ffi only"),
        ("include/quire/x.h", "#include <nlohmann/json.hpp>", "in a public header"),
        ("src/engine/x.cc", '#include "tensor/dtype.h"', None),
        ("include/quire/x.h", "#include <dlpack/dlpack.h>", None),
        ("src/kv/cache/x.cc", '#include "quire/kv_state.h"', None),
        ("src/tensor/x.cc", '#include "base/check.h"', None),
        ("src/ffi/x.cc", "#include <tvm/ffi/any.h>", None),
    ],
)
def test_the_rule_itself(path, line, complaint):
    found = violations(Path(path), f"// head\n{line}\n", arrows_of_the_page())
    assert bool(found) == bool(complaint)
    assert not complaint or complaint in found[0]
