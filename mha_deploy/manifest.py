"""The manifest of a bundle: what lies in the folder, and what was made from what.

Later stages read the bundle and nothing else; nothing is inferred from a file's name.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_deploy.errors import BundleError, MhaDeployError
from mha_deploy.packed import LAYOUTS
from mha_deploy.precision import Precision
from mha_deploy.signature import Signature
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import locked, staged_file

FORMAT = 1
FILE_NAME = "manifest.json"
VARIANTS = "variants"  # the folder of other forms of the block than the canonical
PROVENANCE = ("mha_deploy", "created", "checkpoint", "machine")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the bundle, by its name in the folder, with its hash and size."""

    file: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        parts = Path(self.file).parts
        if not parts or Path(self.file).is_absolute() or ".." in parts:
            raise ValueError(f"file {self.file!r}; expected a name within the bundle's folder")

    @classmethod
    def of(cls, folder: Path, file: str) -> FileRecord:
        path = folder / file
        return cls(file, sha256_of(path), path.stat().st_size)

    def verified(self, folder: Path, made_by: str = "export") -> Path:
        """The file's path, once it is there and holds what was recorded. `made_by` is the command to advise.

        Raises:
            BundleError: it is missing, or its bytes are not the ones recorded.
        """
        path = folder / self.file
        if not path.is_file():
            raise BundleError(f"{path} is missing; make it again with `{made_by}`")
        try:
            same = path.stat().st_size == self.bytes and sha256_of(path) == self.sha256
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        if not same:
            raise BundleError(
                f"{path} is not the file that the manifest records "
                f"({path.stat().st_size} bytes, expected {self.bytes} with SHA-256 {self.sha256[:12]}...); "
                f"it was changed or cut short: make it again with `{made_by}`"
            )
        return path


