"""A bundle as its users hold it: the folder that `export` writes, opened."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from mha_deploy import machine
from mha_deploy.errors import BundleError
from mha_deploy.manifest import Artifact, Choice, Manifest
from mha_deploy.ragged import Request, unpack
from mha_deploy.sessions import DEFAULT_PLACEMENT, Placement, Session, open_session
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.signature import Signature
from mha_deploy.spec import AttentionSpec
from mha_deploy.staging import interrupts_held, locked

if TYPE_CHECKING:
    from mha_deploy.attention import MultiHeadAttention
    from mha_deploy.tensorrt.passport import Passport

P = ParamSpec("P")
T = TypeVar("T")
CANONICAL = "canonical"  # the artifact that every bundle has


@dataclass(slots=True)
class Bundle:
    """A folder and its manifest.

    What is recorded through a bundle, by `optimize` or `build_engine` for instance, shows in it at once.
    A manifest never changes: another takes its place, so that threads that share a bundle read a whole
    one. What others record in the folder shows after the next change, or `refresh`.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def load(cls, folder: str | Path) -> Bundle:
        """Open the bundle in `folder`.

        Raises:
            BundleError: no bundle there, a damaged one, or one made by a newer version.
        """
        return cls(Path(folder), Manifest.read(Path(folder)))

    @property
    def spec(self) -> AttentionSpec:
        return self.manifest.spec

    @property
    def signature(self) -> Signature:
        return self.spec.signature

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self.manifest.artifacts

    def artifact(self, name: str = "", placement: Placement = DEFAULT_PLACEMENT) -> Artifact:
        """The artifact of that name; without one, that which `optimize` chose for this machine and
        `placement`, or the canonical one where it chose none.

        Raises:
            BundleError: there is none of that name.
        """
        chosen = None if name else self._chosen(placement)
        if chosen:
            return chosen
        for artifact in self.artifacts:
            if artifact.name == (name or CANONICAL):
                return artifact
        known = ", ".join(artifact.name for artifact in self.artifacts) or "none"
        raise BundleError(f"{self.folder} has no artifact {name or CANONICAL!r}; it has {known}")

    def passed_over(self, placement: Placement = DEFAULT_PLACEMENT) -> tuple[str, ...]:
        """What `optimize` chose elsewhere, where none of it holds here: it was on another machine (or with
        other versions of what is installed), for another device, other threads or other files."""
        if self._chosen(placement):
            return ()
        return tuple(dict.fromkeys(choice.artifact for choice in self.manifest.choices))

    def _chosen(self, placement: Placement) -> Artifact | None:
        if not self.manifest.choices:  # a machine is not looked at for nothing
            return None
        threads = placement.threads or machine.usable_cpus()
        return self.manifest.chosen(machine.fingerprint(), placement.device, threads)

    def with_artifact(self, artifact: Artifact) -> Bundle:
        """Another bundle, as this one would be with `artifact`, whose files lie in the folder; nothing is
        written."""
        return replace(self, manifest=self.manifest.with_artifact(artifact))

    def record(self, *artifacts: Artifact) -> None:
        """Add or replace artifacts, here and in the folder.

        Raises:
            BundleError: as `change`, or their files are not there, or not the ones that they record.
        """
        self.change(lambda manifest: self._with(manifest, artifacts))

    def choose(self, artifact: Artifact, choice: Choice) -> None:
        """Record `artifact`, and that it is the one to run where `choice` says. Raises as `record`."""
        self.change(lambda manifest: self._with(manifest, [artifact]).with_choice(choice))

    def _with(self, manifest: Manifest, artifacts: Sequence[Artifact]) -> Manifest:
        for artifact in artifacts:
            artifact.path(self.folder)
        return functools.reduce(Manifest.with_artifact, artifacts, manifest)

    def change(self, changed: Callable[[Manifest], Manifest]) -> None:
        """Put `changed(manifest)` in the place of the folder's manifest, whoever else does so meanwhile.

        Raises:
            BundleError: as `held`, or the folder cannot be written.
        """
        with self.held() as current:
            manifest = changed(current)
            manifest.write(self.folder)
            self.manifest = manifest

    def refresh(self) -> None:
        """Take in what others have recorded in the folder. Raises as `held`."""
        with self.held() as current:  # held, so that what another thread records here is not undone
            self.manifest = current

    @contextlib.contextmanager
    def held(self) -> Iterator[Manifest]:
        """The folder's manifest, which nobody changes, and no export replaces, until the block ends.

        Whatever puts something into the folder does so here: made from this bundle, it belongs to no other.
        Raises as `current`.
        """
        with locked(self.folder):
            yield self.current()

    def current(self) -> Manifest:
        """The manifest that the folder has now.

        Raises:
            BundleError: it holds no bundle any more, or one that was exported after this one was loaded.
        """
        manifest = Manifest.read(self.folder)
        if _export_of(manifest) != _export_of(self.manifest):
            raise BundleError(
                f"the bundle {self.folder} was exported again meanwhile, and what was made of the one before "
                "is not recorded in it; run it again"
            )
        return manifest

    def open_session(self, name: str = "", placement: Placement = DEFAULT_PLACEMENT) -> Session:
        """A session over the artifact of that name (see `artifact`), in the artifact's own layout.

        A packed one takes tokens and lengths (see `sessions.packed.PackedSession`).

        Raises:
            BundleError: no such artifact, its files are not the ones recorded, or an engine's passport
                does not hold.
            MissingError: this machine lacks the runtime, the provider or the GPU.
        """
        artifact = self.artifact(name, placement)
        for each in (artifact, *artifact.routes):
            if "passport" in each.details:
                self._check_passport(each)
        session = open_session(self.folder, artifact, placement)
        return PackedSession(session, self.spec) if artifact.layout == "packed" else session

    def open_padded_session(self, name: str = "", placement: Placement = DEFAULT_PLACEMENT) -> Session:
        """`open_session`, under the block's padded signature whatever the artifact's layout is."""
        session = self.open_session(name, placement)
        return PaddedView(session) if isinstance(session, PackedSession) else session

    def _check_passport(self, artifact: Artifact) -> None:
        """Hold an engine's passport against the file beside the plan, the bundle and this machine."""
        from mha_deploy.tensorrt.backend import load_backend
        from mha_deploy.tensorrt.passport import Passport, read_passport

        passport = Passport.from_json(artifact.details["passport"])
        record, folder = artifact.files[0], f"'{self.folder}'"
        passport = replace(passport, command=passport.command.replace("BUNDLE", folder))
        beside = read_passport(self.folder / record.file).to_json()
        passport.agrees({k: v for k, v in beside.items() if k != "command"}, "the file beside the plan")
        ours: dict[str, Any] = {"plan_sha256": record.sha256, "plan_bytes": record.bytes}
        typed = [a.files[0] for a in self.artifacts if a.files[0].sha256 == passport.onnx_sha256]
        found = passport.onnx_sha256 if typed else "no ONNX file with this hash"
        ours |= {"weights_sha256": self.manifest.weights.sha256, "onnx_sha256": found}
        ours |= {
            "precision": artifact.precision.value,
            "inputs": [str(replace(t, meaning="")) for t in artifact.signature.inputs],
        }
        passport.agrees(ours, "the bundle")
        artifact.path(self.folder)
        passport.agrees({"version": load_backend(passport.backend).version}, "this machine")
        self._check_gpu(passport)

    @staticmethod
    def _check_gpu(passport: Passport) -> None:
        """An engine runs on the GPU that it was tuned on, or on the targets that it was built for."""
        from mha_deploy.tensorrt.passport import gpu_name, gpu_target

        here = gpu_target()
        if here and passport.gpu:
            passport.agrees({"gpu": gpu_name()}, "this machine")
        if here and passport.targets and here not in passport.targets:
            passport.agrees({"targets": [here]}, "this machine")

    def reference(self) -> MultiHeadAttention:
        """The PyTorch module with the bundle's weights, in fp32 and evaluation mode.

        Raises:
            BundleError: the weights are not the ones recorded, or not those of the spec.
        """
        with interrupts_held():
            from safetensors.torch import load_file

            from mha_deploy.attention import MultiHeadAttention

        module, path = MultiHeadAttention(self.spec), self.manifest.weights.verified(self.folder)
        found = load_file(path)
        shapes, needed = (
            {name: tuple(each.shape) for name, each in tensors.items()}
            for tensors in (found, module.state_dict())
        )
        if shapes != needed:
            odd = sorted(name for name in shapes | needed if shapes.get(name) != needed.get(name))
            raise BundleError(
                f"{path} does not hold the block that the manifest's spec describes: {', '.join(odd)} "
                "missing, unknown or of another shape; export again"
            )
        module.load_state_dict(found)
        return module.eval()

    def real_inputs(self) -> list[Request]:
        """The real requests that the bundle carries; none where it carries none."""
        from safetensors.numpy import load_file

        return [
            request
            for record in self.manifest.inputs
            for request in unpack(self.spec, load_file(record.verified(self.folder)))
        ]

    def finite_inputs(self) -> list[Request]:
        """`real_inputs`, for what is to be judged on its answers to them.

        Raises:
            BundleError: the inputs hold NaN or inf, and so do PyTorch's answers.
        """
        requests = self.real_inputs()
        for number, request in enumerate(requests):
            for name, array in request.tensors.items():
                if not np.isfinite(array).all():
                    raise BundleError(
                        f"the inputs hold NaN or inf, in {name!r} of request {number} of "
                        f"{self.folder / self.manifest.inputs[0].file}: no answer can be judged on them; "
                        "export again with others"
                    )
        return requests


def on_one_export(work: Callable[P, T]) -> Callable[P, T]:
    """`work`, which where it fails since the bundle it was given was exported again meanwhile says so.

    An export takes away the files that were made, or were still to be read.
    """

    @functools.wraps(work)
    def worked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except Exception:
            for given in (*args, *kwargs.values()):
                if isinstance(given, Bundle):
                    given.current()
            raise

    return worked


def _export_of(manifest: Manifest) -> tuple[object, ...]:
    """What an export writes and nothing changes after it; real inputs may join a bundle without any."""
    canonical = [artifact.files for artifact in manifest.artifacts if artifact.name == CANONICAL]
    spec = replace(manifest.spec, inputs_file="")
    return spec, manifest.weights, canonical, manifest.provenance
