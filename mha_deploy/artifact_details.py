"""What an artifact's details hold, read strictly: stages write them, and later ones run by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mha_deploy.json_part import JsonPart, Kind


def read_details(part: JsonPart, runtime: str) -> Mapping[str, Any]:
    """The details of an artifact of that runtime. Those that nothing but `inspect` looks at may be anything;
    the routes are left to `Artifact`.

    Raises:
        ValueError: one is of another kind, or one that the runtime needs is missing.
    """
    details = part.members()
    if runtime in _NEEDED:
        part[_NEEDED[runtime]].members()
    for name, read in KINDS.items():
        if name in details:
            read(part[name])
    return details


def _settings(part: JsonPart) -> None:
    for name in part.members():
        if name not in _SETTINGS:
            raise ValueError(f"{part.place} has unknown {name!r}; known: {', '.join(_SETTINGS)}")
        _SETTINGS[name](part[name])


def _passport(part: JsonPart) -> None:
    """The rest is `tensorrt.passport`'s to read, which is loaded where there is an engine to open."""
    part["command"].text()


_NEEDED = {"routed": "routes", "tensorrt": "passport", "tensorrt-rtx": "passport"}
_SETTINGS: Mapping[str, Kind] = {
    "device": JsonPart.text,
    "threads": JsonPart.whole,
    "spinning": JsonPart.flag,
}
KINDS: Mapping[str, Kind] = {
    "axes_not_reached": JsonPart.texts,
    "axes_proved_at": JsonPart.texts,
    "batch_dependent": JsonPart.flag,
    "checked": JsonPart.text,
    "io": JsonPart.text,
    "keep_fp32": JsonPart.texts,
    "kept_fp32": JsonPart.texts,
    "lowering": JsonPart.texts,
    "made_from": JsonPart.text,
    "max_relative_error": JsonPart.number,
    "opset": JsonPart.whole,
    "passport": _passport,
    "settings": _settings,
    "twin_of": JsonPart.text,
}
