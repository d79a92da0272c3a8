"""tools/docs: headers as Doxygen reads them, the check of links, and the C++ reference itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import source_tree

sys.path.insert(0, str(source_tree.ROOT / "tools"))

import docs  # noqa: E402

_HEADER = """\
// A cache.
//
// Order: Add.
#ifndef X_
#define X_

// What it keeps: at most 5 % of <n>.
struct Options {
  int a = 0;  // bytes; goes on
              // in this line
  // Of the next one.
  const char* b = "http://x";
};
#endif  // X_
"""
_AS_READ = """\
/// \\file
/// A cache.
///
/// Order: Add.
#ifndef X_
#define X_

/// What it keeps: at most 5 \\% of \\<n\\>.
struct Options {
  int a = 0;  ///< bytes; goes on
              ///< in this line
  /// Of the next one.
  const char* b = "http://x";
};
#endif  ///< X_
"""


def test_comments_become_those_of_doxygen():
    assert docs.doxygen_comments(_HEADER) == _AS_READ


def test_links_to_missing_pages_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<a href="../a.html#x">a</a> <a href="c.html">c</a>')
    (tmp_path / "a.html").write_text('<a href="sub/b.html">b</a> <a href="https://example.org">e</a>')
    assert docs.broken_links(tmp_path) == ["sub/b.html: c.html"]


@pytest.mark.skipif(shutil.which("doxygen") is None, reason="doxygen is not installed (tools/docs)")
def test_the_reference_has_every_class_with_its_comment(tmp_path):
    docs.build_cpp(tmp_path / "cpp")
    assert docs.broken_links(tmp_path) == []
    page = (tmp_path / "cpp" / "structquire_1_1RamTierOptions.html").read_text()
    assert "0 = no such tier" in page
    listed = (tmp_path / "cpp" / "annotated.html").read_text()
    for name in ("AttentionKVCache", "ChunkStore", "Engine", "RNNState", "CompositeState"):
        assert f">{name}<" in listed
    engine = (tmp_path / "cpp" / "classquire_1_1Engine.html").read_text()
    assert "Ends a request; its pages are free when Cancel returns" in engine
