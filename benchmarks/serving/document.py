"""docs/serving-benchmarks.md, from the JSON of a run; nothing in it is written by hand.

python benchmarks/serving/document.py build/serving-benchmark.json > docs/serving-benchmarks.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_deploy.latency import nearest_rank

OURS = "mha-deploy"
FACTOR = 1.25


def written(data: Mapping[str, Any]) -> tuple[str, bool]:
    """The document, and whether the targets that it states were met."""
    rates = {
        system: [round_[system]["rate_per_s"] for round_ in data["rounds"]] for system in data["systems"]
    }
    peers = [system for system in data["systems"] if system != OURS]
    ratios = (
        [
            ours / best if (best := max(rates[peer][i] for peer in peers)) else float("inf")
            for i, ours in enumerate(rates[OURS])
        ]
        if peers
        else []
    )
    against = ", ".join(f"{each:.2f}x" for each in ratios)
    lone, conditions, machine = data["lone_request"], data["conditions"], data["machine"]
    faster = bool(ratios) and nearest_rank(ratios, 0.5) >= FACTOR and not data["missing"]
    light = all(lone[f"{kind}_us"] <= allowed for kind, allowed in lone["allowed_us"].items())
    wrong = sum(_wrong(round_[system]) for round_ in data["rounds"] for system in round_)
    lines = [
        "# Serving benchmarks",
        "",
        "Written by `python benchmarks/serving/run.py`; every trial is in the JSON that it leaves.",
        "",
        f"{machine['cpu']}, {machine['usable_cpus']} cores; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ".",
        "",
        f"The highest Poisson rate (requests/s) with p99 <= {conditions['p99_ms']:g} ms from the intended "
        f"send and every request answered; lengths {conditions['lengths']}, d_model "
        f"{conditions['d_model']}, by bisection to {conditions['tolerance']:.0%}, trials of "
        f"{conditions['seconds']:g} s. Systems take turns, each started anew; the load generator runs on the "
        "same cores, alike for all. Peers run the better of their two variants.",
        "",
        *_rate_table(rates),
        "",
        *_variant_lines(data),
        "",
        f"Against the best peer of the same round: {against or 'none ran'} "
        f"(target: {FACTOR}x in the median; {'met' if faster else 'missed'}).",
        f"Wrong answers in the sample: {wrong}.",
        "",
        f"A lone request of {lone['tensor'][0]} x {lone['tensor'][1]} over a bare session with "
        f"{lone['threads']} threads, median of {lone['rounds']} rounds: {lone['in_process_us']:.0f} us in "
        f"process (at most {lone['allowed_us']['in_process']:.0f}), {lone['http_us']:.0f} us over HTTP (at "
        f"most {lone['allowed_us']['http']:.0f}); {'met' if light else 'missed'}.",
        "",
    ]
    return "\n".join(lines), faster and light and not wrong


def _rate_table(rates: Mapping[str, Sequence[float]]) -> list[str]:
    count = max(map(len, rates.values()))
    lines = [
        "| system | " + " | ".join(f"round {i + 1}" for i in range(count)) + " | median |",
        "| --- |" + " ---: |" * (count + 1),
    ]
    for system, found in sorted(rates.items(), key=lambda item: -nearest_rank(item[1], 0.5)):
        cells = " | ".join(f"{each:.0f}" for each in found)
        lines.append(f"| {system} | {cells} | {nearest_rank(found, 0.5):.0f} |")
    return lines


def _variant_lines(data: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {name}: " + ", ".join(f"{variant} {rate:.0f}/s" for variant, rate in found.items())
        for name, found in data["variants_tried_per_s"].items()
        if found
    ]
    lines += [f"- {name}: did not run: {reason}" for name, reason in data["missing"].items()]
    return ["Variants tried before the rounds:", "", *lines] if lines else []


def _wrong(search: Mapping[str, Any]) -> int:
    reports = [search["alone"], *(trial["report"] for trial in search["trials"])]
    return sum(report["check"]["failed"] for report in reports)


if __name__ == "__main__":
    print(written(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))[0], end="")
