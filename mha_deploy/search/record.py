"""`search.json` in the bundle: what has been found so far, so that a search need not find it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mha_deploy.manifest import Artifact
from mha_deploy.search.gate import Verdict
from mha_deploy.search.recorded import Found, as_found, as_verdict
from mha_deploy.staging import staged_file

T = TypeVar("T")
Hold = Callable[[], AbstractContextManager[object]]
FORMAT = 1
FILE_NAME = "search.json"


@dataclass(slots=True)
class Record:
    """Verdicts by candidate and timings by size, each under a hash of all that it stands on.

    `load` and `save` are the only ones to touch the file. One that cannot be read, or is of another
    format, counts as none, and so does an entry of it that holds what no search writes: it is a cache.
    It is written within `held()`, as `Bundle.held`.
    """

    path: Path
    held: Hold
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, held: Hold) -> Record:
        path = folder / FILE_NAME
        return cls(path, held, _read(path))

    def save(self, added: Mapping[str, dict[str, Any]]) -> None:
        """Write what is `added` beside what there is, which another search may have written meanwhile.

        Raises:
            BundleError: the file cannot be written, or as `held`.
        """
        with self.held():
            self.entries = {**self.entries, **_read(self.path), **added}
            text = json.dumps({"format": FORMAT, "entries": self.entries}, indent=1) + "\n"
            with staged_file(self.path) as path:
                path.write_text(text, encoding="utf-8")

    def verdict(self, stands_on: object) -> Verdict | None:
        return _none_if_malformed(as_verdict, self._entry("verdict", stands_on))

    def keep_verdict(self, stands_on: object, verdict: Verdict) -> None:
        self._keep("verdict", stands_on, verdict.to_json())

    def timings(self, stands_on: object, names: Iterable[str]) -> Found | None:
        """What was found for these candidates together."""
        found = _none_if_malformed(as_found, self._entry("timings", stands_on))
        return found if found and found.timings.keys() == set(names) else None

    def keep_timings(self, stands_on: object, found: Found) -> None:
        self._keep("timings", stands_on, found.to_json())

    def _entry(self, kind: str, stands_on: object) -> object:
        return self.entries.get(_key(kind, stands_on), {}).get("found")

    def _keep(self, kind: str, stands_on: object, found: dict[str, Any]) -> None:
        self.save({_key(kind, stands_on): {"stands_on": stands_on, "found": found}})


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["entries"] if data["format"] == FORMAT else {}
        return {key: dict(entry) for key, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _none_if_malformed(read: Callable[[object], T], data: object) -> T | None:
    try:
        return read(data)
    except ValueError:
        return None


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
