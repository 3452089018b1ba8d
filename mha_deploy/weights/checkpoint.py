"""Checkpoint files: which tensors they hold, and each of them on request.

The kind of a file is read from its first bytes, since names such as `pytorch_model.bin` and
`weights.ckpt` say little. Formats: safetensors (8 bytes of header length, then JSON), PyTorch's zip
archive, and its older pickle.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mha_deploy.errors import WeightsError

if TYPE_CHECKING:
    import torch

SAVE_IT_SO = 'save the tensors alone, with torch.save(model.state_dict(), "weights.pt"), and give that file'
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file says about one tensor, known before its data is read."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """An open checkpoint."""

    def names(self) -> list[str]: ...

    def stored(self, name: str) -> Stored: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor; it may share memory with the file, so copy what outlives it."""
        ...


class SafetensorsCheckpoint:
    """Reads the header when opened and a tensor's bytes when asked for it."""

    # safetensors' own class carries no type information.
    def __init__(self, file: Any) -> None:
        self._file = file

    def names(self) -> list[str]:
        return list(self._file.keys())

    def stored(self, name: str) -> Stored:
        part = self._file.get_slice(name)
        dtype = part.get_dtype()
        return Stored(tuple(part.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype))

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


class TorchCheckpoint:
    """A state dict; its zip form is mapped, so that tensors nobody asks for stay on disk."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def stored(self, name: str) -> Stored:
        import torch

        tensor = self._tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        sparse = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
        return Stored(tuple(tensor.shape), dtype + sparse)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


def first_bytes(path: Path) -> bytes:
    """The start of the file.

    Raises:
        WeightsError: it does not exist, is a folder, is empty or may not be read.
    """
    if path.is_dir():
        held = sorted(child.name for child in path.iterdir() if child.suffix in SUFFIXES)
        holds = f" (it holds {', '.join(held[:3])}{', ...' if len(held) > 3 else ''})" if held else ""
        raise WeightsError(f"checkpoint {path} is a folder; give the checkpoint file itself{holds}")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise WeightsError(f"cannot read checkpoint {path}: {error.strerror}") from error
    if not start:
        raise WeightsError(f"checkpoint {path} is empty; copy or download it again")
    return start


def is_safetensors(start: bytes) -> bool:
    """A header length below 4 GiB, then the header's brace."""
    return start[4:9] == b"\0\0\0\0{"


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open a safetensors file or a PyTorch state dict, whatever its suffix.

    Raises:
        WeightsError: the file is missing, damaged, foreign, or holds more than tensors.
    """
    from safetensors import SafetensorError, safe_open

    start = first_bytes(path)
    if is_safetensors(start) or (path.suffix == ".safetensors" and len(start) <= 8):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise WeightsError(
                f"checkpoint {path} is a damaged or cut-off safetensors file ({error}); "
                "copy or download it again"
            ) from error
        except (OSError, RuntimeError, MemoryError) as error:
            raise WeightsError(
                f"cannot map checkpoint {path} into memory ({error}); copy the layer's tensors into a "
                "smaller file, or use a machine with more memory"
            ) from error
        with file as opened:
            yield _unless_empty(path, SafetensorsCheckpoint(opened))
    elif start.startswith((b"PK\x03\x04", b"\x80")):
        state = _state_dict(path, _torch_load(path, start))
        yield _unless_empty(path, TorchCheckpoint(state))
    elif start.startswith(b"version https://git-lfs"):
        raise WeightsError(
            f"checkpoint {path} is a Git LFS pointer, not the weights; fetch them with: git lfs pull"
        )
    else:
        raise WeightsError(
            f"checkpoint {path} is neither a safetensors file nor a PyTorch checkpoint "
            f"(it begins with {start[:8]!r}); give one of those two"
        )


def _unless_empty(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    if not checkpoint.names():
        raise WeightsError(f"checkpoint {path} holds no tensors; expected a state dict")
    return checkpoint


def _torch_load(path: Path, start: bytes) -> object:
    import pickle

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.suffix == ".safetensors":  # PyTorch goes by this suffix unless it is given a stream
                with path.open("rb") as file:
                    return torch.load(file, weights_only=True, map_location="cpu")
            return torch.load(path, weights_only=True, map_location="cpu", mmap=start.startswith(b"PK"))
    except pickle.UnpicklingError as error:
        raise WeightsError(f"checkpoint {path} {_why_refused(str(error))}; {SAVE_IT_SO}") from error
    # A damaged pickle makes PyTorch raise nearly anything: KeyError, EOFError, struct.error, ...
    except Exception as error:
        if "TorchScript" in str(error):
            raise WeightsError(f"checkpoint {path} is a TorchScript program; {SAVE_IT_SO}") from error
        what = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise WeightsError(
            f"checkpoint {path} is damaged, cut off, or no PyTorch checkpoint ({what}); "
            "copy or download it again"
        ) from error


def _why_refused(message: str) -> str:
    found = re.search(r"GLOBAL (\S+)", message)
    if found and found[1].startswith("torch.nn."):
        return f"holds a whole module ({found[1]}), not a state dict, and loading that would run its code"
    if found:
        return f"holds a Python object ({found[1]}) beside tensors, and loading that would run its code"
    return "is a pickle that PyTorch does not load safely"


def _state_dict(path: Path, loaded: object) -> dict[str, torch.Tensor]:
    import torch

    if isinstance(loaded, torch.nn.Module):
        raise WeightsError(f"checkpoint {path} holds a whole module ({type(loaded).__name__}); {SAVE_IT_SO}")
    if not isinstance(loaded, Mapping):
        raise WeightsError(
            f"checkpoint {path} holds a {type(loaded).__name__}, expected a state dict; {SAVE_IT_SO}"
        )
    tensors = {
        name: value
        for name, value in loaded.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }
    for wrapper in ("state_dict", "model"):
        if not tensors and isinstance(loaded.get(wrapper), (Mapping, torch.nn.Module)):
            return _state_dict(path, loaded[wrapper])
    return tensors
