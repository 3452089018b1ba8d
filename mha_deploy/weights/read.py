"""One layer of a checkpoint as the reference module's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mha_deploy.errors import WeightsError
from mha_deploy.spec import AttentionSpec
from mha_deploy.weights.checkpoint import Checkpoint, Stored, open_checkpoint
from mha_deploy.weights.fit import (
    candidates,
    dotted,
    left_out,
    problems,
    refusals,
    sources_for,
    suggestion,
    under,
)
from mha_deploy.weights.index import refuse_index
from mha_deploy.weights.layouts import Layout, Source
from mha_deploy.weights.reference import expected_shapes, seeded_tensors

if TYPE_CHECKING:
    import torch

SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The reference module's tensors, contiguous float32, each with memory of its own.

    `layout` names the layout that was recognised, and a LayerNorm that was left out. `stored_dtype`
    is the checkpoint's; several are joined by a comma.
    """

    tensors: dict[str, torch.Tensor]
    layout: str
    stored_dtype: str


def read_weights(spec: AttentionSpec) -> LoadedWeights:
    """The weights that `spec.weights` names: one layer of a checkpoint, or seeded ones.

    Of a safetensors file only the layer's own tensors are read, however large the rest is.

    Raises:
        WeightsError: the file cannot be read, holds no known layout under the prefix, or holds one
            that does not fit the spec; the message lists all that does not fit.
    """
    source = spec.weights
    if not source.file:
        return LoadedWeights(seeded_tensors(spec), str(source), "float32")
    path = Path(source.file)
    refuse_index(path, source.prefix)
    with open_checkpoint(path) as checkpoint:
        return _Layer(checkpoint, path, source.prefix).fitted(spec)


class _Layer:
    """What stands under one prefix of an open checkpoint."""

    def __init__(self, checkpoint: Checkpoint, path: Path, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = dotted(prefix)
        self._where = f"checkpoint {path}" + (f", prefix {prefix!r}" if prefix else "")
        self._entries: dict[str, Stored] = {
            name.removeprefix(self._prefix): checkpoint.stored(name)
            for name in under(checkpoint.names(), prefix)
        }

    def fitted(self, spec: AttentionSpec) -> LoadedWeights:
        layout = self._layout(spec)
        sources = sources_for(layout, spec)
        tensors = self._tensors(sources, spec)
        dtypes = sorted({self._entries[source.name].dtype for source in sources})
        skipped = [source.name for source in left_out(layout, self._entries, spec)]
        note = f'; {" and ".join(skipped)} left out, since norm = "none"' if skipped else ""
        return LoadedWeights(tensors, layout.title + note, ", ".join(dtypes))

    def _layout(self, spec: AttentionSpec) -> Layout:
        fits = [(layout, problems(layout, self._entries, spec)) for layout in candidates(self._entries)]
        if not fits:
            raise WeightsError(f"{self._where}: {self._no_layout()}")
        # Layouts may share all their names (GPT-2, nanoGPT); their shapes then decide.
        layout, lines = min(fits, key=lambda fit: len(fit[1]))
        refused = refusals(layout, self._entries)
        if refused:
            raise WeightsError(f"{self._where}: {'; '.join(refused)}")
        if lines:
            whole = all(source.name in self._entries for source in layout.weights)
            what = f"read as {layout.title}, does not fit the spec{'' if whole else self._suggestion()}"
            raise WeightsError("\n  ".join([f"{self._where}: {what}", *_shortened(lines)]))
        return layout

    def _no_layout(self) -> str:
        if not self._entries:
            held = under(self._checkpoint.names(), "")
            return f"no tensor has this prefix; the file holds {_listed(held)}{self._suggestion()}"
        full = [self._prefix + name for name in self._entries]
        return f"no known attention layout; it holds {_listed(full)}{self._suggestion()}"

    def _suggestion(self) -> str:
        return suggestion(self._checkpoint.names(), self._prefix)

    def _tensors(self, sources: Sequence[Source], spec: AttentionSpec) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        broken = []
        for source in sources:
            parts = _parts(source, self._checkpoint.read(self._prefix + source.name), spec)
            tensors |= parts
            bad = sum(int((~part.isfinite()).sum()) for part in parts.values())
            if bad:
                broken.append(f"{self._prefix}{source.name} ({bad} values)")
        if broken:
            raise WeightsError(
                f"{self._where}: NaN, infinite or beyond float32's range: {', '.join(broken)}; "
                "give a checkpoint of a run that did not diverge"
            )
        return {name: tensors[name] for name in expected_shapes(spec)}


def _parts(source: Source, stored: torch.Tensor, spec: AttentionSpec) -> dict[str, torch.Tensor]:
    import torch

    shapes = expected_shapes(spec)
    matrix = stored.T if source.transposed else stored
    parts = torch.split(matrix, [shapes[target][0] for target in source.targets])
    return {
        # A copy, since the stored tensor may share memory with the file or with its neighbours.
        target: part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for target, part in zip(source.targets, parts, strict=True)
    }


def _shortened(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN_LINES
    return [*lines[:SHOWN_LINES], *([f"and {rest} more"] if rest > 0 else [])]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(_shortened(sorted(names)))
