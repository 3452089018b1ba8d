"""The serving benchmark's document: written from its JSON, and honest about what was not met."""

from __future__ import annotations

from copy import deepcopy

import pytest


def held(rate, failed=0, limited=False):
    trial = {"rate_per_s": rate, "held": True, "tells": rate > 0, "check": {"failed": 0}}
    return {
        "rate_per_s": rate,
        "limited_by_generator": limited,
        "alone": {"check": {"failed": failed}, "latency": {"p99_ms": 5.0}},
        "trials": [
            {**trial, "cpu_ms": 1000 / rate if rate else None},
            {**trial, "cpu_ms": 9.0, "tells": False},
        ],
    }


BROKE = {**held(0.0), "why_none": "it ended", "alone": None, "trials": []}
DATA = {
    "command": "python benchmarks/serving/run.py --peers triton --rounds 3",
    "machine": {
        "cpu": "a CPU",
        "cpu_features": ["avx2"],
        "usable_cpus": 2,
        "versions": {"onnxruntime": "1.32.0"},
    },
    "conditions": {
        "lengths": "lognormal:27:2:160",
        "p99_ms": 20.0,
        "seconds": 4.0,
        "trials": 8,
        "step": 1.1,
        "d_model": 768,
    },
    "peers": {
        "triton": {
            "title": "Triton (Python backend)",
            "server": "NVIDIA's tritonserver",
            "backend": "its Python backend calls ONNX Runtime",
            "workers": "instances of the model",
            "threads": 1,
            "tensors": "binary tensors over HTTP",
            "batching": "its dynamic batcher",
            "largest_batch": 8,
            "window_ms": 0.0,
            "requirements": ["nvidia-pytriton==0.7.0", "onnxruntime==1.32.0"],
        },
    },
    "engine": "lean-attention",
    "missing": {},
    "left_out": {},
    "systems": ["mha-deploy", "triton (plain)", "triton (batched)"],
    "rounds": [
        {"mha-deploy": held(600.0), "triton (plain)": held(400.0), "triton (batched)": held(500.0)},
        {"mha-deploy": held(500.0), "triton (plain)": held(390.0), "triton (batched)": held(290.0)},
        {"mha-deploy": held(520.0), "triton (plain)": held(380.0), "triton (batched)": held(280.0)},
    ],
    "lone_request": {
        "tensor": [128, 384],
        "threads": 2,
        "medians_us": {"bare": [1000.0] * 8},
        "over_us": {"in_process": [60.0] * 7 + [55.0], "http": [400.0] * 7 + [420.0]},
        "allowed_us": {"in_process": 150.0, "http": 600.0},
    },
}


def test_the_document_holds_the_rates_the_ratios_and_the_overheads(serving_suite):
    text, met = serving_suite("document").written(DATA)
    assert met
    assert "```\npython benchmarks/serving/run.py --peers triton --rounds 3\n```" in text
    assert "| mha-deploy | 600 | 500 | 520 | 520 |" in text
    said = (
        "Against the best peer (Triton (Python backend), plain), round by round: 1.50x, 1.28x, 1.37x (target"
    )
    assert said in text
    assert "| Triton (Python backend), batched | 500 | 290 | 280 | 290 | 3.45 |" in text
    said = "60 us in process (55 to 60; at most 150), 400 us over HTTP (400 to 420; at most 600); met"
    assert said in text


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("rounds", 1, "triton (plain)"), BROKE, "- Triton (Python backend), plain: 0 in round 2: it ended"),
        (("rounds", 1, "mha-deploy"), held(0.0), "0.00x"),
        (("rounds", 1, "mha-deploy"), held(500.0, failed=2), "Wrong answers in the sample: 2."),
        (("rounds", 1, "triton (plain)"), held(390.0, limited=True), "for the generator's sake: 1."),
        (("missing",), {"ray": "not installed"}, "- ray: did not run: not installed"),
        (("lone_request", "over_us", "in_process"), [60.0] * 7 + [151.0], "(60 to 151; at most 150)"),
        (("lone_request", "over_us", "http"), [400.0] * 7, "(nan to nan; at most 600)"),
    ],
)
def test_whatever_is_not_met_is_said_and_fails(serving_suite, place, value, said):
    data = deepcopy(DATA)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if said == "0.00x":
        data["rounds"][2]["mha-deploy"] = held(0.0)
    text, met = serving_suite("document").written(data)
    assert said in text
    assert not met


