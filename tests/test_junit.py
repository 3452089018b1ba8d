"""Reports as JUnit XML: read back by another library, and held to the schema's rules."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
from junitparser import Failure, JUnitXml, Skipped

from mha_deploy.precision import Precision
from mha_deploy.verification import (
    FAILED,
    NOT_CHECKED,
    OUT_OF_RANGE,
    PASSED,
    CaseResult,
    PropertyResult,
    VerifyReport,
)
from mha_deploy.verification.junit import junit_xml, write_junit

CASE = CaseResult(
    name="opt",
    artifact="canonical",
    precision=Precision.FP32,
    sizes={"batch": 2, "seq": 8},
    outcome=PASSED,
    max_abs_error=1e-7,
    relative_error=1e-7,
    yardstick=1e-7,
    allowed=3e-7,
    worst=(1, 5, 9),
)
WRONG = replace(CASE, name="odd", outcome=FAILED, max_abs_error=2e-3)
BEYOND = replace(CASE, name="large", outcome=OUT_OF_RANGE, note="PyTorch at fp16 is not finite here")


def report(*cases, **changes):
    providers = {case.artifact: "CPUExecutionProvider" for case in cases}
    return VerifyReport("block", cases, providers, **changes)


def cases_of(found):
    document = JUnitXml.fromstring(junit_xml(found).encode())
    return {(suite.name, case.name): case.result for suite in document for case in suite}


def test_one_suite_an_artifact_and_one_case_a_case():
    other = replace(CASE, artifact="portable")
    found = cases_of(report(CASE, WRONG, other, seed=3))
    assert list(found) == [("canonical", "opt"), ("canonical", "odd"), ("portable", "opt")]
    suites = list(JUnitXml.fromstring(junit_xml(report(CASE, seed=3)).encode()))
    properties = {p.name: p.value for p in suites[0].properties()}
    assert properties["seed"] == "3"
    assert properties["version numpy"] == np.__version__


def test_a_failure_says_error_allowed_needed_and_place():
    (failure,) = cases_of(report(CASE, WRONG))["canonical", "odd"]
    assert isinstance(failure, Failure)
    assert failure.message == (
        "error 0.002, allowed 3e-07, needed 2e+04 x, worst at batch 1, position 5, feature 9"
    )
    assert "sizes: batch=2, seq=8" in failure.text


def test_what_is_held_to_a_budget_says_so():
    budgeted = replace(WRONG, relative_error=0.05, max_relative_error=0.025, allowed=np.nan)
    (failure,) = cases_of(report(budgeted))["canonical", "odd"]
    assert failure.message.startswith("relative error 0.05, budget 0.025, needed 2 x")


def test_out_of_range_not_run_and_not_checked_are_skipped_with_the_reason():
    changes = {"not_run": {"engine": "no GPU"}, "not_checked": ("padding: no mask input",)}
    found = cases_of(report(CASE, BEYOND, **changes))
    reasons = {key: result[0].message for key, result in found.items() if result}
    assert all(isinstance(r, Skipped) for result in found.values() for r in result)
    assert reasons == {
        ("canonical", "large"): "out of range: PyTorch at fp16 is not finite here",
        ("engine", "run"): "not run: no GPU",
        ("not checked", "padding: no mask input"): "not checked: padding: no mask input",
    }


@pytest.mark.parametrize("cases", [(CASE,), (CASE, WRONG), (CASE, BEYOND), (BEYOND,), ()])
def test_there_is_a_failure_exactly_where_the_report_has_not_passed(cases):
    found = report(*cases)
    failures = int(Xml.fromstring(junit_xml(found)).attrib["failures"])
    assert (failures == 0) == found.passed


def test_the_counts_are_those_of_the_elements_and_names_are_given():
    root = Xml.fromstring(junit_xml(report(CASE, WRONG, BEYOND, not_run={"engine": "no GPU"})))
    assert root.tag == "testsuites"
    for suite in root:
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
            assert int(suite.attrib[count]) == len(list(suite.iter(tag)))
        assert next(child.tag for child in suite) == "properties"
        assert all(case.attrib["name"] and case.attrib["classname"] for case in suite.iter("testcase"))
    assert int(root.attrib["tests"]) == sum(int(suite.attrib["tests"]) for suite in root)


def test_properties_are_cases_too():
    held = PropertyResult("batch-order", "canonical", Precision.FP32, PASSED, 0.0, 0.0, 1e-7, 2e-7)
    moved = replace(held, name="batch-mates", outcome=FAILED, deviation=5e-7)
    idle = replace(held, name="key-order", outcome=NOT_CHECKED, note="self attention", deviation=np.nan)
    found = cases_of(report(CASE, properties=(held, moved, idle)))
    assert not found["canonical", "property batch-order"]
    (failure,) = found["canonical", "property batch-mates"]
    assert failure.message == "deviation 5e-07, allowed 2e-07, needed 5 x"
    (skipped,) = found["canonical", "property key-order"]
    assert skipped.message == "not checked: self attention"


def test_characters_that_xml_cannot_hold_are_escaped(tmp_path):
    note = "\x1b[31m<&\x00>\ud800 \N{SNOWMAN}\ufffe"
    path = tmp_path / "report.xml"
    write_junit(report(replace(WRONG, note=note)), path)
    (failure,) = next(iter(next(iter(JUnitXml.fromfile(str(path)))))).result
    assert failure.message.startswith("\\x1b[31m<&\\x00>\\ud800 \N{SNOWMAN}\\ufffe: error 0.002")
