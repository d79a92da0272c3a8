"""How much one class of the product may be: methods and members of the largest ones, and which
members of a large class are written in more than one file. The limits only go down."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import source_tree

# No class of the product has more methods than this, but for those below.
METHODS_MAX = 60
# What is reached. A class that gets smaller gets a smaller limit. The engine's interface alone has 23
# calls.
METHODS_OF = {"BlockTree": 53, "EngineImpl": 35, "PagedKVCache": 40, "StateHistory": 44}
MEMBERS_OF = {"EngineImpl": 15, "PagedKVCache": 15}

# A class with this number of methods has one file for the writes of a member, but for these. A
# plan's arrays are filled in one file and repeated in place in the other.
LARGE_METHODS_MIN = 20
WRITTEN_IN_SEVERAL = {
    "ForwardPlan": {"filled_at_", "opens_page_", "positions_"},
}

_CLASS = re.compile(
    r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)(?:\s+final)?\s*(?::(?!:)[^;{]*)?\{"
)
_MEMBER = re.compile(r"(\w+_)(?:\s*=.*|\s*\{\})?$", re.DOTALL)
_NO_METHOD = re.compile(r"^\s*(?:using|friend|static_assert|typedef|enum|class|struct|union)\b")
_LABEL = re.compile(r"\b(?:public|private|protected)\s*:")
_TEMPLATE = re.compile(r"^\s*template\s*<[^;{]*?>\s*(?=\w)")


@dataclass
class CppClass:
    name: str
    path: Path
    methods: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)


def without_comments(text: str) -> str:
    """Comments, strings and preprocessor lines are blank."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', '""', text)
    return re.sub(r"^\s*#.*?(?<!\\)$", "", text, flags=re.MULTILINE | re.DOTALL)


def block_end(text: str, begin: int) -> int:
    """The index after the brace that closes the one at `begin`."""
    depth = 0
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    raise AssertionError("a brace is not closed")


def statements(body: str) -> list[str]:
    """Declarations of a class body; what stands in their braces is left out."""
    found = []
    start = index = 0
    parens = 0
    text = ""
    while index < len(body):
        char = body[index]
        parens += {"(": 1, ")": -1}.get(char, 0)
        if char == "{":
            text += body[start:index] + "{}"
            index = start = block_end(body, index)
            follows = body[index:].lstrip()[:1]
            # A function body ends its declaration; an initializer or a nested class goes on to ";".
            is_function = "(" in text and parens == 0 and not _NO_METHOD.match(text)
            if is_function and follows not in {";", ",", "{"} and not re.search(r"=\s*\{\}$", text):
                found.append(text)
                text = ""
            continue
        if char == ";" and parens == 0:
            found.append(text + body[start:index])
            text, start = "", index + 1
        index += 1
    return [_LABEL.sub("", statement).strip() for statement in found]


def parse_class(name: str, path: Path, body: str) -> CppClass:
    found = CppClass(name, path)
    for statement in statements(body):
        declaration = _TEMPLATE.sub("", statement)
        if not declaration or _NO_METHOD.match(declaration):
            continue
        before_value = re.sub(r"operator\W+\(", "operator (", declaration).split("=")[0]
        if re.search(r"[\w=\]\[)(!<>+*-]\s*\(", before_value):
            found.methods.append(declaration)
        else:
            for part in re.split(r",(?![^<]*>)", declaration):
                named = _MEMBER.search(part.split("{")[0].rstrip())
                if named:
                    found.members.append(named.group(1))
    return found


def classes_of(path: Path, text: str) -> list[CppClass]:
    text = without_comments(text)
    found = []
    for match in _CLASS.finditer(text):
        begin = match.end() - 1
        body = text[begin + 1 : block_end(text, begin) - 1]
        found.append(parse_class(match.group(1), path, body))
    return found


def product_classes() -> list[CppClass]:
    files = [
        path
        for path in source_tree.cpp_files("src")
        if "testing" not in path.parts and not re.search(r"_(test|bench|fuzz)$", path.stem)
    ]
    return [found for path in files for found in classes_of(path, source_tree.read(path))]


