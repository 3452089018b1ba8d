"""Where artifacts go wrong, in words. The data are the report's own; nothing is computed here."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from mha_deploy.locating import Fp32Nodes, Located, LocateReport


def locate_lines(console: Console, report: LocateReport) -> None:
    for fault in report.faults:
        console.print(Text(f"located: {fault.artifact}, on {fault.case}: {fault.kind}", "bold"))
        for line in _fault(fault):
            console.print(Text(f"  {line}"), soft_wrap=True)
    for nodes in report.fp32:
        for line in _fp32(nodes):
            console.print(Text(line), soft_wrap=True)
    for text in report.not_looked_into:
        console.print(Text(f"not looked into: {text}", "yellow"), soft_wrap=True)


def _fault(fault: Located) -> list[str]:
    lines = []
    place = fault.place
    if place.node:
        lines.append(f"node {place.node} ({place.op_type}), value {place.value!r}")
    if place.source:
        lines.append(f"from {place.source}")
    if math.isfinite(fault.allowed):
        at = f" at {list(fault.worst)}" if fault.worst else ""
        lines.append(f"error {fault.error:.2g}{at}, allowed {fault.allowed:.2g}")
    lines += fault.because
    if fault.between:
        lines.append(f"not in the reference, and above it: {', '.join(fault.between)}")
    if fault.note:
        lines.append(fault.note)
    if fault.unmatched:
        lines.append(f"{len(fault.unmatched)} of {fault.values} values looked at have no counterpart")
    return lines


def _fp32(nodes: Fp32Nodes) -> list[str]:
    if not nodes.nodes:
        return [
            f"{nodes.artifact}: fails with every node in fp32 too: {nodes.precision.value} is not at fault"
        ]
    least = "no smaller set does" if nodes.smallest else "none of them can be left out"
    lines = [
        f"{nodes.artifact}: in fp32 these bring {', '.join(nodes.cases)} inside the budget ({least}):",
        f"  --keep-fp32 {','.join(nodes.nodes)}",
    ]
    if nodes.still_failing:
        lines.append(f"  outside of it all the same: {', '.join(nodes.still_failing)}")
    return lines
