"""An engine for people: what was built, what was fused, and a bar while it is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from mha_deploy.engine_job import Engine
from mha_deploy.render import new_table
from mha_deploy.tensorrt.passport import Passport
from mha_deploy.tensorrt.plan import HEADER_SIZE, read_header


def engine_tables(console: Console, engine: Engine) -> None:
    how = "from the cache, nothing was built" if engine.cached else f"built in {engine.seconds:.2f} s"
    passport_tables(console, f"engine {engine.name} ({how})", engine.passport, engine.path)


def passport_tables(console: Console, title: str, passport: Passport, plan: Path) -> None:
    facts = new_table(title, ("what", "value"))
    targets = ", ".join(passport.targets) or passport.gpu or "TensorRT's own choice"
    rows: dict[str, str] = {
        "plan": f"{plan} ({passport.plan_bytes:,} bytes, sha256 {passport.plan_sha256[:12]})",
        "plan's header": _header(plan),
        "made by": f"{passport.backend} {passport.version}, for {targets}",
        "precision": passport.precision,
        "kept in fp32": ", ".join(passport.kept_fp32) or "-",
        "from": f"{passport.onnx_file} (sha256 {passport.onnx_sha256[:12]}), "
        f"weights {passport.weights_sha256[:12] or 'inside'}",
        "checked": passport.checked,
        "activations": f"{passport.activation_bytes:,} bytes at the largest profile",
    }
    for number, profile in enumerate(passport.profiles):
        rows[f"profile {number}"] = _profile(profile)
    for what, value in rows.items():
        facts.add_row(what, value)
    for step in passport.lowering:
        facts.add_row("lowered", f"{step['rule']} at {step['node']}: {step['why']}")
    for warning in passport.warnings:
        facts.add_row("warning", warning)
    facts.add_row("again", passport.command.replace("BUNDLE", str(plan.parent.parent)))
    console.print(facts)
    verdicts = new_table("attention", ("name", "fused", "kernel", "why not"))
    for verdict in passport.attentions:
        word = Text("fused", "green") if verdict["fused"] else Text("not fused", "yellow")
        verdicts.add_row(verdict["name"], word, verdict["kernel"], verdict["reason"])
    console.print(verdicts)


def _header(plan: Path) -> str:
    """What the plan's first bytes say, with the file's real size."""
    if not plan.is_file():
        return "the plan is missing"
    size = plan.stat().st_size
    with plan.open("rb") as stream:
        header = read_header(stream.read(HEADER_SIZE))
    if not header.known:
        return str(header)
    whole = "" if header.size == size else f"; says {header.size:,} bytes, the file has {size:,}: TRUNCATED"
    return f"TensorRT for RTX {header.version}, for {', '.join(header.targets)}{whole}"


def _profile(profile: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {low} .. {opt} .. {high}" for name, (low, opt, high) in profile.items())


class BuildBar:
    """TensorRT's phases, nested as it nests them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def phase_start(self, phase: str, parent: str, steps: int) -> None:
        if not self._tasks:
            self._bars.start()
        self._tasks[phase] = self._bars.add_task(("  " if parent else "") + phase, total=steps)

    def step(self, phase: str, done: int) -> None:
        self._bars.update(self._tasks[phase], completed=done)

    def phase_end(self, phase: str) -> None:
        self._bars.remove_task(self._tasks.pop(phase))
