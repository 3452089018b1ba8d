"""One file of a bundle as its manifest records it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import BundleError
from mha_deploy.json_part import JsonPart


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

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "sha256": self.sha256, "bytes": self.bytes}

    @classmethod
    def from_json(cls, data: object) -> FileRecord:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is missing, unknown or of another kind.
        """
        return cls(**JsonPart.of(data).fields(cls))

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
        try:
            if not path.is_file():
                raise BundleError(f"{path} is missing; make it again with `{made_by}`")
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


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
