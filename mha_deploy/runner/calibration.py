"""Measuring a session on this machine: how many workers it wants, and what its batches cost."""

from __future__ import annotations

from dataclasses import dataclass

from mha_deploy.bundle import Bundle
from mha_deploy.runner.cost import CostModel
from mha_deploy.runner.options import RunnerOptions
from mha_deploy.sessions import Placement


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many workers of how many threads, and what their batches cost."""

    workers: int
    threads: int
    model: CostModel


def calibrated(bundle: Bundle, name: str, placement: Placement, options: RunnerOptions) -> Calibration:
    bundle.artifact(name)
    return Calibration(options.workers or 1, options.threads or placement.threads, CostModel(bundle.spec, {}))
