"""Where the files of a variant lie in a bundle, such that no file that a manifest may record is ever changed.

A variant made anew may have other bytes than before, made by another version of mha-deploy for instance,
while an artifact, or what was chosen on another machine, stands on the old ones. Files and manifest cannot
be replaced in one step, so that the new ones get a folder of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mha_deploy.bundle import Bundle
from mha_deploy.file_record import sha256_of
from mha_deploy.manifest import VARIANTS, Manifest
from mha_deploy.staging import put_in_place, staged_folder


@dataclass(slots=True)
class StagedVariant:
    """`path` is the folder to write to, `folder` the one within the bundle that the files have in the end."""

    path: Path
    folder: str = ""


@contextlib.contextmanager
def staged_variant(bundle: Bundle, name: str) -> Iterator[StagedVariant]:
    """A new folder for the files of the variant `name`, which joins the bundle when the block ends well.

    As `variants/NAME`, or where other files stand or are recorded there, as `variants/NAME-HASH`, a name
    that no other files get. Where the same ones stand already, they stay.

    Raises:
        BundleError: the folder cannot be written, or as `Bundle.held`.
    """
    bundle.current()  # before a folder is made
    staged = StagedVariant(bundle.folder)

    def place(staging: Path, target: Path) -> None:
        files = _hashes(staging)
        with bundle.held() as manifest:
            staged.folder = _free_for(files, bundle.folder, manifest, name)
            target = target.with_name(Path(staged.folder).name)
            if _hashes(target) != files:  # not there, or damaged since
                put_in_place(staging, target)

    with staged_folder(bundle.folder / VARIANTS / name, place) as staging:
        staged.path = staging
        yield staged


def _free_for(files: Mapping[str, str], bundle: Path, manifest: Manifest, name: str) -> str:
    """The first folder that these files may have."""
    folder = f"{VARIANTS}/{name}"
    recorded, stands = _recorded(manifest, folder), (bundle / folder).exists()
    same = recorded == files.items() or (recorded <= files.items() and _hashes(bundle / folder) == files)
    if same or not (recorded or stands):
        return folder
    return f"{folder}-{hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]}"


def _recorded(manifest: Manifest, folder: str) -> set[tuple[str, str]]:
    """Names and hashes of the files that the manifest records there."""
    records = (record for artifact in manifest.artifacts for record in artifact.files)
    paths = {(Path(record.file), record.sha256) for record in records}
    return {(path.name, sha256) for path, sha256 in paths if path.parent == Path(folder)}


def _hashes(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    return {path.name: sha256_of(path) for path in folder.iterdir() if path.is_file()}
