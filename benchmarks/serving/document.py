"""docs/serving-benchmarks.md, from what `results` keeps of a run alone; nothing in it is written by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turns import LEAST

from mha_deploy.latency import CONFIDENCE, median_interval, nearest_rank
from mha_deploy.render import versions_text

OURS, IN_BF16, FLOOR = "mha-deploy", "mha-deploy (bf16)", "floor"
FACTOR = 1.25


def written(data: Mapping[str, Any]) -> tuple[str, bool]:
    """The document, and whether the targets that it states were met."""
    conditions, machine, rounds = data["conditions"], data["machine"], data["rounds"]
    rates = {system: [each[system]["rate_per_s"] for each in rounds] for system in data["systems"]}
    broke = _broke(data)
    best, fair = _best_peer(rates), _all_ran(data, broke)
    ratios = _ratios(rates, OURS, best)
    faster = bool(ratios) and nearest_rank(ratios, 0.5) >= FACTOR and fair
    beside = (f"; {each}: {_said(_ratios(rates, each, best))}" for each in _beside(rates))
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
        f"The Poisson rate (requests/s) at which half of the trials hold p99 <= {conditions['p99_ms']:g} ms "
        f"from the intended send, every request answered; lengths {conditions['lengths']}, d_model "
        f"{conditions['d_model']}, trials of {conditions['seconds']:g} s, or of {LEAST} requests where those "
        f"take longer. A system's rate goes up by {conditions['step'] - 1:.0%} after a trial that held and "
        "down after one that did not (a staircase: Dixon and Mood, 1948); a round's figure is the geometric "
        f"mean of {conditions['trials']} of its rates. In a round all systems are started anew and take "
        "turns trial by trial, in an order drawn for each turn; between its turns a system is stopped "
        "(SIGSTOP). The load generator runs on the same "
        "cores, alike for all. All are given one ONNX file: "
        f"the peers and {OURS} (as exported) run it as it is; {OURS} runs what `optimize` makes of it, in "
        f"fp32 ({data['engine']}); {OURS} (packed) runs the same weights in this project's packed layout, "
        f"requests of any lengths in a batch, answers within 1e-6 of max|y|; {IN_BF16} runs what `optimize` "
        "makes of it where bf16 is allowed, its answers held to bf16's rule; the target is for fp32. CPU "
        "time is of all of a system's processes, the median over those trials.",
        "",
        *_peers_lines(data),
        *_floor_lines(data),
        *_rate_table(rates, _cpu_ms(data), data["peers"]),
        "",
        *(f"- {_shown(system, data['peers'])}: 0 in round {number}: {why}" for system, number, why in broke),
        *(lost := _lost_lines(data)),
        *([""] if broke or lost else []),
        *_not_run_lines(data),
        f"Against the best peer ({_shown(best, data['peers']) or 'none ran'}), round by round: "
        f"{_said(ratios)} (target: {FACTOR}x in the median; {_word(faster)}){''.join(beside)}.",
        f"Wrong answers in the sample: {wrong}. Rounds of a system in which most trials did not count, for "
        f"the generator's sake: {limited}.",
        "",
        lone,
        "",
    ]
    return "\n".join(lines), faster and light and not wrong and not limited


def _said(ratios: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f}x" for each in ratios) or "none ran"


def _ratios(rates: Mapping[str, Sequence[float]], one: str, best: str) -> list[float]:
    """The rate of `one` over that of the best peer, round by round; 0 where it held nothing."""
    pairs = zip(rates.get(one, ()), rates.get(best, ()), strict=False)
    return [(ours / peer if peer else math.inf) if ours else 0.0 for ours, peer in pairs]


def _best_peer(rates: Mapping[str, Sequence[float]]) -> str:
    """The one with the highest median; "" where there is none."""
    peers = [system for system in rates if _is_peer(system)]
    return max(peers, key=lambda system: nearest_rank(rates[system], 0.5), default="")


def _beside(rates: Mapping[str, Sequence[float]]) -> list[str]:
    return [system for system in rates if not _is_peer(system) and system != OURS]


def _all_ran(data: Mapping[str, Any], broke: Sequence[tuple[str, int, str]]) -> bool:
    """Whether each peer ran, and in every round, but for a variant that never did: nothing is won over one
    that was not there."""
    whole, times = len(data["rounds"]), Counter(system for system, _, _ in broke)
    ran = [
        {whole - times[system] for system in data["systems"] if system.startswith(f"{name} (")} - {0}
        for name in data["peers"]
    ]
    return not data["missing"] and all(each == {whole} for each in ran)


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


def _lost_lines(data: Mapping[str, Any]) -> list[str]:
    """Who ran and held nothing in which round, and how that showed."""
    return [
        f"- {_shown(system, data['peers'])}: 0 in round {number}: {_why_lost(found, data['conditions'])}"
        for system in data["systems"]
        for number, found in enumerate((each[system] for each in data["rounds"]), 1)
        if not found["rate_per_s"] and "why_none" not in found
    ]


def _why_lost(found: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    alone_ms, tried = found["alone"]["latency"]["p99_ms"], [each["rate_per_s"] for each in found["trials"]]
    if tried:
        return f"tried down to {min(tried):.1f}/s"
    if alone_ms > conditions["p99_ms"]:
        return f"one client alone had a p99 of {alone_ms:.0f} ms"
    return "not tried again, having held nothing before"


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
    """A paragraph on the peers that took part, each as it was run."""
    cores, said = data["machine"]["usable_cpus"], []
    for name, peer in data["peers"].items():
        if not any(system.startswith(f"{name} (") for system in data["systems"]):
            continue
        versions = ", ".join(each.replace("==", " ") for each in peer["requirements"])
        window = f"within {peer['window_ms']:g} ms" if peer["window_ms"] else "without waiting for more"
        said.append(
            f"{peer['title']} is {peer['server']} ({versions}): {peer['backend']}; {cores} {peer['workers']} "
            f"of {peer['threads']} thread{'s' * (peer['threads'] > 1)} each; {peer['tensors']}; batched, it "
            f"runs {peer['batching']}, up to {peer['largest_batch']} requests {window}."
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
    """Of each system that held a rate, the CPU time a request, the median over the trials that tell."""
    found = {}
    for system in data["systems"]:
        trials = [trial for each in data["rounds"] for trial in each[system]["trials"]]
        taken = [trial["cpu_ms"] for trial in trials if trial["tells"] and trial["cpu_ms"] is not None]
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


def _not_run_lines(data: Mapping[str, Any]) -> list[str]:
    not_run = {**data["missing"], **data["left_out"]}
    lines = [
        f"- {_shown(name, data['peers'])}: did not run: {reason.removeprefix(f'{name} ')}"
        for name, reason in not_run.items()
    ]
    return [*lines, ""] if lines else []


def _wrong(found: Mapping[str, Any]) -> int:
    return sum(run["check"]["failed"] for run in (found["alone"], *found["trials"]) if run)
