"""Specs as TOML files, and the presets under `models/`."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from mha_deploy.errors import SpecError
from mha_deploy.signature import Dim
from mha_deploy.spec import PROJECTIONS, AttentionSpec, WeightsSource

ATTENTION_KEYS = tuple(
    field.name
    for field in fields(AttentionSpec)
    if field.name not in ("name", "dims", "weights", "inputs_file")
)
SECTIONS = {
    "attention": ATTENTION_KEYS,
    "dims": ("batch", "seq", "q_len", "kv_len"),
    "weights": ("file", "prefix", "seed"),
    "inputs": ("file",),
}


def preset_dir() -> Path:
    """The folder of presets: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def preset_names() -> list[str]:
    return sorted(path.stem for path in preset_dir().glob("*.toml"))


def load_spec(spec: str | Path | AttentionSpec) -> AttentionSpec:
    """Read a TOML file, or the preset of that name; a spec is returned as it is.

    Relative file names inside are taken from the TOML's own folder.

    Raises:
        SpecError: the file is missing or malformed, or holds an unknown key or a wrong value.
    """
    if isinstance(spec, AttentionSpec):
        return spec
    path = Path(spec)
    if path.suffix != ".toml" and not path.is_file():
        preset = preset_dir() / f"{spec}.toml"
        if not preset.is_file():
            raise SpecError(
                f"no spec {str(spec)!r}: neither a TOML file nor a preset; "
                f"presets: {', '.join(preset_names())}"
            )
        path = preset
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read spec {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"spec {path} is not valid TOML: {error}") from error
    try:
        return _spec(path, table)
    except SpecError as error:
        raise SpecError(f"spec {path}: {error}") from error


def _spec(path: Path, table: dict[str, Any]) -> AttentionSpec:
    _refuse_unknown("section", table, tuple(SECTIONS))
    for section, keys in SECTIONS.items():
        if not isinstance(table.get(section, {}), dict):
            raise SpecError(f"[{section}] is a value; expected a table")
        _refuse_unknown(f"key in [{section}]", table.get(section, {}), keys)
    attention = dict(table.get("attention", {}))
    missing = [key for key in ("d_model", "num_heads") if key not in attention]
    if missing:
        raise SpecError(f"[attention] lacks {', '.join(missing)}")
    attention["bias"] = _bias(attention.get("bias", True))
    _check_types(attention)
    return AttentionSpec(
        **attention,
        name=path.stem,
        dims=_dims(table.get("dims", {})),
        weights=_weights(path, table.get("weights", {})),
        inputs_file=_beside(path, table.get("inputs", {}).get("file", "")),
    )


def _refuse_unknown(what: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise SpecError(f"unknown {what}: {', '.join(unknown)}; known: {', '.join(known)}")


def _check_types(attention: dict[str, Any]) -> None:
    types: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
    }
    for field in fields(AttentionSpec):
        expected = types.get(str(field.type))
        if field.name in attention and expected:
            value = attention[field.name]
            if not isinstance(value, expected) or (field.type != "bool" and isinstance(value, bool)):
                raise SpecError(f"{field.name} = {value!r}; expected a value of type {field.type}")


def _bias(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return PROJECTIONS if value else ()
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise SpecError(
        f"bias = {value!r}; expected true, false or a list of {', '.join(map(repr, PROJECTIONS))}"
    )


def _dims(table: dict[str, Any]) -> tuple[Dim, ...]:
    dims = []
    for name, bounds in table.items():
        if not isinstance(bounds, dict):
            raise SpecError(f"dim {name!r} = {bounds!r}; expected {{ min = 1, opt = 8, max = 32 }}")
        _refuse_unknown(f"bound of dim {name!r}", bounds, ("min", "opt", "max"))
        missing = [bound for bound in ("min", "opt", "max") if bound not in bounds]
        if missing:
            raise SpecError(f"dim {name!r} lacks {', '.join(missing)}; give min, opt and max")
        dims.append(Dim(name, **bounds))
    return tuple(dims)


def _weights(path: Path, table: dict[str, Any]) -> WeightsSource:
    if "file" in table and "seed" in table:
        raise SpecError("[weights] has both file and seed; expected one of them")
    if table.get("file") == "":
        raise SpecError("[weights] has file = ''; expected a checkpoint's name, or seed for random weights")
    if "prefix" in table and "file" not in table:
        raise SpecError("[weights] has a prefix but no file to pick from")
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise SpecError(f"seed = {seed!r}; expected a whole number of at least 0")
    prefix = table.get("prefix", "")
    if not isinstance(prefix, str):
        raise SpecError(f"prefix = {prefix!r}; expected a text such as 'encoder.layer.3.attention.'")
    return WeightsSource(file=_beside(path, table.get("file", "")), prefix=prefix, seed=seed)


def _beside(path: Path, file: object) -> str:
    if not isinstance(file, str):
        raise SpecError(f"file = {file!r}; expected a file name")
    return str(path.parent / file) if file else ""
