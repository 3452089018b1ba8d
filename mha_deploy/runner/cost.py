"""What a batch will cost: fitted to measured runs here, corrected while running."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from mha_deploy.errors import BundleError
from mha_deploy.spec import AttentionSpec

Size = tuple[int, int, int]  # rows, query length, key length

# A guess for where nothing was measured: what a batch costs beside its products, and one core's rate.
GUESSED_OVERHEAD_US = 60.0
GUESSED_FLOPS_PER_US = 40e3
LEARNING_RATE = 0.1
# A run far off the average says more of the machine's other work than of the session: beyond this ratio
# it counts no more than at it (as in Huber's estimator), so that the average is near the median.
LARGEST_STEP = 1.25
# What remains of a correction after a refusal that stands on it.
KEPT = 0.98
# Sizes, or shapes, whose costs are kept once worked out: what callers send must not grow without bound.
REMEMBERED = 1 << 16


class CostModel:
    """Predicted microseconds of a batch by its rows and lengths.

    Microseconds = overhead + projection FLOPs x u + attention FLOPs x v, fitted to measured sizes with
    equal weight on relative errors; times what was measured at the sizes around / what the fit says
    there, interpolated in the sizes' logarithms; times a correction for each octave of the sizes, an
    exponential moving average of measured / predicted (where none ran yet, that of all sizes).
    Without samples the fit is a guess, and the first run gives its scale.

    Samples are of batches without padding. `fill` is the share of a batch's positions that are tokens,
    and `slack` what the projections of a position that is none cost beside those of a token: 1 in a
    padded graph, which computes both; less in a packed one.
    """

    def __init__(self, spec: AttentionSpec, samples: Mapping[Size, float], *, slack: float = 1.0) -> None:
        self._spec = spec
        self.samples, self.slack = dict(samples), slack
        self._terms = _fitted(spec, self.samples)
        self._residuals = _residuals(self._nodes(), {s: us / self._fit(s) for s, us in self.samples.items()})
        self._corrections: dict[Size, float] = {}
        self._overall = 1.0
        self._predicted: dict[Size, tuple[float, Size, float]] = {}

    def predict_us(self, size: Size, fill: float = 1.0) -> float:
        us, octave = self._uncorrected(size, fill)
        return us * self._corrections.get(octave, self._overall)

    def _uncorrected(self, size: Size, fill: float) -> tuple[float, Size]:
        base, octave, share = self._predicted.get(size) or self._remember(size)
        return base * (1 - (1 - fill) * (1 - self.slack) * share), octave

    def projected(self, size: Size) -> float:
        """Which share of a batch's cost its projections are, as the fit says; 0..1."""
        terms = [t * amount for t, amount in zip(self._terms, _amounts(self._spec, size), strict=True)]
        return terms[1] / sum(terms)

    def is_measured(self, size: Size) -> bool:
        """Whether a prediction for this size stands on measurements rather than on a guess."""
        return bool(self.samples) or _octave(size) in self._corrections

    def observe(self, size: Size, us: float, fill: float = 1.0) -> None:
        """Take a batch that ran into account."""
        expected, octave = self._uncorrected(size, fill)
        ratio = us / expected
        if not self.samples and not self._corrections:
            self._overall = ratio
        self._corrections[octave] = _moved(self._corrections.get(octave, self._overall), ratio)
        self._overall = _moved(self._overall, ratio)

    def doubt(self, size: Size) -> None:
        """A request was refused by this prediction: draw its correction towards what was calibrated.

        A size that is always refused is never run again, so no run would correct a wrong prediction.
        """
        octave = _octave(size)
        current = self._corrections.get(octave, self._overall)
        self._corrections[octave] = current**KEPT if self.samples else current * KEPT

    def _remember(self, size: Size) -> tuple[float, Size, float]:
        if len(self._predicted) >= REMEMBERED:
            self._predicted.clear()
        found = (self._fit(size) * self._interpolated(size), _octave(size), self.projected(size))
        self._predicted[size] = found
        return found

    def _fit(self, size: Size) -> float:
        return float(
            sum(term * amount for term, amount in zip(self._terms, _amounts(self._spec, size), strict=True))
        )

    def _nodes(self) -> list[Size]:
        axes = [range(_octave_of(dim.min), _octave_of(dim.max) + 1) for dim in self._spec.dims]
        nodes = (
            itertools.product(*axes) if len(axes) == 3 else ((b, s, s) for b, s in itertools.product(*axes))
        )
        return [(b, q, kv) for b, q, kv in nodes]

    def _interpolated(self, size: Size) -> float:
        """Multilinear over the octaves around `size`; outside of them the nearest one's."""
        if not self._residuals:
            return 1.0
        logs = [math.log2(each) for each in (size[:2] if len(self._spec.dims) == 2 else size)]
        total = weights = 0.0
        for corner in itertools.product((0, 1), repeat=len(logs)):
            at = [math.floor(log) + up for log, up in zip(logs, corner, strict=True)]
            weight = math.prod(1 - abs(log - node) for log, node in zip(logs, at, strict=True))
            node = (at[0], at[1], at[-1])
            if weight > 0 and node in self._residuals:
                total += weight * self._residuals[node]
                weights += weight
        return math.exp(total / weights) if weights else 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "overhead_us": self._terms[0],
            "projection_us_per_flop": self._terms[1],
            "attention_us_per_flop": self._terms[2],
            "slack": self.slack,
            "samples": [[*size, us] for size, us in self.samples.items()],
            "corrections": [[*octave, ratio] for octave, ratio in self._corrections.items()],
        }

    @classmethod
    def from_json(cls, spec: AttentionSpec, data: Mapping[str, Any]) -> Self:
        """The model that its samples make; corrections start anew.

        Raises:
            BundleError: the data holds no such samples.
        """
        try:
            samples = {(int(b), int(q), int(kv)): float(us) for b, q, kv, us in data["samples"]}
            slack = float(data["slack"])
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"a stored cost model is malformed: {error!r}") from error
        if not samples or not all(min(size) >= 1 and 0 < us < math.inf for size, us in samples.items()):
            raise BundleError(
                "a stored cost model is malformed: expected sizes of at least 1 and times above 0"
            )
        if not 0 <= slack <= 1:
            raise BundleError(f"a stored cost model is malformed: slack {slack}; expected 0 to 1")
        return cls(spec, samples, slack=slack)


