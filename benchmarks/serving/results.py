"""What is kept of a run: all that the page is written from and each trial's figures, to be committed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mha_deploy.errors import InputError
from mha_deploy.staging import staged_file

FORMAT = "mha-deploy serving benchmark 2"
ROOT = Path(__file__).parents[2]


def compacted(data: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a run, each of its load reports cut to percentiles, outcomes and wrong answers."""
    rounds = [{system: _held(found) for system, found in each.items()} for each in data["rounds"]]
    return {"format": FORMAT, **data, "rounds": rounds}


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        InputError: it cannot be read or is of another format.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = data.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}; expected a JSON of results") from error
    if found != FORMAT:
        raise InputError(f"{path} has format {found!r}; expected {FORMAT!r}")
    return data


def write(data: Mapping[str, Any], path: Path) -> None:
    """As JSON, in a folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as staging:
        staging.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def name_of(cpu: str) -> str:
    """A file of results, by the kind of CPU; "" is the first that was measured."""
    return f"serving-{cpu}.json" if cpu else "serving.json"


def cpu_of(path: Path) -> str:
    """The kind of CPU that a file's name says.

    Raises:
        InputError: it is no name of such a file.
    """
    found = re.fullmatch(r"serving(?:-([a-z0-9]+))?\.json", path.name)
    if not found:
        raise InputError(f"{path.name!r}; expected serving.json or serving-CPU.json")
    return found[1] or ""


def failure(reason: str) -> dict[str, Any]:
    """In place of what was found of a system: it could not be driven in a round, as a rate of 0."""
    return {
        "rate_per_s": 0.0,
        "limited_by_generator": False,
        "why_none": reason,
        "alone": None,
        "trials": [],
    }


def without_paths(reason: str) -> str:
    """As it may be committed: a log's last line can name where this checkout lies."""
    return reason.replace(f"{ROOT}/", "")


def _held(found: Mapping[str, Any]) -> dict[str, Any]:
    if "why_none" in found:
        return dict(found)
    trials = [
        {name: trial[name] for name in ("rate_per_s", "held", "why_not", "tells", "cpu_ms")}
        | _run(trial["report"])
        for trial in found["trials"]
    ]
    kept = ("rate_per_s", "limited_by_generator")
    return {**{name: found[name] for name in kept}, "alone": _run(found["alone"]), "trials": trials}


def _run(report: Mapping[str, Any]) -> dict[str, Any]:
    check = {name: report["check"][name] for name in ("sampled", "failed")}
    outcomes = {name: count for name, count in report["outcomes"].items() if count}
    return {"latency": report["latency"], "outcomes": outcomes, "check": check}
