"""Which command makes a file of an artifact again, for the error about one that is missing or damaged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def maker_of(artifact: Mapping[str, Any], file: str) -> str:
    """The command, without its bundle, from the artifact's name, precision, layout and details.

    They are as `Artifact.to_json` has them; `file` is one of the artifact's that `export` alone does not
    make. Details that cannot be read leave it at `optimize`: the error is about the file.
    """
    try:
        return _maker_of(artifact, file)
    except (KeyError, TypeError, AttributeError):
        return "optimize"


def _maker_of(artifact: Mapping[str, Any], file: str) -> str:
    details = artifact["details"]
    if "passport" in details:
        return "build-engine" + _engine_options(details["passport"])
    if "routes" in details:  # two artifacts as one: whoever made the one that has the file
        for part in details["routes"].values():
            if isinstance(part, dict) and any(record["file"] == file for record in part["files"]):
                return _maker_of(part, file)
    if artifact.get("layout") == "packed" or "io" in details or "twin_of" in details:
        return _of_typed(artifact)
    if "scheme" in details:
        return f"optimize --precision int8 --max-relative-error {details['max_relative_error']}"
    return "optimize --portable" if artifact["name"] == "portable" else _of_search(artifact)


def _of_search(artifact: Mapping[str, Any]) -> str:
    details = artifact["details"]
    if details.get("made_from") in ("fp16", "bf16"):  # its file is that of the form, under other settings
        return f"optimize --precision {details['made_from']}"
    return "optimize" + ("" if artifact["precision"] == "fp32" else f" --allow {artifact['precision']}")


def _engine_options(passport: object) -> str:
    command = passport.get("command") if isinstance(passport, dict) else ""
    return str(command).partition("build-engine BUNDLE")[2]


def _of_typed(artifact: Mapping[str, Any]) -> str:
    """Of a form in one precision, or of the twin of one, whose details say no more than the form's name."""
    details, precision = artifact["details"], artifact["precision"]
    parts = str(details.get("twin_of", "")).split("-")
    io = "same" if "io" in parts else details.get("io", "fp32")
    nodes = "NODES" if "islands" in parts else ",".join(details.get("keep_fp32", ()))
    kept = f" --keep-fp32 {shlex.quote(nodes)}" if nodes else ""
    packed = artifact.get("layout") == "packed"
    if packed and (precision, io) == ("fp32", "fp32"):
        return "export --layout packed"
    if packed or io != "fp32":
        of_io = f" --io {io}" if io != "fp32" else ""
        return f"build-engine --{precision}{of_io}{' --layout packed' if packed else ''}{kept}"
    return f"optimize --precision {precision}{kept}"
