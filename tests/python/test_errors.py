"""Outcomes of C++ as exceptions: the table of src/ffi/errors.cc against the classes of
quire.errors."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import quire
import tvm_ffi
from quire import _ffi, errors

TEST_LIBRARY = Path(__file__).with_name("libquire_test_ffi.so")
tvm_ffi.load_module(str(TEST_LIBRARY), keep_module_alive=True)


@tvm_ffi.register_object("quire.test.Latch")
class Latch(tvm_ffi.Object):
    """One object whose calls end as the test asks."""


KINDS = {str(code): str(kind) for code, kind in _ffi.function("error_kinds")().items()}
CLASSES = {cls.code: cls for cls in quire.QuireError.__subclasses__()}


def test_every_code_has_a_class_and_every_class_a_code() -> None:
    assert KINDS.keys() == CLASSES.keys()
    assert len(KINDS) == 20


def test_kinds_are_the_names_of_the_classes() -> None:
    assert KINDS == {code: f"quire.{cls.__name__}" for code, cls in CLASSES.items()}


@pytest.mark.parametrize("code", sorted(KINDS))
def test_each_outcome_arrives_as_its_class_with_its_message(code: str) -> None:
    with pytest.raises(CLASSES[code]) as caught:
        Latch().fail(code, "what happened: 'x' = 3")
    assert type(caught.value) is CLASSES[code]
    assert str(caught.value) == "what happened: 'x' = 3"
    assert isinstance(caught.value, quire.QuireError)


@pytest.mark.parametrize(
    ("code", "builtin"),
    [
        ("UnknownSequence", KeyError),
        ("SequenceExists", ValueError),
        ("BadArgument", ValueError),
        ("BadState", RuntimeError),
        ("OutOfMemory", MemoryError),
        ("TooLarge", ValueError),
        ("NotFound", FileNotFoundError),
        ("Timeout", TimeoutError),
        ("Remote", ConnectionError),
        ("Unavailable", ConnectionError),
        ("IoError", OSError),
        ("Internal", RuntimeError),
    ],
)
def test_the_fitting_builtin_catches_as_well(code: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        Latch().fail(code, "m")


def test_all_classes_are_exported() -> None:
    for name in errors.__all__:
        assert getattr(quire, name) is getattr(errors, name)
    assert {cls.__name__ for cls in CLASSES.values()} | {"QuireError"} == set(errors.__all__)


def test_the_page_of_errors_lists_them_with_their_bases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\w, ]+) \|", page, re.MULTILINE)
    listed = {code: (name, bases) for code, name, bases in rows if code in KINDS}
    assert listed == {
        code: (
            cls.__name__,
            ", ".join(base.__name__ for base in cls.__bases__ if base is not quire.QuireError),
        )
        for code, cls in CLASSES.items()
    }


def test_a_refused_allocation_is_out_of_memory() -> None:
    latch = Latch()
    with pytest.raises(quire.OutOfMemoryError):
        latch.fail_allocation()
    assert latch.succeed() == 7


def test_an_object_refuses_use_after_an_internal_error_and_says_which() -> None:
    latch = Latch()
    with pytest.raises(quire.InternalError):
        latch.fail("Internal", "page 7 has two owners")
    for _ in range(2):
        with pytest.raises(
            quire.InternalError, match=r"refuses further use.*page 7 has two owners"
        ):
            latch.succeed()
    assert Latch().succeed() == 7


def test_a_failed_check_is_an_internal_error_and_the_object_refuses_use() -> None:
    latch = Latch()
    latch.fail_check(1)
    with pytest.raises(
        quire.InternalError, match=r"test_module.cc:\d+: check failed: two == 1 page 7 has 2 owners"
    ) as caught:
        latch.fail_check(2)
    assert type(caught.value) is quire.InternalError
    for call in (latch.succeed, lambda: latch.fail_check(1)):
        with pytest.raises(
            quire.InternalError, match=r"refuses further use.*page 7 has 2 owners; create a new one"
        ):
            call()
    assert Latch().succeed() == 7


def test_a_failed_check_of_a_function_is_an_internal_error() -> None:
    fail_check = tvm_ffi.get_global_func("quire.test.fail_check")
    for _ in range(2):
        with pytest.raises(quire.InternalError, match="page 7 has 2 owners"):
            fail_check(2)


@pytest.mark.parametrize("call", ["fail_check_in_commit", "fail_check_on_thread"])
def test_a_check_that_no_call_can_answer_ends_the_process_with_its_message(call: str) -> None:
    program = f"import test_errors; test_errors.Latch().{call}(2); print('still here')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "check failed: two == 1 page 7 has 2 owners" in done.stderr
    assert "still here" not in done.stdout


def test_an_exception_that_quire_does_not_throw_is_an_internal_error() -> None:
    latch = Latch()
    with pytest.raises(quire.InternalError, match="vector::at"):
        latch.fail_foreign("vector::at")
    with pytest.raises(quire.InternalError, match=r"refuses further use.*vector::at"):
        latch.succeed()


@pytest.mark.parametrize("code", sorted(set(KINDS) - {"Internal"}))
def test_other_outcomes_leave_the_object_usable(code: str) -> None:
    latch = Latch()
    with pytest.raises(quire.QuireError):
        latch.fail(code, "m")
    assert latch.succeed() == 7


def test_an_error_names_its_option_and_why(engine: quire.Engine) -> None:
    options = {"window": 4, "sinks": 9}, {"prediction": [5, 6]}, {"n": 1000}
    expected = ("sinks", ""), ("predicted_tokens", "no_guess_room"), ("n", "")
    for given, (option, reason) in zip(options, expected):
        with pytest.raises(quire.QuireError) as caught:
            engine.generate([5, 6, 7], max_tokens=2, **given)
        assert (caught.value.option, caught.value.reason) == (option, reason)
    with pytest.raises(quire.QuireError) as caught:
        Latch().fail("Full", "no room")
    assert (caught.value.option, caught.value.reason) == ("", "")
    mine = errors.about(quire.IoError("x"), "kv_dir", "why")
    assert (mine.option, mine.reason, str(mine)) == ("kv_dir", "why", "x")


def test_errors_come_back_from_their_text() -> None:
    assert type(errors.from_text("OutOfPages: none left")) is quire.OutOfPagesError
    assert str(errors.from_text("OutOfPages: none left")) == "none left"
    assert type(errors.from_text("whatever")) is quire.InternalError


def test_a_message_with_percent_braces_and_utf8_arrives_unchanged() -> None:
    message = "100 % {x} \u00fc\u4f60 \n second line"
    with pytest.raises(quire.BadArgumentError) as caught:
        Latch().fail("BadArgument", message)
    assert str(caught.value) == message