def writes(member: str, text: str) -> bool:
    """Whether the text assigns the member or an element, counts it, or changes it as a container.
    Calls that change a member which is an owner are that owner's business."""
    m = re.escape(member)
    return bool(
        re.search(
            rf"(?<![\w.>])(?:{m}(?:\[[^\]]*\])?\s*(?:[-+|&]?=(?!=)|\+\+|--)"
            rf"|(?:\+\+|--){m}\b"
            rf"|{m}\.(?:assign|clear|resize|push_back|emplace_back|reset|swap|store)\("
            rf"|(?:std::exchange|std::swap|ReserveGrowing|FreeAll)\(\s*{m}\b)",
            without_comments(text),
        )
    )


def written_in(found: CppClass, files: dict[Path, str]) -> dict[str, list[str]]:
    """member -> the files of the class that write it, its constructor's initializers aside."""
    return {
        member: sorted(path.name for path, text in files.items() if writes(member, text))
        for member in found.members
    }


@pytest.fixture(scope="module")
def classes() -> list[CppClass]:
    found = product_classes()
    assert len(found) > 400
    return found


def test_no_class_has_too_many_methods(classes: list[CppClass]):
    large = [
        f"{found.path}: {found.name} has {len(found.methods)} methods; at most "
        f"{METHODS_OF.get(found.name, METHODS_MAX)}: give what belongs together an owner"
        for found in classes
        if len(found.methods) > METHODS_OF.get(found.name, METHODS_MAX)
    ]
    assert not large, "\n".join(large)


def test_no_large_class_gets_members(classes: list[CppClass]):
    for found in classes:
        if found.name in MEMBERS_OF:
            assert len(found.members) <= MEMBERS_OF[found.name], found.members


def test_limits_are_what_is_reached(classes: list[CppClass]):
    methods = {found.name: len(found.methods) for found in classes}
    members = {found.name: len(found.members) for found in classes}
    assert METHODS_OF == {name: methods[name] for name in METHODS_OF}
    assert MEMBERS_OF == {name: members[name] for name in MEMBERS_OF}


def files_of(found: CppClass) -> dict[Path, str]:
    """The product's .cc files beside the class that define methods of it."""
    defines = re.compile(rf"^[^\s/#].*\b{found.name}::~?\w+\(", re.MULTILINE)
    texts = {
        path: source_tree.read(path)
        for path in source_tree.cpp_files("src")
        if path.parent == found.path.parent and path.suffix == ".cc"
        if not re.search(r"_(test|bench|fuzz)$", path.stem)
    }
    return {path: text for path, text in texts.items() if defines.search(text)}


def test_members_of_large_classes_are_written_in_one_file(classes: list[CppClass]):
    several = {}
    spread = 0
    for found in classes:
        if len(found.methods) < LARGE_METHODS_MIN:
            continue
        files = files_of(found)
        spread += len(files) > 1
        for member, names in written_in(found, files).items():
            if len(names) > 1 and member not in WRITTEN_IN_SEVERAL.get(found.name, set()):
                several[f"{found.name}::{member}"] = names
    assert not several, several
    assert spread >= len(WRITTEN_IN_SEVERAL), "no class is spread over files: nothing was looked at"


def test_the_reader_of_classes_knows_what_it_reads():
    text = """
    // class Comment { void No(); };
    class Whole final : public Base {
     public:
      explicit Whole(int a = F(1)) : a_(a), b_{} {}
      template <typename F>
      void Run(F&& f) const { f(); if (a_ > 0) { f(); } }
      static Result<int> Make(std::span<const int> of = {});
      bool operator==(const Whole&) const = default;
      int a() const { return a_; }
      struct Part { int x_ = 0; void Go(); };
      enum class Kind : int { kOne };
      using List = std::vector<int>;
     private:
      const int a_;
      std::vector<int> b_{};
      std::span<const int> c_ = {};
      std::vector<float> d_, e_;
      uint64_t f_ = 0;  // g_
    };
    """
    whole = next(found for found in classes_of(Path("x.h"), text) if found.name == "Whole")
    assert len(whole.methods) == 5, whole.methods
    assert whole.members == ["a_", "b_", "c_", "d_", "e_", "f_"]
    assert writes("f_", "x_ = 1; ++f_;") and writes("b_", "b_.clear();")
    assert not writes("f_", "if (f_ == 1) g(f_); // f_ = 2") and not writes("a_", "other.a_ = 2;")
