"""Run the suite: python -m benchmarks.attention.run [--quick] [--only NAME,...] [--on CPU] [--tables FILE]

The first run installs the contestants (minutes). A full run then takes half an hour and more on two cores
and writes benchmarks/results/attention.json and docs/benchmarks.md (attention-CPU.json, benchmarks-CPU.md
with --on); a quick one takes few shapes and writes quick.json and quick.md in benchmarks/attention/.work.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.attention.claims import with_claims
from benchmarks.attention.environments import ROOT, InstallError, python_of
from benchmarks.attention.results import Results, ResultsError
from benchmarks.attention.roster import CEILING, OURS, ROSTER, Contestant
from benchmarks.attention.subjects import NUM_HEADS, QUICK_SHAPES, SHAPES, cells
from benchmarks.attention.suite import Plan, run
from benchmarks.attention.tables import document
from mha_deploy.benchmark import Schedule
from mha_deploy.staging import staged_file

WORK = Path(__file__).parent / ".work"
# Seconds recorded over 8 rounds of two turns: most runs are shorter than a turn, the longest are one.
FULL, QUICK = Schedule(seconds=0.4), Schedule(seconds=0.16, warm_up_runs=2, unrecorded_runs=1)


def main(arguments: Sequence[str]) -> int:
    """0 when done, 2 when asked for what is not there."""
    given = _parser().parse_args(arguments)
    output, page = _written(given)
    try:
        roster = _chosen(given.only)
        results = (
            with_claims(Results.read(given.tables))
            if given.tables
            else _measured(roster, arguments, quick=given.quick)
        )
    except (ResultsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not given.tables:
        results.write(output)
        print(f"samples: {output.relative_to(ROOT)}")
    page.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(page) as staging:
        staging.write_text(document(results), encoding="utf-8")
    print(f"tables: {page.relative_to(ROOT)}")
    for claim in results.data["claims"]:
        print(f"{claim['verdict'].upper()}: {claim['claim']}: {claim['found']}")
    return 0


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("benchmarks.attention.run", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, few shapes, short turns")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these peers; mha-deploy always runs")
    parser.add_argument("--on", type=_word, metavar="CPU", help="what to call this kind of CPU, as avx2")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="measure nothing; tables of that JSON")
    return parser


def _word(text: str) -> str:
    """A part of a file's name."""
    if not re.fullmatch("[a-z0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected small letters and digits")
    return text


def _written(given: argparse.Namespace) -> tuple[Path, Path]:
    """Where the results go, and the page of their tables; a file's own CPU is in its name."""
    if given.quick:
        return WORK / "quick.json", WORK / "quick.md"
    named = given.tables.stem.partition("attention-")[2] if given.tables else given.on
    on = f"-{named}" if named else ""
    return ROOT / "benchmarks" / "results" / f"attention{on}.json", ROOT / "docs" / f"benchmarks{on}.md"


def _chosen(only: str) -> list[Contestant]:
    """Those named, and the two that everything is held against.

    Raises:
        ValueError: a name is not in the roster.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in {each.name for each in ROSTER}]
    if unknown:
        known = ", ".join(each.name for each in ROSTER)
        raise ValueError(f"no contestant {', '.join(unknown)}; there are {known}")
    return [each for each in ROSTER if not names or each.name in names or each.role in (OURS, CEILING)]


def _measured(roster: Sequence[Contestant], arguments: Sequence[str], *, quick: bool) -> Results:
    progress = _progress
    pythons, not_run = _installed(roster, progress)
    sizes, shapes = ((384,), QUICK_SHAPES) if quick else (tuple(NUM_HEADS), SHAPES)
    plan = Plan(
        cells=tuple(cell for d_model in sizes for cell in cells(d_model, shapes)),
        schedule=QUICK if quick else FULL,
        folder=WORK,
        command=shlex.join(["python", "-m", "benchmarks.attention.run", *arguments]),
    )
    return run(plan, pythons, roster, not_run, progress)


def _installed(
    roster: Sequence[Contestant], progress: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Interpreters by contestant, and why others have none."""
    pythons, not_run = dict[str, Path](), dict[str, str]()
    for each in roster:
        progress(f"environment of {each.name}")
        try:
            pythons[each.name] = python_of(each.requirements)
        except InstallError as error:
            not_run[each.name] = f"could not be installed: {error}"
    return pythons, not_run


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
