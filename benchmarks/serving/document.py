"""docs/serving-benchmarks.md, from what `results` keeps of a run alone; nothing in it is written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mha_deploy.latency import CONFIDENCE, median_interval, nearest_rank
from mha_deploy.render import versions_text

OURS, IN_BF16, FLOOR = "mha-deploy", "mha-deploy (bf16)", "floor"
FACTOR = 1.25


def written(data: Mapping[str, Any]) -> tuple[str, bool]:
    """The document, and whether the targets that it states were met."""
    conditions, machine, rounds = data["conditions"], data["machine"], data["rounds"]
    rates = {system: [each[system]["rate_per_s"] for each in rounds] for system in data["systems"]}
    ratios = _ratios(rates, OURS)
    broke = _broke(data)
    # As with a peer that is missing, nothing is won over one that did not run.
    fair = not data["missing"] and not any(_is_peer(system) for system, _, _ in broke)
    faster = bool(ratios) and nearest_rank(ratios, 0.5) >= FACTOR and fair
    beside = (f"; {each}: {_said(_ratios(rates, each))}" for each in (IN_BF16, FLOOR) if each in rates)
    wrong = sum(_wrong(each[system]) for each in rounds for system in each)
    limited = sum(each[system]["limited_by_generator"] for each in rounds for system in each)
    lone, light = _lone(data["lone_request"])
    features = ", ".join(machine["cpu_features"])
    lines = [
        "# Serving benchmarks",
        "",
        "Written by the command below from its JSON file, which holds every trial.",
        "",
        "```",
        data["command"],
        "```",
        "",
        f"{machine['cpu']} ({features}), {machine['usable_cpus']} cores; {versions_text(machine)}.",
        "",
        f"The highest Poisson rate (requests/s) with p99 <= {conditions['p99_ms']:g} ms from the intended "
        f"send and every request answered; lengths {conditions['lengths']}, d_model "
        f"{conditions['d_model']}, by bisection to {conditions['tolerance']:.0%}, trials of "
        f"{conditions['seconds']:g} s. Systems take turns, each started anew; the load generator runs on the "
        "same cores, alike for all. Peers run the better of their two variants. All are given one ONNX file: "
        f"the peers and {OURS} (as exported) run it as it is; {OURS} runs what `optimize` makes of it, in "
        f"fp32 ({data['engine']}); {OURS} (packed) runs the same weights in this project's packed layout, "
        f"requests of any lengths in a batch, answers within 1e-6 of max|y|; {IN_BF16} runs what `optimize` "
        "makes of it where bf16 is allowed, its answers held to bf16's rule; the target is for fp32. CPU "
        "time is of all of a system's processes, at the highest rate that it held, the median over rounds.",
        "",
        *_peers_lines(data),
        *_floor_lines(data),
        *_rate_table(rates, _cpu_ms(data), data["peers"]),
        "",
        *(f"- {_shown(system, data['peers'])}: 0 in round {number}: {why}" for system, number, why in broke),
        *([""] if broke else []),
        *_variant_lines(data),
        "",
        f"Against the best peer of the same round: {_said(ratios)} "
        f"(target: {FACTOR}x in the median; {_word(faster)}){''.join(beside)}.",
        f"Wrong answers in the sample: {wrong}. Searches that ended for the generator's sake: {limited}.",
        "",
        lone,
        "",
    ]
    return "\n".join(lines), faster and light and not wrong and not limited


def _said(ratios: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f}x" for each in ratios) or "none ran"


def _ratios(rates: Mapping[str, Sequence[float]], one: str) -> list[float]:
    """The rate of `one` of ours over the best peer's, by round; 0 where it held nothing."""
    peers = [found for system, found in rates.items() if _is_peer(system)]
    found = []
    for number, ours in enumerate(rates.get(one, ()) if peers else ()):
        best = max(peer[number] for peer in peers)
        ratio = ours / best if best else math.inf
        found.append(ratio if ours else 0.0)
    return found


def _is_peer(system: str) -> bool:
    return not system.startswith(OURS) and system != FLOOR


