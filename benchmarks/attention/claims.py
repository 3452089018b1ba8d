"""What should hold of the results, and whether it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.attention.results import CellResult, Results
from benchmarks.attention.roster import CEILING, OURS, PEER, RAGGED, REDUCED

HELD, NOT_HELD, NOT_JUDGED = "held", "not held", "not judged"
NO_SLOWER, OVER_EAGER, OVER_EXPORT, OF_CEILING, OVER_FP32, OVER_PADDED = 0.97, 1.9, 1.3, 0.85, 1.6, 3.5
EAGER, EXPORT = "torch eager", "torch.onnx.export"


@dataclass(frozen=True, slots=True)
class Claim:
    """`found` says what the verdict stands on, down to the shapes that failed it."""

    what: str
    verdict: str
    found: str

    def to_json(self) -> dict[str, Any]:
        return {"claim": self.what, "verdict": self.verdict, "found": self.found}


def claims(results: Results) -> list[Claim]:
    """Every claim of the suite, in its order."""
    shapes = list(results.cells(ragged=False))
    bf16 = "avx512_bf16" in results.data["machine"]["cpu_features"]
    return [
        no_slower_than_peers(shapes),
        mean_over(shapes, EAGER, OVER_EAGER),
        mean_over(shapes, EXPORT, OVER_EXPORT),
        near_the_ceiling(shapes),
        reduced_is_faster(shapes, has_bf16=bf16),
        ragged_is_faster(list(results.cells(ragged=True))),
    ]


def with_claims(results: Results) -> Results:
    """The same with its claims, as today's rules judge them."""
    return Results({**results.data, "claims": [claim.to_json() for claim in claims(results)]})


def no_slower_than_peers(cells: Sequence[CellResult]) -> Claim:
    """Against every fp32 peer that was right, and so against the best of them."""
    what = (
        "the chosen fp32 engine is no slower than the best fp32 peer on every shape (not different by the "
        f"A/B rule, or a ratio of {NO_SLOWER} or more)"
    )
    lost, unsure, closest = [], set[str](), (math.inf, "")
    judged = [cell for cell in cells if cell.ran(OURS) and cell.ran(PEER)]
    for cell in judged:
        for name in cell.ran(PEER):
            estimate = cell.time_over(OURS, name).estimate
            closest = min(closest, (estimate.ratio, f"{estimate.ratio:.2f} against {name} at {cell.name}"))
            if estimate.ratio < NO_SLOWER and 1 not in estimate.interval:
                lost.append(f"{estimate.ratio:.2f} against {name} at {cell.name}")
            elif estimate.ratio < NO_SLOWER:
                unsure.add(cell.name)
    found = "; ".join(lost) if lost else f"the least ratio is {closest[1]}"
    if unsure:
        found += f"; inconclusive at {len(unsure)} of {len(judged)} shapes"
    peers = dict.fromkeys(name for cell in judged for name in cell.ran(PEER))
    return _judged(what, cells, judged, not lost, f"{found}; peers: {', '.join(peers)}")


def mean_over(cells: Sequence[CellResult], name: str, least: float) -> Claim:
    """The geometric mean of `name`'s time over ours."""
    what = f"in the geometric mean the chosen fp32 engine is at least {least} times as fast as {name}"
    judged = [cell for cell in cells if cell.ran(OURS) and name in cell.ran(PEER)]
    ratios = [cell.time_over(OURS, name).estimate.ratio for cell in judged]
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    spread = f"{mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    bound = _at_most(judged, mean) if mean < least else ""
    return _judged(what, cells, judged, mean >= least, f"{spread} over {len(ratios)} shapes{bound}")


def _at_most(judged: Sequence[CellResult], mean: float) -> str:
    """What the mean would be for an engine that ran every shape at the ceiling."""
    shares = [cell.ceiling_share for cell in judged if cell.ran(CEILING)]
    if len(shares) < len(judged) or not shares:
        return ""
    reached = math.exp(math.fsum(map(math.log, shares)) / len(shares))
    return f"; an engine at the MatMul ceiling would have {mean / reached:.2f}"


def near_the_ceiling(cells: Sequence[CellResult]) -> Claim:
    what = (
        f"the chosen fp32 engine reaches {OF_CEILING:.0%} of the MatMul ceiling at seq 64 to 256, d_model 768"
    )
    wanted = [cell for cell in cells if cell.data["d_model"] == 768 and 64 <= cell.data["seq"] <= 256]
    judged = [cell for cell in wanted if cell.ran(OURS) and cell.ran(CEILING)]
    shares = [(cell.ceiling_share, cell.name) for cell in judged]
    return _each(what, wanted, judged, shares, least=OF_CEILING, shown=lambda share: f"{share:.0%}")


def reduced_is_faster(cells: Sequence[CellResult], *, has_bf16: bool) -> Claim:
    what = (
        f"the chosen reduced-precision engine is at least {OVER_FP32} times as fast as the fp32 one for seq "
        "64 or more, d_model 768 or more (on a CPU with AVX512_BF16)"
    )
    wanted = [cell for cell in cells if cell.data["d_model"] >= 768 and cell.data["seq"] >= 64]
    judged = [cell for cell in wanted if cell.ran(OURS) and cell.ran(REDUCED)]
    ratios = [(1 / cell.time_over(OURS, cell.ran(REDUCED)[0]).estimate.ratio, cell.name) for cell in judged]
    claim = _each(what, wanted, judged, ratios, least=OVER_FP32, shown=lambda ratio: f"{ratio:.2f}")
    if has_bf16:
        return claim
    return Claim(what, NOT_JUDGED, f"this CPU has no AVX512_BF16 ({claim.found})")


def ragged_is_faster(cells: Sequence[CellResult]) -> Claim:
    what = (
        f"ragged batches run at least {OVER_PADDED} times as fast packed as the chosen fp32 engine runs "
        "their padded batch"
    )
    judged = [cell for cell in cells if cell.ran(OURS) and cell.ran(RAGGED)]
    ratios = [(1 / cell.time_over(OURS, cell.ran(RAGGED)[0]).estimate.ratio, cell.name) for cell in judged]
    return _each(what, cells, judged, ratios, least=OVER_PADDED, shown=lambda ratio: f"{ratio:.2f}")


def _each(
    what: str,
    wanted: Sequence[CellResult],
    judged: Sequence[CellResult],
    values: Sequence[tuple[float, str]],
    *,
    least: float,
    shown: Callable[[float], str],
) -> Claim:
    """Every one of the values has to reach `least`."""
    missed = [f"{shown(value)} at {name}" for value, name in values if value < least]
    lowest = min(values, default=(math.nan, ""))
    found = "; ".join(missed) if missed else f"the least is {shown(lowest[0])} at {lowest[1]}"
    return _judged(what, wanted, judged, not missed, found)


def _judged(
    what: str, wanted: Sequence[CellResult], judged: Sequence[CellResult], good: bool, found: str
) -> Claim:
    """A claim about every shape does not hold on the strength of some: what is missing leaves it open."""
    missing = [cell.name for cell in wanted if cell not in judged]
    if not judged:
        return Claim(what, NOT_JUDGED, "nothing was timed that it is about")
    if not good:
        return Claim(what, NOT_HELD, found)
    if missing:
        return Claim(what, NOT_JUDGED, f"{found}; not timed at {'; '.join(missing)}")
    return Claim(what, HELD, found)
