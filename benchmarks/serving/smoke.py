"""Start each system once and check its answers: what a benchmark needs before it measures.

python benchmarks/serving/smoke.py [PEER ...]
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from subject import exported, in_bf16
from systems import FLOOR, NAMES, OUR_ARGUMENTS, OURS, PEER_VARIANTS, System, prepare, started

from mha_deploy.errors import CheckError, InputError, MissingError
from mha_deploy.load import LoadOptions, ReferenceChecker, closed_plan, parse_lengths, run_load


def main() -> int:
    """Print a line for each system and variant."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    bundle = exported()
    wanted = sys.argv[1:] or [OURS, FLOOR, *NAMES]
    variants = {OURS: tuple(OUR_ARGUMENTS), FLOOR: ("default",)}
    failed = 0
    for name in wanted:
        reason = "" if name in variants else prepare(name)
        for variant in variants.get(name, PEER_VARIANTS):
            system = System(name, variant)
            try:
                if reason:
                    raise InputError(reason)
                served = in_bf16(bundle) if variant == "bf16" else bundle
                checker = ReferenceChecker(served)
                with (
                    tempfile.TemporaryDirectory() as folder,
                    started(system, served.folder, served.signature, Path(folder) / "log") as it,
                ):
                    plan = closed_plan(4, parse_lengths("uniform:2:160"), 60)
                    report = run_load(it.target, plan, LoadOptions(warm_up=8, sample=12), checker)
                answered, check = report.outcomes["answered"], report.check
                print(f"{system}: {answered} of 60 answered, {check.failed} of {check.sampled} wrong", end="")
                print(f", largest error {check.max_abs_error:.1e} (allowed {check.allowed:.1e})", flush=True)
                failed += answered < 60 or not check.passed
            except (InputError, CheckError) as error:
                print(f"{system}: {error}", flush=True)
                failed += 1
            except MissingError as error:  # of this project's engines, one that does not run on this CPU
                print(f"{system}: not here: {error}", flush=True)
    return int(failed > 0)


sys.exit(main())