def _broke(data: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Who could not be driven in which round, and why."""
    return [
        (system, number, each[system]["why_none"].removeprefix(f"{system} "))
        for system in data["systems"]
        for number, each in enumerate(data["rounds"], 1)
        if "why_none" in each[system]
    ]


def _lone(lone: Mapping[str, Any]) -> tuple[str, bool]:
    """What a lone request pays, in a sentence, and whether that is surely little enough."""
    said, light = [], True
    for kind, where in (("in_process", "in process"), ("http", "over HTTP")):
        over, most = lone["over_us"][kind], lone["allowed_us"][kind]
        interval = median_interval(over)
        light &= interval.high <= most  # NaN of too few rounds is not
        said.append(
            f"{nearest_rank(over, 0.5):.0f} us {where} ({interval.low:.0f} to {interval.high:.0f}; at most "
            f"{most:.0f})"
        )
    rounds, (length, width) = len(lone["medians_us"]["bare"]), lone["tensor"]
    says = (
        f"A lone request of {length} x {width} over a bare session with {lone['threads']} threads, median of "
        f"{rounds} rounds with its {CONFIDENCE:.0%} interval: {', '.join(said)}; {_word(light)}."
    )
    return says, light


def _word(met: bool) -> str:
    return "met" if met else "missed"


def _shown(system: str, peers: Mapping[str, Any]) -> str:
    """A system, or a peer alone, by its title; ours has none but its name."""
    name, _, variant = system.partition(" (")
    if name not in peers:
        return system
    return ", ".join(filter(None, (peers[name]["title"], variant.removesuffix(")"))))


def _peers_lines(data: Mapping[str, Any]) -> list[str]:
    """A paragraph on the peers that took part, each as it was run in the rounds."""
    cores, said = data["machine"]["usable_cpus"], []
    for system in data["systems"]:
        name, _, variant = system.partition(" (")
        if name not in data["peers"]:
            continue
        peer = data["peers"][name]
        versions = ", ".join(each.replace("==", " ") for each in peer["requirements"])
        window = f"within {peer['window_ms']:g} ms" if peer["window_ms"] else "without waiting for more"
        batching = f"{peer['batching']}, up to {peer['largest_batch']} requests {window}"
        said.append(
            f"{peer['title']} is {peer['server']} ({versions}): {peer['backend']}; {cores} {peer['workers']} "
            f"of {peer['threads']} thread{'s' * (peer['threads'] > 1)} each; "
            f"{'no batching' if variant == 'plain)' else batching}; {peer['tensors']}."
        )
    return [" ".join(said), ""] if said else []


def _floor_lines(data: Mapping[str, Any]) -> list[str]:
    """What the floor is, where it took part."""
    said = (
        "The floor is no server but the least that one such as ours costs: a Python process with an event "
        "loop and a thread for each core, which runs the ONNX file as it is and checks, limits and counts "
        "nothing."
    )
    return [said, ""] if FLOOR in data["systems"] else []


def _cpu_ms(data: Mapping[str, Any]) -> dict[str, float]:
    """Of each system that held a rate, the CPU time a request at the highest, the median over rounds."""
    found = {}
    for system in data["systems"]:
        searches = (each[system] for each in data["rounds"])
        taken = [
            trial["cpu_ms"]
            for search in searches
            for trial in search["trials"]
            if trial["held"] and trial["rate_per_s"] == search["rate_per_s"] and trial["cpu_ms"] is not None
        ]
        if taken:
            found[system] = nearest_rank(taken, 0.5)
    return found


def _rate_table(
    rates: Mapping[str, Sequence[float]], cpu_ms: Mapping[str, float], peers: Mapping[str, Any]
) -> list[str]:
    count = max(map(len, rates.values()))
    lines = [
        "| system | " + " | ".join(f"round {i + 1}" for i in range(count)) + " | median | CPU ms a request |",
        "| --- |" + " ---: |" * (count + 2),
    ]
    for system, found in sorted(rates.items(), key=lambda item: -nearest_rank(item[1], 0.5)):
        cells = " | ".join(f"{each:.0f}" for each in found)
        took = f"{cpu_ms[system]:.2f}" if system in cpu_ms else "-"
        lines.append(f"| {_shown(system, peers)} | {cells} | {nearest_rank(found, 0.5):.0f} | {took} |")
    return lines


def _variant_lines(data: Mapping[str, Any]) -> list[str]:
    peers = data["peers"]
    lines = [
        f"- {_shown(name, peers)}: " + ", ".join(f"{variant} {rate:.0f}/s" for variant, rate in found.items())
        for name, found in data["variants_tried_per_s"].items()
        if found
    ]
    not_run = {**data["missing"], **data.get("left_out", {})}
    lines += [
        f"- {_shown(name, peers)}: did not run: {reason.removeprefix(f'{name} ')}"
        for name, reason in not_run.items()
    ]
    return ["Variants tried before the rounds:", "", *lines] if lines else []


def _wrong(search: Mapping[str, Any]) -> int:
    return sum(run["check"]["failed"] for run in (search["alone"], *search["trials"]) if run)
