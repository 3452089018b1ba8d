"""This project as a user drives it: export, `optimize`, and whatever session the bundle then opens.

options: `optimize`, further arguments of `mha-deploy optimize`; `precision`, "fp32" or "reduced";
`layout`, "padded" or "packed".
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers.task import Array, Model, Task

import mha_deploy
from mha_deploy import AttentionSpec, Bundle, Dim
from mha_deploy.sessions import Session

PACKAGES = ("mha-deploy", "torch", "onnx", "onnxscript", "onnxruntime", "numpy")
DIMS = (Dim("batch", 1, 8, 32), Dim("seq", 1, 128, 1024))


def build(task: Task) -> Model:
    made_of = made_from(task)
    exported, folder = task.shared / f"exported-{made_of}", task.folder / f"bundle-{made_of}"
    if not exported.exists():
        spec = AttentionSpec(task.d_model, task.num_heads, name=f"attention-{task.d_model}", dims=DIMS)
        mha_deploy.export(spec, exported, weights=task.weights, layout="packed")
    if task.options["layout"] == "packed":
        return packed(Bundle.load(exported))
    if not folder.exists():
        shutil.copytree(exported, folder)
    notes = optimized(folder, task.options["optimize"])
    session = Bundle.load(folder).open_session()
    engine = f"{session.name} ({session.precision.value}, {session.provider})"
    if (session.precision.value == "fp32") != (task.options["precision"] == "fp32"):
        raise RuntimeError(
            f"no {task.options['precision']} engine was chosen but {engine}; {' '.join(notes)}"
        )
    return Model(padded_runs(session), (f"engine: {engine}", *notes))


def made_from(task: Task) -> str:
    """Which code and which weights: a bundle of the same is used again, and `optimize` resumes there."""
    digest = hashlib.sha256(task.weights.read_bytes())
    for path in sorted(Path(mha_deploy.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def optimized(folder: Path, arguments: list[str]) -> tuple[str, ...]:
    """What `optimize` said where it made no choice; the bundle then opens its canonical graph."""
    command = [sys.executable, "-m", "mha_deploy", "optimize", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())[-200:]
    return () if done.returncode == 0 else (f"`optimize` ended with {done.returncode}: {said}",)


def padded_runs(session: Session) -> Callable[[Array, Array], Callable[[], Array]]:
    def bind(x: Array, mask: Array) -> Callable[[], Array]:
        feeds = {"x": x, "mask": mask}
        return lambda: session.run(feeds)["y"]

    return bind


def packed(bundle: Bundle) -> Model:
    name = next(artifact.name for artifact in bundle.artifacts if artifact.layout == "packed")
    session = bundle.open_session(name)

    def bind(x: Array, mask: Array) -> Callable[[], Array]:
        feeds = {"x": x[mask], "lengths": mask.sum(axis=1)}
        return lambda: session.run(feeds)["y"]

    def padded(answer: Array, mask: Array) -> Array:
        y = np.zeros((*mask.shape, answer.shape[-1]), answer.dtype)
        y[mask] = answer
        return y

    return Model(bind, (f"engine: {session.name} ({session.precision.value}, {session.provider})",), padded)
