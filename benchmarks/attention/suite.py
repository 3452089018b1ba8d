"""Sizes and shapes in turn: all contestants prepared, checked, and timed in the same rounds."""

from __future__ import annotations

import contextlib
import datetime
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attention.claims import with_claims
from benchmarks.attention.connection import Connection, PeerError
from benchmarks.attention.results import FORMAT, Results
from benchmarks.attention.roster import ALLOWED, CEILING, RAGGED, Contestant
from benchmarks.attention.rounds import WARM_S, take_rounds
from benchmarks.attention.subjects import (
    NUM_HEADS,
    Cell,
    error_of,
    inputs_of,
    masked_inputs,
    truth,
    write_weights,
)
from mha_deploy import machine
from mha_deploy.benchmark import Samples, Schedule, watch
from mha_deploy.signature import Array


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; `folder` holds what contestants make, for the next run to find."""

    cells: tuple[Cell, ...]
    schedule: Schedule
    folder: Path
    command: str

    @property
    def d_models(self) -> list[int]:
        return list(dict.fromkeys(cell.d_model for cell in self.cells))


@dataclass(slots=True)
class Started:
    """A contestant's process, what it said of itself, and why it is out, for a size or for good."""

    contestant: Contestant
    connection: Connection
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    masked_row: dict[str, str] = field(default_factory=dict)
    out: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """Who answered a cell rightly, how far off each was, and why others are not timed on it."""

    ready: list[Started]
    errors: dict[str, float]
    not_timed: dict[str, str]


def run(
    plan: Plan,
    pythons: Mapping[str, Path],
    roster: Sequence[Contestant],
    not_run: Mapping[str, str],
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """The whole suite; `pythons` has the interpreter of each contestant that is to run, by its name.

    `not_run` says why the others are not: they are in the results with that reason.
    """
    measured: list[dict[str, Any]] = []
    conditions: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs, everyone = plan.folder / "logs", []
        for each in roster:
            if each.name in pythons:
                log = logs / f"{each.name}.log"
                connection = Connection(each.name, pythons[each.name], each.module, log)
                everyone.append(Started(each, stack.enter_context(connection)))
        for d_model in plan.d_models:
            _prepare(everyone, d_model, plan, progress)
            _look_at_masked_row(everyone, d_model, scratch)
            found, went_on = _measure(everyone, d_model, plan, scratch, progress)
            measured += found
            conditions[str(d_model)] = went_on
    data = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "machine": machine.describe(),
        "schedule": {**plan.schedule.to_json(), "warm_s": WARM_S, "round": "through all shapes of a size"},
        "conditions": conditions,
        "contestants": [_described(each, everyone, not_run) for each in roster],
        "cells": measured,
    }
    return with_claims(Results(data))


def _prepare(everyone: Sequence[Started], d_model: int, plan: Plan, progress: Callable[[str], None]) -> None:
    weights = write_weights(d_model, plan.folder)
    for each in everyone:
        progress(f"d_model {d_model}: {each.contestant.name} prepares")
        message = {
            "do": "prepare",
            "d_model": d_model,
            "num_heads": NUM_HEADS[d_model],
            "weights": str(weights),
            "threads": machine.usable_cpus(),
            "folder": str(plan.folder / each.contestant.name.replace(" ", "-") / str(d_model)),
            "shared": str(plan.folder),
            "options": dict(each.contestant.options),
        }
        try:
            reply = each.connection.ask(message)
        except PeerError as error:
            each.out[d_model] = str(error)
            continue
        each.versions = reply["versions"]
        each.notes[str(d_model)] = reply["notes"]


def _look_at_masked_row(everyone: Sequence[Started], d_model: int, scratch: Path) -> None:
    """Half a row masked has to be right; of a row fully masked the results only tell what came of it."""
    x, mask = masked_inputs(d_model)
    right = truth(x, mask)
    for each in everyone:
        role = each.contestant.role
        if d_model in each.out or role in (CEILING, RAGGED):  # a request without tokens is none
            continue
        try:
            answer = _answer(each.connection, "masked", x, mask, scratch)
        except PeerError as error:
            each.out[d_model] = str(error)
            continue
        error = error_of(answer[:1], right[:1], mask[:1])
        if error > ALLOWED[role]:
            each.out[d_model] = f"wrong: relative error {error:.1e} where half a row is masked"
        everything = np.ones((1, mask.shape[1]), bool)
        finite = np.isfinite(answer[1:]).all()
        same = finite and error_of(answer[1:], right[1:], everything) <= ALLOWED[role]
        each.masked_row[str(d_model)] = "as PyTorch" if same else "differs" if finite else "NaN"


