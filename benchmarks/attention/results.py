"""What a run of the suite found: plain data, written as JSON and read back for claims and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attention.roster import CEILING, OURS
from mha_deploy.benchmark import Comparison, Samples, compare
from mha_deploy.staging import staged_file

FORMAT = "mha-deploy attention benchmark 1"


class ResultsError(Exception):
    """A file holds no results of this suite."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """One size and shape: samples of those who ran and were right, and why others have none."""

    data: Mapping[str, Any]
    roles: Mapping[str, str]

    @property
    def name(self) -> str:
        name: str = self.data["name"]
        return name

    @property
    def ragged(self) -> bool:
        return bool(self.data["ragged"])

    def samples(self, name: str) -> Samples:
        return Samples(name, tuple(map(tuple, self.data["rounds_ms"][name])))

    def ran(self, role: str) -> list[str]:
        """Names of those with this role that were timed, in the roster's order."""
        return [name for name, its in self.roles.items() if its == role and name in self.data["rounds_ms"]]

    def time_over(self, base_role: str, name: str) -> Comparison:
        """Time of `name` over that of the one with `base_role`; above 1 `name` is the slower."""
        return compare(self.samples(self.ran(base_role)[0]), self.samples(name))

    def why_not(self, name: str) -> str:
        reasons: Mapping[str, str] = self.data["not_timed"]
        return reasons.get(name, "")

    @property
    def ceiling_share(self) -> float:
        """FLOP/s of the chosen fp32 engine over those of the ceiling, by the same rule as any ratio."""
        flops: float = self.data["flops"] / self.data["ceiling_flops"]
        return flops * self.time_over(OURS, self.ran(CEILING)[0]).estimate.ratio


@dataclass(frozen=True, slots=True)
class Results:
    """The whole, as the file holds it."""

    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Results:
        """
        Raises:
            ResultsError: it cannot be read or is of another format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, expected {FORMAT!r}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} holds no results of this suite: {error}") from error
        return cls(data)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staging:
            staging.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")

    @property
    def roles(self) -> dict[str, str]:
        return {each["name"]: each["role"] for each in self.data["contestants"]}

    def cells(self, *, ragged: bool) -> Iterator[CellResult]:
        for data in self.data["cells"]:
            if data["ragged"] == ragged:
                yield CellResult(data, self.roles)
