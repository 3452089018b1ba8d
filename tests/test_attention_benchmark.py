"""The attention benchmark's parent, with contestants in plain numpy at the other end of the real pipe."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.attention.connection import Connection, PeerError
from benchmarks.attention.environments import InstallError, digest_of, python_of
from benchmarks.attention.results import Results, ResultsError
from benchmarks.attention.roster import CEILING, FOLDER, OURS, PEER, RAGGED, REDUCED, ROSTER, Contestant
from benchmarks.attention.rounds import take_rounds
from benchmarks.attention.run import main
from benchmarks.attention.subjects import FILL, SHAPES, Cell, cells, inputs_of, ragged_cell, truth
from benchmarks.attention.suite import Plan, run
from benchmarks.attention.tables import document
from mha_deploy.benchmark import Schedule

FAKE = Path(__file__).parent / "fake_attention_peer.py"
SHORT = Schedule(seconds=0.016, rounds=8, pause_s=0.0, warm_up_runs=2, unrecorded_runs=1)
# The fakes look for the shape 2 x 6.
CELLS = (Cell(384, (5,), 5), Cell(384, (6, 4), 6), Cell(384, (8, 2, 1), 8, ragged=True))


def fake(name, role=PEER, fault=""):
    return Contestant(name, FAKE, FOLDER / "torch.txt", role, {"fault": fault})


CAST = (
    fake("ours", OURS),
    fake("packed", RAGGED),
    fake("steady"),
    fake("blind", fault="ignores the mask"),
    fake("picky", fault="refuses"),
    fake("mortal", fault="dies"),
    fake("fickle", fault="raises late"),
    fake("absent"),
    fake("ceiling", CEILING),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One run of the suite, in which most contestants misbehave."""
    pythons = {each.name: Path(sys.executable) for each in CAST if each.name != "absent"}
    plan = Plan(CELLS, SHORT, tmp_path_factory.mktemp("work"), "the command")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # products this small are not worth a second thread
        return run(plan, pythons, CAST, {"absent": "could not be installed: no such thing"})


@pytest.fixture
def connect(tmp_path):
    opened = []

    def start(module=FAKE, name="fake"):
        connection = Connection(name, Path(sys.executable), module, tmp_path / "log")
        opened.append(connection)
        return connection

    yield start
    for connection in opened:
        connection.__exit__(None, None, None)


def prepared(tmp_path, **options):
    from benchmarks.attention.subjects import write_weights

    return {
        "do": "prepare",
        "d_model": 384,
        "num_heads": 12,
        "weights": str(write_weights(384, tmp_path)),
        "threads": 1,
        "folder": str(tmp_path / "own"),
        "shared": str(tmp_path),
        "options": {"fault": "", **options},
    }


def loading(cell, tmp_path):
    """The message that has a prepared peer answer the inputs of `cell`, in out.npy."""
    x, mask = inputs_of(cell)
    np.savez(tmp_path / "in.npz", x=x, mask=mask)
    files = {"inputs": str(tmp_path / "in.npz"), "answer": str(tmp_path / "out.npy")}
    return {"do": "load", "case": "a", **files}


def cell(results, number):
    return results.data["cells"][number]


def described(results, name):
    return next(each for each in results.data["contestants"] if each["name"] == name)


def test_everyone_who_is_right_is_timed_in_every_round_of_every_shape(results):
    timed = [set(each["rounds_ms"]) for each in results.data["cells"]]
    assert timed == [
        {"ours", "steady", "fickle", "ceiling"},  # mortal ends at the second, before the rounds
        {"ours", "steady", "ceiling"},
        {"ours", "packed", "steady", "fickle", "ceiling"},
    ]
    for each in results.data["cells"]:
        assert all(len(rounds) == SHORT.rounds and all(rounds) for rounds in each["rounds_ms"].values())


def test_who_ignores_the_mask_is_wrong_and_not_timed(results):
    assert described(results, "blind")["failed"]["384"].startswith("wrong: relative error")
    assert all(each["not_timed"]["blind"].startswith("wrong") for each in results.data["cells"])


def test_who_refuses_a_size_is_out_of_it_with_its_reason_on_one_line(results):
    assert described(results, "picky")["failed"] == {"384": "RuntimeError: this size is not for me"}


