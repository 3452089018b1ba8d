"""A JSON file read strictly: each value is asked for as what it has to be, and refused by its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

_VALUE_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True, slots=True)
class JsonPart:
    """A value in a file and its place there. Asked for what it is not, it raises ValueError."""

    place: str
    value: object

    @classmethod
    def of(cls, data: object) -> JsonPart:
        """`data` as a part: a whole file's, unless it is a part already."""
        return data if isinstance(data, JsonPart) else cls("", data)

    def __getitem__(self, key: str) -> JsonPart:
        if key not in self.members():
            raise ValueError(f"{self._called} has no {key!r}")
        return self.member(key)

    def member(self, key: str, default: object = None) -> JsonPart:
        """The part of that name, or the default in its place."""
        return JsonPart(f"{self.place}.{key}".lstrip("."), self.members().get(key, default))

    def members(self) -> Mapping[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def parts(self, *, least: int = 0) -> list[JsonPart]:
        if not isinstance(self.value, list) or len(self.value) < least:
            raise self.wrong("a list that is not empty" if least else "a list")
        return [JsonPart(f"{self.place}[{i}]", each) for i, each in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        return tuple(each.text() for each in self.parts())

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, *, least: int = 0) -> int:
        if type(self.value) is not int or self.value < least:  # True is an int too
            raise self.wrong(f"a whole number of at least {least}")
        return self.value

    def number(self, *, least: float = 0.0, most: float = sys.float_info.max, expected: str = "") -> float:
        """A finite one; `expected` says which, where it is not any of at least `least`."""
        if type(self.value) not in (int, float) or not least <= self.value <= most:  # type: ignore[operator]
            raise self.wrong(expected or f"a number of at least {least:g}")
        return float(self.value)  # type: ignore[arg-type]

    def fields(self, kind: type) -> dict[str, Any]:
        """The values of those fields of the dataclass `kind` whose types are plain ones.

        Its other fields have to be there too, and nothing else.
        """
        types = {field.name: str(field.type) for field in fields(kind) if field.init}
        self._has_exactly(types)
        return {name: _PLAIN[of](self[name]) for name, of in types.items() if of in _PLAIN}

    def entries(self, kinds: Mapping[str, Kind]) -> dict[str, Any]:
        """Its members, each read as its kind: all of those, and no others."""
        self._has_exactly(kinds)
        return {name: read(self[name]) for name, read in kinds.items()}

    def _has_exactly(self, names: Mapping[str, object]) -> None:
        unknown = sorted(self.members().keys() - names.keys())
        missing = sorted(names.keys() - self.members().keys())
        if unknown or missing:
            what, odd = ("has unknown", unknown) if unknown else ("lacks", missing)
            raise ValueError(f"{self._called} {what} {', '.join(map(repr, odd))}")

    def wrong(self, expected: str) -> ValueError:
        return ValueError(f"{self._called} is {clipped(repr(self.value), _VALUE_SHOWN)}, expected {expected}")

    @property
    def _called(self) -> str:
        return self.place or "it"


Kind = Callable[[JsonPart], object]
_PLAIN: Mapping[str, Kind] = {
    "bool": JsonPart.flag,
    "float": JsonPart.number,
    "int": JsonPart.whole,
    "str": JsonPart.text,
    "tuple[str, ...]": JsonPart.texts,
}


def clipped(text: str, length: int = 300) -> str:
    """What a file holds, short enough for a message."""
    return text if len(text) <= length else f"{text[:length]}..."
