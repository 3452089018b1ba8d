"""An engine's passport: what a plan was made from, by what and for what, and whether it may be loaded.

It stands in the bundle's manifest and, word for word, as JSON beside the plan. A plan is code:
nothing deserializes one whose passport does not hold.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mha_deploy.errors import BundleError
from mha_deploy.json_part import JsonPart, Kind
from mha_deploy.staging import staged_file

SUFFIX = ".passport.json"
_ATTENTION: Mapping[str, Kind] = {
    "name": JsonPart.text,
    "fused": JsonPart.flag,
    "kernel": JsonPart.text,
    "reason": JsonPart.text,
}
_STEP: Mapping[str, Kind] = dict.fromkeys(("node", "rule", "why"), JsonPart.text)


@dataclass(frozen=True, slots=True)
class Passport:
    """`key` names the request (ONNX hash, options, backend, version): equal requests, equal plans.

    `targets` is empty where TensorRT chose; `gpu` is the GPU that full TensorRT tuned on, else "".
    `kept_fp32` and `lowering` say what the graph does that was not asked for by name. `command` is
    what builds it again, with the folder left to say.
    """

    key: str
    backend: str
    version: str
    targets: tuple[str, ...]
    gpu: str
    precision: str
    onnx_file: str
    onnx_sha256: str
    weights_sha256: str
    plan_sha256: str
    plan_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    profiles: tuple[Mapping[str, list[int]], ...]
    options: Mapping[str, Any]
    attentions: tuple[Mapping[str, Any], ...]
    decomposed: bool
    activation_bytes: int
    lowering: tuple[Mapping[str, str], ...]
    kept_fp32: tuple[str, ...]
    checked: str
    warnings: tuple[str, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, data: object) -> Passport:
        """Raises:
        BundleError: a field is missing, unknown or of another kind.
        """
        part = JsonPart.of(data)
        try:
            return cls(
                **part.fields(cls),
                profiles=tuple(map(_profile, part["profiles"].parts())),
                options=part["options"].members(),
                attentions=tuple(each.entries(_ATTENTION) for each in part["attentions"].parts()),
                lowering=tuple(each.entries(_STEP) for each in part["lowering"].parts()),
            )
        except ValueError as error:
            raise BundleError(f"the engine's passport is damaged: {error}; build the engine again") from error

    def write(self, plan: Path) -> Path:
        """Write it beside `plan`."""
        path = plan.with_suffix(SUFFIX)
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        with staged_file(path) as staging:
            staging.write_text(text, encoding="utf-8")
        return path

    def agrees(self, found: Mapping[str, Any], where: str) -> None:
        """Hold values found elsewhere against the passport.

        Raises:
            BundleError: naming the first field that differs, both values and the command that rebuilds.
        """
        mine = self.to_json()
        for name, value in found.items():
            if mine[name] != value:
                raise BundleError(
                    f"the engine's passport says {name} = {_short(mine[name])}, {where} has "
                    f"{_short(value)}; build it again: {self.command}"
                )


def read_passport(plan: Path) -> Passport:
    """The passport beside `plan`.

    Raises:
        BundleError: there is none, or a damaged one.
    """
    path = plan.with_suffix(SUFFIX)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{plan} has no passport {path.name} beside it: it will not be loaded") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}; build the engine again") from error
    return Passport.from_json(data)


def _profile(part: JsonPart) -> dict[str, list[int]]:
    ranges = {name: [bound.whole() for bound in part[name].parts()] for name in part.members()}
    odd = [name for name, bounds in ranges.items() if len(bounds) != 3]
    if odd:
        raise part[odd[0]].wrong("a list of min, opt and max")
    return ranges


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rebuild_command(subject: str, flags: Sequence[str]) -> str:
    return f"mha-deploy build-engine {shlex.join((subject, *flags))}"


def gpu_name() -> str:
    """The GPU of this machine, "" where there is none."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def gpu_target() -> str:
    """The architecture of this machine's GPU as targets are written (sm89), "" where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