def test_who_dies_is_out_of_all_shapes_of_the_size_and_the_others_go_on(results):
    assert "ended with status 7" in cell(results, 0)["not_timed"]["mortal"]
    assert "ended with status 7" in cell(results, 1)["not_timed"]["mortal"]
    assert "ended with status 7" in cell(results, 2)["not_timed"]["mortal"]


def test_who_fails_amid_the_rounds_loses_that_shape_only(results):
    assert cell(results, 1)["not_timed"]["fickle"] == "ValueError: no more"
    assert "fickle" in cell(results, 2)["rounds_ms"]


def test_who_is_not_installed_is_listed_with_the_reason(results):
    assert described(results, "absent")["not_run"] == "could not be installed: no such thing"


def test_answers_come_out_near_float64(results):
    assert 0 < cell(results, 1)["relative_error"]["steady"] < 1e-6


def test_a_row_in_which_nothing_is_kept_is_told_and_excludes_nobody(results):
    assert described(results, "steady")["masked_row"] == {"384": "as PyTorch"}
    assert described(results, "ceiling")["masked_row"] == {}


def test_what_contestants_compute_is_no_neighbour(results):
    conditions = results.data["conditions"]["384"]
    assert 0 <= conditions["neighbours_share"] <= 1
    assert set(results.data["conditions"]) == {"384"}


def test_results_survive_their_file(results, tmp_path):
    path = tmp_path / "results" / "attention.json"
    results.write(path)
    assert Results.read(path).data == json.loads(json.dumps(results.data))
    assert document(Results.read(path)) == document(results)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(ResultsError, match=r"other\.json holds no results of this suite: format 'other'"):
        Results.read(path)


def test_the_page_names_the_command_the_verdicts_and_who_did_not_run(results):
    page = document(results)
    assert "```\nthe command\n```" in page
    assert "| absent | - | not run: could not be installed: no such thing | - |" in page
    assert "| picky | - | not run: RuntimeError: this size is not for me | - |" in page
    row = next(line for line in page.splitlines() if line.startswith("| 2 x 6 |"))
    _, _, steady, blind, picky, mortal, fickle, absent, share, _ = (text.strip() for text in row.split("|"))
    assert steady.count(".") == 3
    assert (blind, picky, mortal, fickle, absent) == ("wrong", "-", "-", "-", "-")
    assert share.endswith("%")
    assert page.count("**") == 2 * len(results.data["claims"])


def test_what_libraries_print_stays_off_the_pipe(connect, tmp_path):
    reply = connect().ask(prepared(tmp_path))
    assert reply["versions"]["numpy"] == np.__version__
    assert "libraries print" in (tmp_path / "log").read_text()


def test_a_turn_gives_one_sample_at_the_least_and_runs_unrecorded_until_warm(connect, tmp_path):
    connection = connect()
    connection.ask(prepared(tmp_path))
    connection.ask(loading(CELLS[0], tmp_path))
    right = truth(*inputs_of(CELLS[0]))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), right, atol=1e-5)
    turn = {"do": "turn", "case": "a", "seconds": 0.0}
    started = connection.ask({"do": "cpu"})["cpu_s"]
    cold = connection.ask({**turn, "unrecorded": 1000, "warm_s": 0.0})
    between = connection.ask({"do": "cpu"})["cpu_s"]
    warm = connection.ask({**turn, "unrecorded": 40, "warm_s": 600.0})
    ended = connection.ask({"do": "cpu"})["cpu_s"]
    assert (len(cold["ms"]), len(warm["ms"])) == (1, 1)
    # A run takes half a millisecond of the CPU's time or more.
    assert ended - between >= 41 * 0.0005
    assert between - started < 1000 * 0.0005


def test_what_threads_take_after_an_answer_counts_as_the_peers_own(connect, tmp_path):
    connection = connect()
    connection.ask(prepared(tmp_path, fault="spins on"))
    connection.ask(loading(CELLS[0], tmp_path))
    answered, end = connection.ask({"do": "cpu"})["cpu_s"], time.monotonic() + 20
    while connection.ask({"do": "cpu"})["cpu_s"] < answered + 0.2:
        assert time.monotonic() < end, "what the thread took does not show"
        time.sleep(0.01)


