"""docs/benchmarks.md, from the results alone: ratios with their intervals, and what they stand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.attention.results import CellResult, Results
from benchmarks.attention.roster import CEILING, OURS, PEER, REDUCED
from mha_deploy.benchmark.comparison import RULE
from mha_deploy.latency import CONFIDENCE, Interval


def document(results: Results) -> str:
    """The whole page in Markdown."""
    parts = (_head(results), _claims(results), _shapes(results), _ragged(results), _contestants(results))
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(results: Results) -> Iterator[str]:
    data = results.data
    machine, schedule = data["machine"], data["schedule"]
    yield "# Benchmarks"
    yield ""
    yield (
        "One self-attention block with a key padding mask: the same fp32 weights and inputs for every "
        "contestant. Each is installed in its own environment and runs in its own process, by its public "
        "interface; all take turns in the same rounds. This page is written by the command below from its "
        "JSON file, which holds every sample."
    )
    yield ""
    yield "```"
    yield data["command"]
    yield "```"
    yield ""
    yield f"- Machine: {machine['system']}, {machine['cpu']}, {machine['usable_cpus']} cores, "
    yield f"  {', '.join(machine['cpu_features'])}; taken {data['date']}."
    yield (
        f"- Protocol: {schedule['rounds']} rounds, each {schedule.get('round', 'of one shape')}; order "
        f"{schedule['order']} (seed {schedule['seed']}), "
        f"{schedule['pause_s'] * 1e3:.0f} ms of pause and {schedule['unrecorded_runs_a_turn']} unrecorded "
        f"runs (fewer once they took {schedule['warm_s'] * 1e3:.0f} ms) before each turn, "
        f"{schedule['seconds']:g} s recorded of each contestant and shape over all rounds, one run at least "
        "in a turn."
    )
    yield f"- A ratio is of round medians, with its {CONFIDENCE:.0%} interval over rounds (signed ranks)."
    yield (
        "- Every answer is held against float64 before it is timed; who is wrong is not timed. Each batch's "
        "first row is full, the others end in their second half."
    )
    for d_model, conditions in data["conditions"].items():
        for notice in conditions["notices"]:
            yield f"- While d_model {d_model} was measured: {notice}."
    yield ""


def _claims(results: Results) -> Iterator[str]:
    yield "## What should hold"
    yield ""
    yield from _table(
        ["claim", "verdict", "found"],
        [[each["claim"], f"**{each['verdict']}**", each["found"]] for each in results.data["claims"]],
    )
    yield f"A/B rule: {RULE}."
    yield ""


def _shapes(results: Results) -> Iterator[str]:
    names = [name for name, role in results.roles.items() if role in (PEER, REDUCED)]
    yield "## Time over that of the chosen fp32 engine"
    yield ""
    yield (
        "Above 1 it is slower than `mha-deploy`, below 1 it is faster. Of the MatMul ceiling: its FLOP/s "
        "over those of a plain product of one projection's size, [batch * seq, d_model] by "
        "[d_model, d_model], in ONNX Runtime, by the same rule as any ratio."
    )
    yield ""
    heads = ["batch x seq", *names, "mha-deploy, of the MatMul ceiling"]
    for d_model, cells in _by_size(list(results.cells(ragged=False))):
        yield f"### d_model {d_model}"
        yield ""
        yield from _table(heads, [[*_row(cell, names, _slower), _share(cell)] for cell in cells])


def _ragged(results: Results) -> Iterator[str]:
    names = [name for name, role in results.roles.items() if role not in (OURS, CEILING)]
    cells = list(results.cells(ragged=True))
    yield "## Ragged batches"
    yield ""
    yield (
        "32 requests of log-normal lengths (mean 27, 2 to 160 tokens). Each runs them as one padded batch, "
        "but for the packed layout, which takes their tokens end to end. How many times as fast as the "
        "padded batch of the chosen fp32 engine; below 1 it is slower."
    )
    yield ""
    rows = [
        [str(cell.data["d_model"]), f"{cell.data['fill']:.0%}", *_row(cell, names, _faster)] for cell in cells
    ]
    yield from _table(["d_model", "fill", "batch x longest", *names], rows)


def _contestants(results: Results) -> Iterator[str]:
    yield "## Contestants"
    yield ""
    rows = []
    for each in results.data["contestants"]:
        if each["role"] == CEILING and not each["not_run"]:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
        rows.append([each["name"], versions or "-", _said(each), _masked_row(each)])
    yield from _table(["name", "versions", "notes", "a row in which nothing is kept"], rows)
    yield (
        "PyTorch's answer for a row in which nothing is kept is the output projection's bias. Such rows are "
        "not in the timed inputs, so nobody is left out for them."
    )


def _said(contestant: dict[str, Any]) -> str:
    """Notes, and why it did not run; what is alike for every size is said once."""
    if contestant["not_run"]:
        return f"not run: {contestant['not_run']}"
    kept = {size: "; ".join(notes) for size, notes in contestant["notes"].items()}
    kept |= {size: f"not run: {why}" for size, why in contestant["failed"].items()}
    if len(set(kept.values())) == 1:
        return next(iter(kept.values()))
    return "; ".join(f"d_model {size}: {text}" for size, text in kept.items() if text)


def _masked_row(contestant: dict[str, Any]) -> str:
    return ", ".join(sorted(set(contestant["masked_row"].values()))) or "-"


def _by_size(cells: Sequence[CellResult]) -> Iterator[tuple[int, list[CellResult]]]:
    for d_model in dict.fromkeys(cell.data["d_model"] for cell in cells):
        yield d_model, [cell for cell in cells if cell.data["d_model"] == d_model]


def _row(cell: CellResult, names: Sequence[str], shown: Callable[[CellResult, str], str]) -> list[str]:
    return [f"{cell.data['batch']} x {cell.data['seq']}", *(_figure(cell, name, shown) for name in names)]


def _figure(cell: CellResult, name: str, shown: Callable[[CellResult, str], str]) -> str:
    if name not in cell.data["rounds_ms"]:
        return "wrong" if cell.why_not(name).startswith("wrong") else "-"
    return shown(cell, name) if cell.ran(OURS) else "-"


def _slower(cell: CellResult, name: str) -> str:
    estimate = cell.time_over(OURS, name).estimate
    return _interval(estimate.ratio, estimate.interval)


def _faster(cell: CellResult, name: str) -> str:
    estimate = cell.time_over(OURS, name).estimate
    turned = Interval(1 / estimate.interval.high, 1 / estimate.interval.low)
    return _interval(1 / estimate.ratio, turned)


def _interval(ratio: float, interval: Interval) -> str:
    return f"{ratio:.2f} ({interval.low:.2f}-{interval.high:.2f})"


def _share(cell: CellResult) -> str:
    return f"{cell.ceiling_share:.0%}" if cell.ran(OURS) and cell.ran(CEILING) else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |"
    yield ""
