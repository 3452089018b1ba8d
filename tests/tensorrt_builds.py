"""Builds for the TensorRT tests: the product's own, and the library's bare."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import Mha, write_mha

from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.build import BuiltPlan, build_plan
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.log import recording, stderr_into
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import ShapeRange, profiles_for_graph
from mha_deploy.tensorrt.verdict import AttentionVerdict

pytest.importorskip("tensorrt_rtx")

FOLDER = tempfile.TemporaryDirectory(prefix="mha-graphs-")
SM89 = ("sm89",)


def written(form: Mha) -> Path:
    """The form as a file, kept for the whole run."""
    return write_mha(Path(FOLDER.name), form)


def options(path: Path, *profiles: str, **fields: Any) -> BuildOptions:
    parsed = profiles_for_graph(read_graph(path).inputs, profiles)
    return BuildOptions(profiles=parsed, backend="tensorrt-rtx", **fields)


def build_anew(form: Mha, *profiles: str, targets: tuple[str, ...] = SM89, **fields: Any) -> BuiltPlan:
    path = written(form)
    return build_plan(path, options(path, *(profiles or (form.profile,)), targets=targets, **fields))


def build_model(model: onnx.ModelProto, folder: Path, *profiles: str, **fields: Any) -> BuiltPlan:
    """A model in memory, by the same door."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    return build_plan(path, options(path, *profiles, **fields))


build = cache(build_anew)  # plans of equal requests are equal, which has its own test


def verdict(built: BuiltPlan) -> AttentionVerdict:
    """That of a plan with one attention."""
    (one,) = built.attentions
    return one


def sha256(built: BuiltPlan) -> str:
    return hashlib.sha256(built.plan).hexdigest()


def bare_errors(
    path: Path,
    shapes: tuple[Mapping[str, ShapeRange], ...] = (),
    configure: Callable[[Any, Any], None] = lambda _module, _config: None,
) -> tuple[str, ...]:
    """What the library itself logs as errors for a file, with none of our checks before it."""
    backend = load_backend("tensorrt-rtx")
    module = backend.module
    with recording() as log, stderr_into(log):
        builder = module.Builder(backend.logger)
        network = builder.create_network(backend.network_flags())
        parser = module.OnnxParser(network, backend.logger)
        if parser.parse_from_file(str(path)):
            config = builder.create_builder_config()
            for ranges in shapes:
                profile = builder.create_optimization_profile()
                for name, range_ in ranges.items():
                    profile.set_shape(name, *range_)
                config.add_optimization_profile(profile)
            configure(module, config)
            builder.build_serialized_network(network, config)
    return log.errors
