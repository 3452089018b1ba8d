"""The GPU architectures an ahead-of-time build is made for."""

from __future__ import annotations

import re

from mha_deploy.errors import InputError
from mha_deploy.tensorrt.backend import Backend
from mha_deploy.tensorrt.log import Handle

# Architectures that TensorRT for RTX leaves to full TensorRT, with the name people know them by.
_DATA_CENTRE = {"sm90": "Hopper", "sm100": "Blackwell data centre", "sm103": "Blackwell data centre"}
_SPELLING = re.compile(r"(?:sm_?)?(\d{2,3})|(\d{1,2})\.(\d)", re.IGNORECASE)


def parse_targets(text: str) -> tuple[str, ...]:
    """`sm80,sm89` as ("sm80", "sm89"); 89 and 8.9 mean sm89, `current` the GPU of this machine.

    Raises:
        InputError: a target that is none of these, or none at all.
    """
    return tuple(dict.fromkeys(_normal(part.strip()) for part in text.split(",")))


def _normal(text: str) -> str:
    if text.lower() == "current":
        return "current"
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise InputError(
            f"--target-sm: {text!r} is no GPU architecture; expected a list such as sm80,sm89,sm120"
        )
    return "sm" + (match[1] or match[2] + match[3])


def known_targets(backend: Backend) -> dict[str, Handle]:
    """Every architecture that the module can compile for, by name.

    Raises:
        InputError: the module compiles for the GPU it runs on and takes no targets.
    """
    if not backend.has_targets:
        raise InputError(
            f"--target-sm: {backend} builds for the GPU that it runs on and takes no targets; leave the "
            "option out, or build with --backend tensorrt-rtx."
        )
    members = backend.module.ComputeCapability.__members__
    return {name.lower(): member for name, member in members.items() if name != "NONE"}


def resolve_targets(backend: Backend, names: tuple[str, ...]) -> tuple[Handle, ...]:
    """The module's own members for `names`.

    Raises:
        InputError: the module has no such target; the message lists what it has.
    """
    known = known_targets(backend) if names else {}
    for name in names:
        if name in known:
            continue
        listed = ", ".join(sorted((n for n in known if n != "current"), key=lambda n: int(n[2:])))
        if name in _DATA_CENTRE:
            raise InputError(
                f"--target-sm: {backend} has no {name} ({_DATA_CENTRE[name]}); build for it with full "
                f"TensorRT on such a machine: --backend tensorrt. Targets here: {listed}."
            )
        raise InputError(f"--target-sm: {backend} has no {name}; it has {listed}.")
    return tuple(known[name] for name in names)