def _moved(average: float, ratio: float) -> float:
    return average + LEARNING_RATE * (
        min(max(ratio, average / LARGEST_STEP), average * LARGEST_STEP) - average
    )


def _amounts(spec: AttentionSpec, size: Size) -> tuple[float, float, float]:
    """What the fit's terms multiply: one, FLOPs of the projections, FLOPs of the attention proper."""
    batch, q, kv = size
    names = (spec.dims[0].name, spec.query_axis, spec.key_axis)
    everything = spec.flops(dict(zip(names, size, strict=True)))
    core = 2 * batch * q * kv * spec.num_heads * (spec.head_dim + spec.value_dim)
    return 1.0, float(everything - core), float(core)


def _fitted(spec: AttentionSpec, samples: Mapping[Size, float]) -> tuple[float, ...]:
    """Least squares of relative errors; a term that would come out negative is left out."""
    guessed = (GUESSED_OVERHEAD_US, 1 / GUESSED_FLOPS_PER_US, 1 / GUESSED_FLOPS_PER_US)
    if len(samples) < len(guessed):
        return guessed
    amounts = np.array([_amounts(spec, size) for size in samples])
    relative = amounts / np.array(list(samples.values()))[:, None]
    scale = relative.max(axis=0)
    kept = list(range(len(guessed)))
    while kept:
        found = np.linalg.lstsq(relative[:, kept] / scale[kept], np.ones(len(samples)), rcond=None)[0]
        if (found >= 0).all():
            terms = dict(zip(kept, (found / scale[kept]).tolist(), strict=True))
            return tuple(terms.get(index, 0.0) for index in range(len(guessed)))
        kept = [index for index, value in zip(kept, found, strict=True) if value >= 0]
    return guessed


def _residuals(nodes: list[Size], measured: Mapping[Size, float]) -> dict[Size, float]:
    """log(measured / fit) at every node: that of the measured size which is the fewest octaves away."""
    if not measured:
        return {}
    logs = {tuple(math.log2(each) for each in size): math.log(ratio) for size, ratio in measured.items()}
    return {
        node: logs[min(logs, key=lambda log: sum(abs(a - b) for a, b in zip(log, node, strict=True)))]
        for node in nodes
    }


def _octave_of(size: int) -> int:
    return round(math.log2(size))


def _octave(size: Size) -> Size:
    return _octave_of(size[0]), _octave_of(size[1]), _octave_of(size[2])
