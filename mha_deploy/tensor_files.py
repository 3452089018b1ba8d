"""Named arrays in .npz and .safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mha_deploy.errors import FeedError
from mha_deploy.signature import Array
from mha_deploy.staging import as_umask_says, staged_file

SUFFIXES = (".npz", ".safetensors")


def check_suffix(path: Path) -> None:
    """Raises:
    FeedError: neither of the two formats.
    """
    if path.suffix not in SUFFIXES:
        raise FeedError(f"{path} is neither a .npz nor a .safetensors file")


def read_tensors(path: Path) -> dict[str, Array]:
    """Arrays by name.

    Raises:
        FeedError: the file is missing, damaged, or of another format.
    """
    check_suffix(path)
    import ml_dtypes  # noqa: F401 - teaches numpy bfloat16, which a file may hold

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Opened here, since np.load leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return dict(archive)
    except OSError as error:
        raise FeedError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # decoders of foreign bytes raise whatever they trip over
        raise FeedError(f"{path} is not a readable {path.suffix} file ({type(error).__name__})") from error


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write the whole file or none of it.

    Raises:
        FeedError: neither of the two formats.
        BundleError: the file cannot be written.
    """
    check_suffix(path)
    with staged_file(path) as staging:
        if path.suffix == ".npz":
            contiguous: dict[str, Any] = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
            np.savez(staging, **contiguous)
        else:
            save_safetensors(staging, tensors)


def save_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write to `path` itself, in a place that is staged already.

    Raises:
        OSError: it cannot be written; safetensors has an error of its own for that.
    """
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    as_umask_says(path)