def test_a_module_that_cannot_be_imported_is_the_peers_error(connect, tmp_path):
    module = tmp_path / "peer.py"
    module.write_text("import no_such_package")
    with pytest.raises(PeerError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        connect(module).ask({"do": "turn"})


def test_a_peer_that_does_not_answer_is_ended(connect, tmp_path):
    connection = connect()
    connection.ask(prepared(tmp_path, fault="hangs"))
    with pytest.raises(PeerError, match=r"no answer within 0\.2 s, so it was ended"):
        connection.ask(loading(CELLS[1], tmp_path), patience_s=0.2)
    with pytest.raises(PeerError, match="the process ended with status -9"):
        connection.ask({"do": "turn"})


def test_this_projects_path_is_not_handed_on(connect, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "only_here.py").touch()
    module = tmp_path / "elsewhere.py"
    module.write_text("import only_here")
    with pytest.raises(PeerError, match="No module named 'only_here'"):
        connect(module).ask({"do": "turn"})


class Scripted:
    """A connection that writes down what it is asked."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def ask(self, message):
        self.asked.append((self.name, message["case"], message["unrecorded"], message["seconds"]))
        return {"ms": [float(len(self.asked))]}


def test_a_round_runs_in_an_order_drawn_by_chance_and_then_in_reverse():
    asked, pauses = [], []
    schedule = Schedule(seconds=1.6, rounds=8, pause_s=0.06, warm_up_runs=5, unrecorded_runs=2)
    peers = [Scripted(name, asked) for name in "abc"]
    taken = take_rounds({"case": peers}, schedule, sleep=pauses.append)["case"]
    assert asked[:3] == [("a", "case", 5, 0.0), ("b", "case", 5, 0.0), ("c", "case", 5, 0.0)]
    rounds = ["".join(name for name, *_ in asked[start : start + 6]) for start in range(3, len(asked), 6)]
    assert len(rounds) == 8
    assert all(order[:3] == order[:2:-1] and sorted(order[:3]) == list("abc") for order in rounds)
    assert len(set(rounds)) > 1
    assert {rest for _, *rest in map(tuple, asked[3:]) for rest in [tuple(rest)]} == {("case", 2, 0.1)}
    assert pauses == [0.06] * 48
    assert [len(samples) for samples in taken.samples["a"].rounds_ms] == [2] * 8


def test_a_ceiling_that_sinks_from_round_to_round_is_noticed_as_drift(tmp_path, monkeypatch):
    # Each call of the ceiling takes longer than the one before, whatever its shape.
    sinking, python = fake("ceiling", CEILING, fault="slows down"), Path(sys.executable)
    plan = Plan(CELLS, SHORT, tmp_path, "the command")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    found = run(plan, {"ours": python, "ceiling": python}, [fake("ours", OURS), sinking], {})
    assert any(notice.startswith("drift") for notice in found.data["conditions"]["384"]["notices"])


def test_a_round_goes_through_all_cases_before_the_next_begins():
    asked, begun = [], []
    one, other = Scripted("one", asked), Scripted("other", asked)
    schedule = Schedule(seconds=0.3, rounds=3, pause_s=0.0, warm_up_runs=1, unrecorded_runs=1)
    taken = take_rounds({"short": [one, other], "long": [other]}, schedule, progress=begun.append)
    assert [case for _, case, *_ in asked] == ["short"] * 2 + ["long"] + (["short"] * 4 + ["long"] * 2) * 3
    assert {case: sorted(its.samples) for case, its in taken.items()} == {
        "short": ["one", "other"],
        "long": ["other"],
    }
    assert begun == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


BASE = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]


def synthetic(shapes, ragged=(), cpu_features=("avx512_bf16",)):
    """Results in which each contestant takes `shapes[n][name]` times as long as BASE, round by round."""

    def one(cell, times):
        rounds = {name: [[factor * ms] for ms in BASE] for name, factor in times.items()}
        return {
            **cell.to_json(),
            "ceiling_flops": cell.projection_flops,
            "rounds_ms": rounds,
            "relative_error": {},
            "not_timed": {},
        }

    roles = {each.name: each.role for each in ROSTER}
    return Results(
        {
            "machine": {"cpu_features": list(cpu_features)},
            "contestants": [{"name": name, "role": role} for name, role in roles.items()],
            "cells": [one(*pair) for pair in (*shapes, *ragged)],
        }
    )


def verdicts(results):
    from benchmarks.attention.claims import claims

    return [claim.verdict for claim in claims(results)]


def found(results, number):
    from benchmarks.attention.claims import claims

    return claims(results)[number].found


GOOD = {
    "mha-deploy": 1.0,
    "mha-deploy reduced": 0.5,
    "torch eager": 2.0,
    "torch.onnx.export": 1.5,
    "OpenVINO": 1.0,
    "MatMul ceiling": 0.22,  # of one projection of four
}
WIDE = Cell(768, (64,), 64)
NARROW = Cell(384, (64,), 64)
UNEVEN = Cell(768, (40, 4), 40, ragged=True)
PACKED = {"mha-deploy": 1.0, "mha-deploy packed": 0.25}


def test_every_claim_holds_where_every_figure_does():
    assert verdicts(synthetic([(WIDE, GOOD)], [(UNEVEN, PACKED)])) == ["held"] * 6


@pytest.mark.parametrize(
    ("number", "changed", "says"),
    [
        (0, {"OpenVINO": 0.9}, "0.90 against OpenVINO at 1 x 64, d_model 768"),
        (1, {"torch eager": 1.8}, "over 1 shapes; an engine at the MatMul ceiling would have 1.96"),
        (2, {"torch.onnx.export": 1.2}, "1.20, from 1.20 to 1.20 over 1 shapes"),
        (3, {"MatMul ceiling": 0.2}, "83% at 1 x 64, d_model 768"),
        (4, {"mha-deploy reduced": 0.7}, "1.43 at 1 x 64, d_model 768"),
    ],
)
def test_a_figure_that_misses_breaks_its_own_claim_only(number, changed, says):
    results = synthetic([(WIDE, {**GOOD, **changed})], [(UNEVEN, PACKED)])
    assert [n for n, verdict in enumerate(verdicts(results)) if verdict != "held"] == [number]
    assert verdicts(results)[number] == "not held"
    assert says in found(results, number)


def test_a_ragged_batch_that_packing_speeds_up_too_little_breaks_its_claim():
    results = synthetic([(WIDE, GOOD)], [(UNEVEN, {**PACKED, "mha-deploy packed": 0.5})])
    assert verdicts(results) == ["held"] * 5 + ["not held"]
    assert found(results, 5) == "2.00 at ragged 2 x 40, d_model 768"


def test_a_peer_that_is_faster_by_less_than_the_rule_tells_apart_breaks_nothing():
    results = synthetic([(WIDE, {**GOOD, "OpenVINO": 0.975})])
    assert verdicts(results)[0] == "held"
    cells_data = [dict(each) for each in results.data["cells"]]
    # 10 % faster in the median, but slower in two rounds of eight: its interval holds 1.
    factors = [0.9, 0.9, 1.1, 0.9, 0.9, 1.1, 0.9, 0.9]
    openvino = [[factor * ms] for factor, ms in zip(factors, BASE, strict=True)]
    cells_data[0]["rounds_ms"] = {**cells_data[0]["rounds_ms"], "OpenVINO": openvino}
    unsure = Results({**results.data, "cells": cells_data})
    assert verdicts(unsure)[0] == "held"
    assert "inconclusive at 1 of 1 shapes" in found(unsure, 0)


def test_a_claim_about_every_shape_is_open_while_one_was_not_timed():
    unfinished = {"torch eager": 2.0, "MatMul ceiling": 0.22}
    results = synthetic([(WIDE, GOOD), (replace(WIDE, lengths=(128,), seq=128), unfinished)])
    assert verdicts(results) == ["not judged"] * 6
    assert "not timed at 1 x 128, d_model 768" in found(results, 0)
    worse = synthetic([(WIDE, {**GOOD, "OpenVINO": 0.5}), (NARROW, unfinished)])
    assert verdicts(worse)[0] == "not held"


def test_claims_about_sizes_leave_other_sizes_alone():
    slow = {**GOOD, "mha-deploy reduced": 1.0, "MatMul ceiling": 0.02}
    results = synthetic([(WIDE, GOOD), (NARROW, slow), (replace(WIDE, lengths=(16,), seq=16), slow)])
    assert verdicts(results)[3:5] == ["held", "held"]


def test_reduced_precision_is_not_judged_on_a_cpu_without_bf16():
    results = synthetic([(WIDE, GOOD)], cpu_features=["avx2"])
    assert verdicts(results)[4] == "not judged"
    assert "this CPU has no AVX512_BF16" in found(results, 4)


@given(st.integers(0, 10_000), st.sampled_from([384, 768, 1024]))
def test_ragged_lengths_fill_their_padded_batch_as_asked(seed, d_model):
    ragged = ragged_cell(d_model, seed)
    assert FILL[0] <= ragged.fill <= FILL[1]
    assert ragged.batch == 32
    assert max(ragged.lengths) == ragged.seq <= 160
    assert min(ragged.lengths) >= 2


def test_every_shape_has_a_full_row_and_its_others_end_in_their_second_half():
    made = list(cells(768, SHAPES))
    assert [(each.batch, each.seq) for each in made[:-1]] == list(SHAPES)
    assert made[-1].ragged
    for each in made[:-1]:
        assert each.lengths[0] == each.seq
        assert all(each.seq // 2 <= length <= each.seq for length in each.lengths)
    x, mask = inputs_of(made[3])
    assert (x.shape, x.dtype, mask.dtype) == ((1, 256, 768), np.float32, bool)
    assert mask.sum(axis=1).tolist() == list(made[3].lengths)


@pytest.mark.parametrize("contestant", ROSTER, ids=lambda each: each.name)
def test_every_contestant_has_its_module_and_pinned_requirements(contestant):
    assert contestant.module.is_file()
    lines = contestant.requirements.read_text().splitlines()
    own = {"-c ../../../constraints.txt", "-e .[cpu,openvino]"}
    assert all("==" in line or line in own for line in lines)


def test_the_roster_has_one_of_each_of_our_roles():
    roles = [each.role for each in ROSTER]
    assert [roles.count(role) for role in (OURS, REDUCED, RAGGED, CEILING)] == [1, 1, 1, 1]
    assert roles.count(PEER) == 7


def test_an_environment_that_holds_its_requirements_is_used_again(tmp_path):
    requirements = tmp_path / "thing.txt"
    requirements.write_text("")
    made = python_of(requirements, tmp_path / "envs")
    before = made.lstat().st_mtime_ns
    assert python_of(requirements, tmp_path / "envs") == made
    assert made.lstat().st_mtime_ns == before
    requirements.write_text("./no-such-0-py3-none-any.whl")
    with pytest.raises(InstallError, match=r"ERROR: .*no-such-0-py3-none-any\.whl"):
        python_of(requirements, tmp_path / "envs")


def test_an_environment_of_this_project_is_made_anew_when_its_requirements_change(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.attention.environments.ROOT", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    own, other = tmp_path / "own.txt", tmp_path / "other.txt"
    own.write_text("-e .[cpu]\n")
    other.write_text("numpy==2.4.6\n")
    before = digest_of(own), digest_of(other)
    (tmp_path / "pyproject.toml").write_text("changed")
    assert digest_of(own) != before[0]
    assert digest_of(other) == before[1]


def test_the_command_refuses_names_and_files_that_are_not_there(capsys, tmp_path):
    assert main(["--only", "torch eager,nobody"]) == 2
    assert "error: no contestant nobody; there are mha-deploy, " in capsys.readouterr().err
    assert main(["--tables", str(tmp_path / "none.json")]) == 2
    assert "none.json holds no results of this suite" in capsys.readouterr().err


def test_the_command_makes_tables_of_a_file_and_prints_the_verdicts(capsys, tmp_path, results, monkeypatch):
    monkeypatch.setattr("benchmarks.attention.run.ROOT", tmp_path)
    unjudged = [{**claim, "verdict": "of another rule"} for claim in results.data["claims"]]
    Results({**results.data, "claims": unjudged}).write(tmp_path / "old.json")
    assert main(["--tables", str(tmp_path / "old.json")]) == 0
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == document(results)
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == ["tables"] + [
        claim["verdict"].upper() for claim in results.data["claims"]
    ]


def test_results_of_another_kind_of_cpu_have_a_page_of_their_own(tmp_path, results, monkeypatch):
    monkeypatch.setattr("benchmarks.attention.run.ROOT", tmp_path)
    results.write(tmp_path / "attention-avx2.json")
    assert main(["--tables", str(tmp_path / "attention-avx2.json")]) == 0
    assert [page.name for page in (tmp_path / "docs").iterdir()] == ["benchmarks-avx2.md"]


def test_the_name_of_a_cpu_leads_to_no_other_folder(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--on", "../avx2"])
    assert "'../avx2'; expected small letters and digits" in capsys.readouterr().err
