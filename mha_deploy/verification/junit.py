"""A verification as JUnit XML, the form in which CI systems take results.

One testsuite an artifact, one testcase a case and a property. What is out of range, was not run or
could not be checked is skipped, with the reason. Written to the schema that Jenkins publishes
(jenkinsci/xunit-plugin, junit-10.xsd), which other systems read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np

from mha_deploy.machine import versions
from mha_deploy.staging import staged_file
from mha_deploy.verification.report import (
    FAILED,
    OUT_OF_RANGE,
    PASSED,
    CaseResult,
    PropertyResult,
    VerifyReport,
)

# What XML 1.0 (section 2.2) allows in no form, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(report: VerifyReport, path: Path) -> None:
    """Write `report` to `path`, whole or not at all.

    Raises:
        BundleError: the file cannot be written.
    """
    with staged_file(path) as staging:
        staging.write_text(junit_xml(report), encoding="utf-8")


def junit_xml(report: VerifyReport) -> str:
    """The report as a JUnit document. It has a failure exactly where the report has not passed."""
    root = Xml.Element("testsuites", name=_text(f"mha-deploy verify {report.subject}"))
    facts = {
        "against": report.against,
        "rule": f"{report.rule}; yardstick = {report.yardstick}",
        "seed": str(report.seed),
        **{f"version {name}": version for name, version in versions().items()},
    }
    for artifact, provider in report.providers.items():
        cases = [case for case in report.cases if case.artifact == artifact]
        held = [each for each in report.properties if each.artifact == artifact]
        precision = dict.fromkeys([c.precision.value for c in cases] + [p.precision.value for p in held])
        suite = _suite(root, artifact, {"precision": ", ".join(precision), "provider": provider, **facts})
        for case in cases:
            _case(suite, case)
        for each in held:
            _property(suite, each)
        outcomes = [c.outcome for c in cases] if report.cases else [p.outcome for p in held]
        if not {PASSED, FAILED} & set(outcomes):
            _fail(_named(suite, "any case in range"), "no case was in range, so nothing was compared", "")
    if not report.providers:
        _fail(_named(_suite(root, report.subject, facts), "any artifact"), "nothing was run", "")
    for artifact, reason in report.not_run.items():
        _skip(_named(_suite(root, artifact, facts), "run"), f"not run: {reason}")
    if report.not_checked:
        suite = _suite(root, "not checked", facts)
        for line in report.not_checked:
            _skip(_named(suite, line), f"not checked: {line}")
    _count([root, *root])
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="UTF-8"?>\n', "\n")
    )


def _case(suite: Xml.Element, case: CaseResult) -> None:
    element = _named(suite, case.name)
    batch, position, feature = case.worst
    numbers = (
        f"error {case.max_abs_error:.3g}, allowed {case.allowed:.3g}, needed {case.needed:.3g} x, worst at "
        f"batch {batch}, position {position}, feature {feature}"
    )
    if case.max_relative_error:
        numbers = (
            f"relative error {case.relative_error:.3g}, budget {case.max_relative_error:.3g}, needed "
            f"{case.needed:.3g} x, worst at batch {batch}, position {position}, feature {feature}"
        )
    sizes = ", ".join(f"{name}={size}" for name, size in case.sizes.items())
    if case.outcome == FAILED:
        _fail(element, f"{case.note}: {numbers}" if case.note else numbers, f"{numbers}\nsizes: {sizes}")
    elif case.outcome == OUT_OF_RANGE:
        _skip(element, f"out of range: {case.note}")
    else:
        Xml.SubElement(element, "system-out").text = _text(f"{numbers}\nsizes: {sizes}\n{case.note}".strip())


def _property(suite: Xml.Element, held: PropertyResult) -> None:
    element = _named(suite, f"property {held.name}")
    limit = (
        f"budget {held.max_relative_error:.3g}" if held.max_relative_error else f"allowed {held.allowed:.3g}"
    )
    numbers = f"deviation {held.deviation:.3g}, {limit}, needed {held.needed:.3g} x"
    if np.isnan(held.deviation):
        numbers = "nothing was measured"
    if held.outcome == FAILED:
        _fail(element, f"{held.note}: {numbers}" if held.note else numbers, numbers)
    elif held.outcome != PASSED:
        _skip(element, f"{held.outcome}: {held.note}")
    else:
        Xml.SubElement(element, "system-out").text = _text(f"{numbers}\n{held.note}".strip())


def _suite(root: Xml.Element, name: str, properties: Mapping[str, str]) -> Xml.Element:
    suite = Xml.SubElement(root, "testsuite", name=_text(name))
    listed = Xml.SubElement(suite, "properties")
    for key, value in properties.items():
        Xml.SubElement(listed, "property", name=_text(key), value=_text(value))
    return suite


def _named(suite: Xml.Element, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", name=_text(name), classname=suite.attrib["name"])


def _fail(element: Xml.Element, message: str, text: str) -> None:
    Xml.SubElement(element, "failure", message=_text(message), type="verification").text = _text(text)


def _skip(element: Xml.Element, message: str) -> None:
    Xml.SubElement(element, "skipped", message=_text(message))


def _count(elements: Iterable[Xml.Element]) -> None:
    for element in elements:
        element.set("tests", str(len(list(element.iter("testcase")))))
        element.set("failures", str(len(list(element.iter("failure")))))
        element.set("errors", "0")
        if element.tag == "testsuite":
            element.set("skipped", str(len(list(element.iter("skipped")))))


def _text(text: str) -> str:
    """`text` with what XML cannot hold written as its escape, as \\x1b."""
    return _FORBIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
