"""The manifest of a bundle: what lies in the folder, and what was made from what.

Later stages read the bundle and nothing else; nothing is inferred from a file's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mha_deploy.artifact_details import read_details
from mha_deploy.errors import BundleError, SpecError
from mha_deploy.file_record import FileRecord
from mha_deploy.json_part import JsonPart, clipped
from mha_deploy.maker import maker_of
from mha_deploy.packed import LAYOUTS, graph_signature
from mha_deploy.precision import Precision
from mha_deploy.signature import Signature
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import staged_file

FORMAT = 1
FILE_NAME = "manifest.json"
VARIANTS = "variants"  # the folder of other forms of the block than the canonical
CHECKPOINT = ("file", "sha256", "prefix", "layout", "stored_dtype")  # of the provenance


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

    @property
    def routes(self) -> tuple[Artifact, ...]:
        """The two of a routed artifact, the one for short requests first; none of another."""
        routes = self.details["routes"] if self.runtime == "routed" else {}
        return tuple(Artifact.from_json(routes[route]) for route in ("short", "long") if routes)

    def check(self, spec: AttentionSpec) -> None:
        """
        Raises:
            ValueError: it, or one of its routes, has other inputs or outputs than a block of `spec`.
            SpecError: it is packed, and the block has no packed layout.
        """
        of = graph_signature(spec) if self.layout == "packed" else spec.signature
        own, *known = map(_told, (self.signature, of, of.at(self.precision)))
        if own not in known:
            raise ValueError(f"artifact {self.name!r} is {clipped(own)}, by the spec it is {known[0]}")
        for route in self.routes:
            route.check(spec)

    def path(self, folder: Path) -> Path:
        """The file to open, after every file of this artifact was checked against its record."""
        first, *_ = [record.verified(folder, self._made_by(record)) for record in self.files]
        return first

    def _made_by(self, record: FileRecord) -> str:
        # A variant may well run a file of another: the canonical graph's, under settings of its own.
        if Path(record.file).parts[0] != VARIANTS and "passport" not in self.details:
            return "export"
        return maker_of(
            {
                "name": self.name,
                "precision": self.precision.value,
                "layout": self.layout,
                "details": self.details,
            },
            record.file,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runtime": self.runtime,
            "precision": self.precision.value,
            "layout": self.layout,
            "signature": self.signature.to_json(),
            "files": [record.to_json() for record in self.files],
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, data: object) -> Artifact:
        """Inverse of `to_json`.

        Raises:
            ValueError: a part is missing or of another kind.
            SpecError: as `Signature.from_json`.
        """
        part = JsonPart.of(data)
        artifact = cls(
            part["name"].text(),
            part["runtime"].text(),
            Precision(part["precision"].text()),
            Signature.from_json(part["signature"]),
            tuple(map(FileRecord.from_json, part["files"].parts())),
            read_details(part["details"], part["runtime"].text()),
            part.member("layout", "padded").text(),  # manifests written before there was another lack it
        )
        if artifact.runtime == "routed":
            routes = part["details"]["routes"]
            routes["up_to_length"].whole(least=1)
            for route in ("short", "long"):
                cls.from_json(routes[route])
        return artifact


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
    def from_json(cls, data: object) -> Choice:
        return cls(**JsonPart.of(data).fields(cls))


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
            "weights": self.weights.to_json(),
            "inputs": [record.to_json() for record in self.inputs],
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
            # Half a character (a surrogate) is valid JSON, and can be neither shown nor written back.
            json.dumps(data, ensure_ascii=False).encode()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleError(
                f"{folder} is not a bundle: it has no {FILE_NAME}; make one with `export`"
            ) from error
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{path} is damaged: {error}; export again") from error
        try:
            return cls._from_json(folder, JsonPart.of(data))
        except (ValueError, RecursionError, SpecError) as error:
            raise BundleError(f"{path} is damaged: {error}; export again") from error

    @classmethod
    def _from_json(cls, folder: Path, part: JsonPart) -> Manifest:
        if part["format"].whole(least=1) > FORMAT:
            by = _written_by(part.member("provenance").value)
            raise BundleError(
                f"{folder} has bundle format {part['format'].value}, written by mha-deploy {by}; "
                f"this version reads up to {FORMAT}: upgrade mha-deploy or export again"
            )
        manifest = cls(
            AttentionSpec.from_json(part["spec"]),
            FileRecord.from_json(part["weights"]),
            tuple(map(Artifact.from_json, part["artifacts"].parts())),
            _provenance(part["provenance"]),
            tuple(map(FileRecord.from_json, part["inputs"].parts())),
            # Manifests written before there was a search lack it.
            tuple(map(Choice.from_json, part.member("choices", []).parts())),
        )
        for artifact in manifest.artifacts:
            artifact.check(manifest.spec)
        return manifest


def _provenance(part: JsonPart) -> Mapping[str, Any]:
    for key in ("mha_deploy", "created"):
        part[key].text()
    for key in CHECKPOINT:
        part["checkpoint"][key].text()
    for package in (versions := part["machine"]["versions"]).members():
        versions[package].text()
    return part.members()


def _written_by(provenance: object) -> str:
    """The version, as far as one can tell: a newer format may say it elsewhere."""
    found = provenance.get("mha_deploy") if isinstance(provenance, dict) else None
    return found if isinstance(found, str) else "a newer version"


def _told(signature: Signature) -> str:
    """Its tensors and dims in a line, without what is meant for people: that changes between versions."""
    takes, gives = (
        ", ".join(str(replace(tensor, meaning="")) for tensor in group)
        for group in (signature.inputs, signature.outputs)
    )
    return f"{takes} -> {gives} with {', '.join(map(str, signature.dims))}"
