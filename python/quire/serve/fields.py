"""The fields of a request's body: read one by one, each with its type and range.

A field that nobody read is unknown: see :meth:`Fields.unknown`. null stands for an absent field.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quire.serve.problems import Problem

__all__ = ["Fields", "check_text", "unknown_field"]


class Fields:
    """An object of the body.

    Args:
        values: the object.
        path: where it stands in the body, such as "tools[0].function"; "" for the body itself.
        aliases: names that fields have in the body, here and in objects within, where the values
            were put into another form; "" for a field whose entries stand beside it there.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str = "",
        aliases: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        self._values = values
        self._path = path
        self._aliases = aliases
        self._read: set[str] = set()
        self._left: list[str] = []

    def name(self, field: str) -> str:
        """The field as errors name it."""
        if self._aliases.get(field) == "":
            return self._path
        field = self._aliases.get(field, field)
        return f"{self._path}.{field}" if self._path else field

    def refuse(self, field: str, must: str) -> NoReturn:
        value = self._values.get(field)
        raise Problem(
            400,
            f"{self.name(field)} is {_shown(value)}; it must be {must}",
            param=self.name(field),
            code="invalid_value",
        )

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None

    def any(self, field: str) -> Any:
        """The value, None where it is absent or null."""
        self._read.add(field)
        return self._values.get(field)

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.any(field)
        if value is None:
            return None
        # 1.0 is an integer of JSON, which has one kind of numbers.
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            self.refuse(field, f"an integer from {least} to {most}")
        return value

    def number(self, field: str, least: float, most: float, *, above: bool = False) -> float | None:
        """`above`: without `least` itself."""
        value = self.any(field)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and least <= value <= most) or (above and value == least):
            low = f"above {least:g}" if above else f"from {least:g}"
            self.refuse(field, f"a number {low} to {most:g}")
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.any(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, "true or false")
        return value

    def text(self, field: str, most_bytes: int | None = None) -> str | None:
        """A text that is valid Unicode, of at most `most_bytes` bytes of UTF-8."""
        value = self.any(field)
        if value is None:
            return None
        if not isinstance(value, str):
            self.refuse(field, "a text")
        size = check_text(value, self.name(field))
        if most_bytes is not None and size > most_bytes:
            self.refuse(field, f"a text of at most {most_bytes} bytes, and has {size}")
        return value

    def choice(self, field: str, known: Sequence[str], default: str) -> str:
        value = self.any(field)
        if value is None:
            return default
        if value not in known:
            self.refuse(field, "one of " + ", ".join(known))
        return str(value)

    def object(self, field: str) -> Fields | None:
        value = self.any(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, "an object")
        return Fields(value, self.name(field), self._aliases)

    def entries(self, field: str, most: int) -> list[Any] | None:
        value = self.any(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most:
            self.refuse(field, f"a list of at most {most} entries")
        return value

    def objects(self, field: str, most: int) -> list[Fields] | None:
        """A list of objects, each with its place."""
        entries = self.entries(field, most)
        if entries is None:
            return None
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                place = f"{self.name(field)}[{index}]"
                raise Problem(400, f"{place} is {_shown(entry)}; it must be an object", param=place)
        return [
            Fields(entry, f"{self.name(field)}[{i}]", self._aliases)
            for i, entry in enumerate(entries)
        ]

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here, whatever they are."""
        self._read.update(names)

    def only(self, field: str, *defaults: Any, why: str = "is not supported") -> None:
        """A field that is taken at its default alone. Problem (400) for other values: it would
        change the answer, and is never ignored."""
        value = self.any(field)
        if value is not None and not any(type(value) is type(d) and value == d for d in defaults):
            taken = " or ".join(json.dumps(default) for default in defaults)
            raise Problem(
                400,
                f"{self.name(field)} {why}" + (f"; only {taken} is taken" if taken else ""),
                param=self.name(field),
                code="unsupported_value",
            )

    def leave(self, inner: Fields) -> None:
        """What nobody has read of an object within this one is unknown here."""
        self._left += inner.unknown()

    def unknown(self) -> list[str]:
        """Fields that nobody has read."""
        given = (field for field, value in self._values.items() if value is not None)
        return [self.name(field) for field in given if field not in self._read] + self._left

    def refuse_unknown(self) -> None:
        """Problem (400) for a field that nobody has read, whether or not the server is strict:
        without it the object would say something else."""
        unknown = self.unknown()
        if unknown:
            known = ", ".join(sorted(self._read))
            raise unknown_field(unknown[0], f"; {self._path} may have {known}")


def unknown_field(name: str, more: str = "") -> Problem:
    """The refusal of a field that the server does not know."""
    message = f"{name[:80]} is not a field of this request{more}"
    return Problem(400, message, param=name, code="invalid_value")


def check_text(text: str, name: str) -> int:
    """Bytes of a text in UTF-8. Problem (400) for lone surrogates."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise Problem(
            400,
            f"{name} has a lone surrogate at index {error.start}; it is not valid Unicode",
            param=name,
            code="invalid_value",
        ) from None


def _shown(value: Any) -> str:
    """A value in a message: never more than a few words of the user's text."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)} entries"
    if isinstance(value, str) and len(value) > 40:
        return f"a text of {len(value)} characters"
    return json.dumps(value)[:60]