def _measure(
    everyone: Sequence[Started], d_model: int, plan: Plan, scratch: Path, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The cells of one size, and what else went on meanwhile."""
    here = {cell.name: cell for cell in plan.cells if cell.d_model == d_model}
    checked, cases = dict[str, Checked](), dict[str, list[Connection]]()
    for name, cell in here.items():
        progress(f"{name}: answers")
        checked[name] = _checked(everyone, cell, scratch)
        cases[name] = [each.connection for each in checked[name].ready]
    cpu, theirs, end = machine.cpu_times(), _cpu_s(everyone), watch()
    taken = take_rounds(cases, plan.schedule, progress=lambda text: progress(f"d_model {d_model}: {text}"))
    found, ceilings = [], list[list[float]]()
    for name, cell in here.items():
        samples = taken[name].samples
        for each in checked[name].ready:
            if each.contestant.role == CEILING and each.contestant.name in samples:
                medians_ms = samples[each.contestant.name].medians_ms
                usual_ms = statistics.median(medians_ms)  # each shape has a product of its own size
                ceilings.append([each_ms / usual_ms for each_ms in medians_ms])
        found.append(
            {
                **cell.to_json(),
                "ceiling_flops": cell.projection_flops,
                "rounds_ms": {peer: _rounds(of_peer) for peer, of_peer in samples.items()},
                "relative_error": checked[name].errors,
                "not_timed": checked[name].not_timed | taken[name].failed,
            }
        )
    # As they came: round by round, and through the shapes in each.
    conditions = end([share for round_shares in zip(*ceilings, strict=True) for share in round_shares])
    total_s = machine.cpu_times().total_s - cpu.total_s
    # The contestants are processes of their own: what they took, also while their threads still wait at
    # full speed after a turn, is not a neighbour's.
    took_s = sum(now - theirs[name] for name, now in _cpu_s(everyone).items() if name in theirs)
    others = max(0.0, conditions.neighbours_share - took_s / total_s)
    conditions = replace(conditions, neighbours_share=others)
    return found, {**conditions.to_json(), "notices": conditions.notices()}


def _cpu_s(everyone: Sequence[Started]) -> dict[str, float]:
    """CPU time by the name of those whose process answers."""
    taken = dict[str, float]()
    for each in everyone:
        with contextlib.suppress(PeerError):
            taken[each.contestant.name] = each.connection.ask({"do": "cpu"})["cpu_s"]
    return taken


def _checked(everyone: Sequence[Started], cell: Cell, scratch: Path) -> Checked:
    x, mask = inputs_of(cell)
    right = truth(x, mask)
    ready, errors, not_timed = list[Started](), dict[str, float](), dict[str, str]()
    for each in everyone:
        name, role = each.contestant.name, each.contestant.role
        if not each.contestant.takes(ragged=cell.ragged):
            continue
        if cell.d_model in each.out:
            not_timed[name] = each.out[cell.d_model]
            continue
        try:
            answer = _answer(each.connection, cell.name, x, mask, scratch)
        except PeerError as error:
            not_timed[name] = str(error)
            continue
        if role != CEILING:
            error = error_of(answer, right, mask)
            errors[name] = error if np.isfinite(error) else 1e300
            if error > ALLOWED[role]:
                not_timed[name] = f"wrong: relative error {error:.1e}, allowed {ALLOWED[role]:.0e}"
                continue
        ready.append(each)
    return Checked(ready, errors, not_timed)


def _answer(connection: Connection, case: str, x: Array, mask: Array, scratch: Path) -> Array:
    inputs, answer = scratch / "inputs.npz", scratch / "answer.npy"
    np.savez(inputs, x=x, mask=mask)
    connection.ask({"do": "load", "case": case, "inputs": str(inputs), "answer": str(answer)})
    y: Array = np.load(answer)
    return y


def _rounds(samples: Samples) -> list[list[float]]:
    return [list(each) for each in samples.rounds_ms]


def _described(
    contestant: Contestant, everyone: Sequence[Started], not_run: Mapping[str, str]
) -> dict[str, Any]:
    started = [each for each in everyone if each.contestant is contestant]
    reason = not_run.get(contestant.name, "")
    facts: dict[str, Any] = {"versions": {}, "notes": {}, "masked_row": {}, "failed": {}}
    for each in started:
        facts = {
            "versions": each.versions,
            "notes": each.notes,
            "masked_row": each.masked_row,
            "failed": {str(size): why for size, why in each.out.items()},
        }
    return {"name": contestant.name, "role": contestant.role, "not_run": reason, **facts}
