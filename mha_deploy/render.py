"""Reports as tables for people. The data are the reports' own; nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.box import Box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from mha_deploy import machine
from mha_deploy.bundle import Bundle
from mha_deploy.doctor import Finding
from mha_deploy.inference import InferReport
from mha_deploy.latency import Percentiles
from mha_deploy.manifest import Artifact

_STYLES = {"passed": "green", "ok": "green", "failed": "bold red", "problem": "bold red"}


def infer_table(console: Console, report: InferReport) -> None:
    table = new_table("batched inference", ("what", ">value"))
    latency = Percentiles.of(report.batch_ms)
    table.add_row("requests", f"{report.requests:,}")
    table.add_row("batches", f"{report.batches:,}")
    table.add_row("tokens", f"{report.tokens:,}")
    share = report.padded_tokens / max(1, report.tokens + report.padded_tokens)
    table.add_row("padded tokens", f"{report.padded_tokens:,} ({share:.1%})")
    table.add_row("time in the session", f"{report.total_ms:.2f} ms")
    table.add_row("per batch, p50", f"{milliseconds(latency.p50_ms)} ms")
    table.add_row("throughput", f"{report.tokens / report.total_ms * 1e3:,.0f} tokens/s")
    table.add_row("ran on", report.provider)
    console.print(table)


def inspect_tables(console: Console, bundle: Bundle) -> None:
    spec, provenance = bundle.spec, bundle.manifest.provenance
    facts = new_table(f"bundle {bundle.folder}", ("what", "value"))
    facts.add_row("block", _block(bundle))
    for dim in spec.dims:
        facts.add_row(f"dim {dim.name}", f"{dim.min} .. {dim.opt} .. {dim.max} (min, opt, max)")
    for tensor in spec.signature.inputs:
        facts.add_row("input", str(tensor))
    for tensor in spec.signature.outputs:
        facts.add_row("output", str(tensor))
    checkpoint = provenance["checkpoint"]
    facts.add_row("weights from", str(spec.weights))
    facts.add_row("layout", f"{checkpoint['layout']}, stored as {checkpoint['stored_dtype']}")
    if checkpoint["sha256"]:
        facts.add_row("checkpoint", f"sha256 {checkpoint['sha256'][:16]}...")
    facts.add_row("real inputs", spec.inputs_file or "none")
    for choice in bundle.manifest.choices:
        here = "" if choice.machine == machine.fingerprint() else ", on another machine"
        where = f"{choice.device}, {choice.threads} threads{here}"
        facts.add_row("chosen", f"{choice.artifact} ({where})")
    facts.add_row("made", f"{provenance['created']} by mha-deploy {provenance['mha_deploy']}")
    facts.add_row("with", versions_text(provenance["machine"]))
    console.print(facts)
    artifacts = new_table("artifacts", ("name", "runtime", "precision", ">bytes", "file and details"))
    for artifact in bundle.artifacts:
        record = artifact.files[0]
        artifacts.add_row(
            artifact.name,
            artifact.runtime,
            artifact.precision.value,
            f"{record.bytes:,}",
            f"{record.file} (sha256 {record.sha256[:12]}) {_details(artifact)}".rstrip(),
        )
    console.print(artifacts)


def doctor_table(console: Console, findings: Sequence[Finding]) -> None:
    table = new_table("this machine", ("what", "state", "detail"))
    for finding in findings:
        table.add_row(finding.what, state(finding.state, finding.state), finding.detail)
    console.print(table)


def new_table(title: str, columns: Sequence[str], *, lines: Box = box.HEAVY_HEAD) -> Table:
    """A table; a column's leading ">" aligns it right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=lines)
    for column in columns:
        side: JustifyMethod = "right" if column.startswith(">") else "left"
        # Folded where the screen is narrow: a number cut short would be another number.
        table.add_column(column.removeprefix(">"), justify=side, overflow="fold")
    return table


def state(text: str, outcome: str) -> Text:
    return Text(text, _STYLES.get(outcome, "yellow"))


def size_text(sizes: Mapping[str, int]) -> str:
    return " x ".join(str(size) for size in sizes.values())


def milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def versions_text(host: Mapping[str, Any]) -> str:
    """Of the interpreter, where it is named, and the packages, as `machine.describe` has them."""
    found = {"Python": host["python"]} if "python" in host else {}
    return ", ".join(f"{name} {version}" for name, version in {**found, **host["versions"]}.items())


def _details(artifact: Artifact) -> str:
    """The short ones; lists and the passport have places of their own."""
    details = artifact.details
    shown: dict[str, Any] = {"layout": artifact.layout} if artifact.layout != "padded" else {}
    shown |= {key: value for key, value in details.items() if isinstance(value, str | int)}
    if "axes_proved_at" in details:
        shown["axes_proved_at"] = f"{len(details['axes_proved_at'])} sizes"
    return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in shown.items())


def _block(bundle: Bundle) -> str:
    spec = bundle.spec
    parts = [
        f"{spec.name}: {spec.kind} attention, d_model {spec.d_model}, {spec.num_heads} heads",
        f"{spec.num_kv_heads} kv heads" if spec.num_kv_heads != spec.num_heads else "",
        f"head_dim {spec.head_dim}"
        + (f", value_dim {spec.value_dim}" if spec.value_dim != spec.head_dim else ""),
        "causal" if spec.causal else "",
        f"{spec.mask} mask" if spec.mask != "none" else "no mask",
        f"{spec.norm}-norm with residual" if spec.norm != "none" else "",
    ]
    return ", ".join(part for part in parts if part)