def test_bf16_is_given_beside_the_target_and_does_not_meet_it(serving_suite):
    data = deepcopy(DATA)
    data["systems"].append("mha-deploy (bf16)")
    for each in data["rounds"]:
        each |= {"mha-deploy": held(100.0), "mha-deploy (bf16)": held(800.0)}
    text, met = serving_suite("document").written(data)
    assert not met
    assert (
        "0.25x, 0.26x, 0.26x (target: 1.25x in the median; missed); mha-deploy (bf16): 2.00x, 2.05x," in text
    )
    data = deepcopy(DATA)
    data["left_out"] = {"mha-deploy (bf16)": "this CPU does not compute in bf16"}
    text, met = serving_suite("document").written(data)
    assert met
    assert "- mha-deploy (bf16): did not run: this CPU does not compute in bf16" in text


def test_cpu_time_is_of_the_trials_that_tell_and_left_out_where_none_does(serving_suite):
    data = deepcopy(DATA)
    for each in data["rounds"]:
        each["triton (plain)"] = held(0.0)
    page, _ = serving_suite("document").written(data)
    assert "| mha-deploy | 600 | 500 | 520 | 520 | 1.92 |" in page
    assert "| Triton (Python backend), plain | 0 | 0 | 0 | 0 | - |" in page


def test_the_document_says_which_engine_runs(serving_suite):
    text, _ = serving_suite("document").written(DATA)
    assert "mha-deploy runs what `optimize` makes of it, in fp32 (lean-attention)" in text


def test_the_document_says_what_each_peer_is_and_how_it_was_run(serving_suite):
    text, _ = serving_suite("document").written(DATA)
    said = (
        "Triton (Python backend) is NVIDIA's tritonserver (nvidia-pytriton 0.7.0, onnxruntime 1.32.0): its "
        "Python backend calls ONNX Runtime; 2 instances of the model of 1 thread each; binary tensors over "
        "HTTP; batched, it runs its dynamic batcher, up to 8 requests without waiting for more."
    )
    assert said in text
    assert "| Triton (Python backend), plain | 400 | 390 | 380 | 390 |" in text
    data = deepcopy(DATA)
    data["machine"]["usable_cpus"] = 8
    data["peers"]["triton"] |= {"window_ms": 1.0, "threads": 2}
    data["peers"]["ray"] = {**data["peers"]["triton"], "title": "Ray Serve"}
    text, _ = serving_suite("document").written(data)
    assert "8 instances of the model of 2 threads each; binary tensors over HTTP; batched, it runs" in text
    assert "up to 8 requests within 1 ms." in text
    assert "Ray Serve" not in text  # which took no part


@pytest.mark.parametrize(
    ("rounds", "fair"), [((1, 2, 3), True), ((2,), False)], ids=["it never started", "it broke off once"]
)
def test_a_variant_of_a_peer_may_be_missing_but_not_at_times(serving_suite, rounds, fair):
    data = deepcopy(DATA)
    for number in rounds:
        data["rounds"][number - 1]["triton (batched)"] = BROKE
    text, met = serving_suite("document").written(data)
    assert met == fair
    assert "- Triton (Python backend), batched: 0 in round 2: it ended" in text


def test_who_held_nothing_is_named_with_the_reason(serving_suite):
    data = deepcopy(DATA)
    first, second, third = (each["triton (batched)"] for each in data["rounds"])
    first |= {"rate_per_s": 0.0, "trials": [], "alone": {"check": {"failed": 0}, "latency": {"p99_ms": 26.2}}}
    second |= {"rate_per_s": 0.0}
    third |= {"rate_per_s": 0.0, "trials": []}
    text, _ = serving_suite("document").written(data)
    assert "- Triton (Python backend), batched: 0 in round 1: one client alone had a p99 of 26 ms\n" in text
    assert "batched: 0 in round 2: tried down to 290.0/s\n" in text
    assert "batched: 0 in round 3: not tried again, having held nothing before\n" in text
    assert "plain: 0 in round" not in text


def test_a_peer_of_which_no_variant_ran_is_not_beaten(serving_suite):
    data = deepcopy(DATA)
    for each in data["rounds"]:
        each |= {"triton (plain)": BROKE, "triton (batched)": BROKE}
    assert not serving_suite("document").written(data)[1]


def test_ours_as_optimize_chose_it_is_called_by_the_projects_name_alone(serving_suite):
    systems = serving_suite("systems")
    assert str(systems.System(systems.OURS, "default")) == "mha-deploy"
    text, _ = serving_suite("document").written(DATA)
    assert "| mha-deploy | 600 |" in text


def test_the_floor_is_no_peer(serving_suite):
    data = deepcopy(DATA)
    data["systems"].append("floor")
    for each in data["rounds"]:
        each["floor"] = held(800.0)
    data["rounds"][1]["floor"] = BROKE
    text, met = serving_suite("document").written(data)
    assert met
    assert "1.50x, 1.28x, 1.37x (target: 1.25x in the median; met); floor: 2.00x, 0.00x, 2.11x." in text
    assert "The floor is no server but the least that one such as ours costs" in text
