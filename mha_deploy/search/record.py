"""`search.json` in the bundle: what has been found so far, so that a search need not find it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mha_deploy.manifest import Artifact
from mha_deploy.search.gate import Verdict
from mha_deploy.search.measuring import Timing
from mha_deploy.staging import make_folder, staged_file

FORMAT = 1
FILE_NAME = "search.json"


@dataclass(slots=True)
class Record:
    """Verdicts by candidate and timings by size, each under a hash of all that it stands on.

    `load` and `save` are the only ones to touch the file. One that cannot be read, or is of another
    format, counts as none: it is a cache.
    """

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Record:
        path = folder / FILE_NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            entries = data["entries"] if data["format"] == FORMAT else {}
            return cls(path, {key: dict(entry) for key, entry in entries.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls(path)

    def verdict(self, stands_on: object) -> Verdict | None:
        entry = self._entry("verdict", stands_on)
        try:
            return Verdict.from_json(entry) if entry else None
        except (TypeError, KeyError):
            return None

    def keep_verdict(self, stands_on: object, verdict: Verdict) -> None:
        self._keep("verdict", stands_on, verdict.to_json())

    def timings(self, stands_on: object) -> tuple[dict[str, Timing], float, list[str]] | None:
        """Timings by candidate, the ceiling in GFLOP/s, and what else went on meanwhile."""
        entry = self._entry("timings", stands_on)
        try:
            if not entry:
                return None
            found = {name: Timing.from_json(data) for name, data in entry["candidates"].items()}
            return found, float(entry["ceiling_gflops"]), list(entry["notices"])
        except (TypeError, KeyError, AttributeError, ValueError):
            return None

    def keep_timings(
        self,
        stands_on: object,
        timings: Mapping[str, Timing],
        ceiling_gflops: float,
        notices: Sequence[str],
    ) -> None:
        found = {
            "candidates": {name: timing.to_json() for name, timing in timings.items()},
            "ceiling_gflops": ceiling_gflops,
            "notices": list(notices),
        }
        self._keep("timings", stands_on, found)

    def _entry(self, kind: str, stands_on: object) -> dict[str, Any]:
        found: dict[str, Any] = self.entries.get(_key(kind, stands_on), {}).get("found", {})
        return found

    def _keep(self, kind: str, stands_on: object, found: dict[str, Any]) -> None:
        self.entries[_key(kind, stands_on)] = {"stands_on": stands_on, "found": found}
        text = json.dumps({"format": FORMAT, "entries": self.entries}, indent=1) + "\n"
        make_folder(self.path.parent)
        with staged_file(self.path) as path:
            path.write_text(text, encoding="utf-8")


def identity(artifact: Artifact) -> dict[str, Any]:
    """What tells one artifact's answers and speed from another's."""
    return {
        "name": artifact.name,
        "runtime": artifact.runtime,
        "precision": artifact.precision.value,
        "files": [record.sha256 for record in artifact.files],
        "settings": dict(artifact.details.get("settings", {})),
        "max_relative_error": artifact.details.get("max_relative_error", 0.0),
    }


def _key(kind: str, stands_on: object) -> str:
    text = json.dumps([kind, stands_on], sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