@dataclass(frozen=True, slots=True)
class Artifact:
    """Something that runs: an ONNX variant or an engine.

    `files[0]` is the one to open; others (external data) lie beside it. `details` says how it was
    made, in the words of the stage that made it. `layout` says how its graph takes tokens: "padded",
    or "packed", which runs behind `sessions.packed.PackedSession`.
    """

    name: str
    runtime: str
    precision: Precision
    signature: Signature
    files: tuple[FileRecord, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "padded"

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError(f"artifact {self.name!r} has no files")
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"artifact {self.name!r} has layout {self.layout!r}; expected {', '.join(LAYOUTS)}"
            )

    def path(self, folder: Path) -> Path:
        """The file to open, after every file of this artifact was checked against its record."""
        first, *_ = [record.verified(folder, self._made_by(record)) for record in self.files]
        return first

    def _made_by(self, record: FileRecord) -> str:
        if "passport" in self.details:
            return "build-engine"
        # A variant may well run a file of another: the canonical graph's, under settings of its own.
        within = Path(record.file).parts[0] == VARIANTS and self.layout == "padded"
        return "optimize" if within else "export"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runtime": self.runtime,
            "precision": self.precision.value,
            "layout": self.layout,
            "signature": self.signature.to_json(),
            "files": [_file_json(record) for record in self.files],
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Artifact:
        return cls(
            data["name"],
            data["runtime"],
            Precision(data["precision"]),
            Signature.from_json(data["signature"]),
            tuple(FileRecord(**record) for record in data["files"]),
            data["details"],
            data.get("layout", "padded"),  # manifests written before there was another lack it
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The artifact that a search found fastest on one machine, by `machine.fingerprint`, for a device
    and a number of threads. `artifact_sha256` are the files that were measured."""

    machine: str
    device: str
    threads: int
    artifact: str
    artifact_sha256: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "device": self.device,
            "threads": self.threads,
            "artifact": self.artifact,
            "artifact_sha256": list(self.artifact_sha256),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        return cls(**{**data, "artifact_sha256": tuple(data["artifact_sha256"])})


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything recorded about a bundle. `provenance`: tool, command, time, machine, checkpoint.

    `choices` are the artifacts to run where none is named, at most one a machine, device and threads.
    """

    spec: AttentionSpec
    weights: FileRecord
    artifacts: tuple[Artifact, ...]
    provenance: Mapping[str, Any]
    inputs: tuple[FileRecord, ...] = ()
    choices: tuple[Choice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "spec": self.spec.to_json(),
            "weights": _file_json(self.weights),
            "inputs": [_file_json(record) for record in self.inputs],
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "choices": [choice.to_json() for choice in self.choices],
            "provenance": dict(self.provenance),
        }

    def write(self, folder: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        with staged_file(folder / FILE_NAME) as path:
            path.write_text(text, encoding="utf-8")

    def with_artifact(self, artifact: Artifact) -> Manifest:
        """This manifest with `artifact` added, or put in place of the one of its name."""
        others = tuple(each for each in self.artifacts if each.name != artifact.name)
        return replace(self, artifacts=(*others, artifact))

    def with_choice(self, choice: Choice) -> Manifest:
        """This manifest with `choice` added, or put in place of the one for its machine and placement."""
        where = (choice.machine, choice.device, choice.threads)
        others = (each for each in self.choices if (each.machine, each.device, each.threads) != where)
        return replace(self, choices=(*others, choice))

    def chosen(self, machine: str, device: str, threads: int) -> Artifact | None:
        """The artifact chosen there, if its files are still the ones that were measured."""
        for choice in self.choices:
            if (choice.machine, choice.device, choice.threads) != (machine, device, threads):
                continue
            for artifact in self.artifacts:
                same = tuple(record.sha256 for record in artifact.files) == choice.artifact_sha256
                if artifact.name == choice.artifact and same:
                    return artifact
        return None

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a bundle folder.

        Raises:
            BundleError: no bundle there, one made by a newer version, or a damaged manifest.
        """
        path = folder / FILE_NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleError(
                f"{folder} is not a bundle: it has no {FILE_NAME}; make one with `export`"
            ) from error
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{path} is damaged: {error}; export again") from error
        try:
            return cls._from_json(folder, data)
        except (KeyError, TypeError, ValueError, AttributeError, MhaDeployError) as error:
            if isinstance(error, BundleError):
                raise
            raise BundleError(f"{path} is damaged: {error!r}; export again") from error

    @classmethod
    def _from_json(cls, folder: Path, data: Mapping[str, Any]) -> Manifest:
        if data["format"] > FORMAT:
            by = data.get("provenance", {}).get("mha_deploy", "a newer version")
            raise BundleError(
                f"{folder} has bundle format {data['format']}, written by mha-deploy {by}; "
                f"this version reads up to {FORMAT}: upgrade mha-deploy or export again"
            )
        if data["format"] not in range(1, FORMAT + 1):
            raise ValueError(f"format {data['format']!r}; expected a whole number of at least 1")
        for key, kind in (("artifacts", list), ("inputs", list), ("provenance", dict)):
            if not isinstance(data[key], kind):
                raise TypeError(f"{key} is a {type(data[key]).__name__}; expected a {kind.__name__}")
        absent = [key for key in PROVENANCE if key not in data["provenance"]]
        if absent:
            raise ValueError(f"provenance lacks {', '.join(absent)}")
        return cls(
            AttentionSpec.from_json(data["spec"]),
            FileRecord(**data["weights"]),
            tuple(Artifact.from_json(artifact) for artifact in data["artifacts"]),
            data["provenance"],
            tuple(FileRecord(**record) for record in data["inputs"]),
            # Manifests written before there was a search lack it.
            tuple(Choice.from_json(choice) for choice in data.get("choices", [])),
        )


def update(folder: Path, *artifacts: Artifact) -> Manifest:
    """Add or replace artifacts in the manifest on disk at once, whoever else does the same meanwhile."""
    with locked(folder):
        manifest = functools.reduce(Manifest.with_artifact, artifacts, Manifest.read(folder))
        manifest.write(folder)
    return manifest


def choose(folder: Path, artifact: Artifact, choice: Choice) -> Manifest:
    """Record `artifact` and that it is the one to run where `choice` says."""
    with locked(folder):
        manifest = Manifest.read(folder).with_artifact(artifact).with_choice(choice)
        manifest.write(folder)
    return manifest


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file_json(record: FileRecord) -> dict[str, Any]:
    return {"file": record.file, "sha256": record.sha256, "bytes": record.bytes}
