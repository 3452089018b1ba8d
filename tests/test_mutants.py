"""Every way to damage a graph is refused, and the damage is found. The table is docs/mutants.md."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field, replace

import onnx
import pytest
from conftest import SMALL_DIMS
from mutants import CAUSAL, DEMO, FORMS, MUTANTS, PORTABLE, TABLE, Graph, table

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.cases import standard_cases
from mha_deploy.file_record import FileRecord
from mha_deploy.locating import CANNOT_RUN, UNREADABLE, Locator
from mha_deploy.lowering import lower_to_portable
from mha_deploy.manifest import Artifact
from mha_deploy.pipeline import export
from mha_deploy.sessions.reference import ReferenceSession
from mha_deploy.spec_file import load_spec
from mha_deploy.verification import verify

# Small cases that together tell every mutant from the block, in the order in which `verify` runs them.
NAMES = ("ragged-padding", "fully-masked-row", "padding-garbage", "min", "odd")
PAIRS = [(form, mutant) for form in FORMS for mutant in MUTANTS if form in mutant.forms]
each_mutant = pytest.mark.parametrize(
    ("form", "mutant"), PAIRS, ids=[f"{form}-{mutant.name}" for form, mutant in PAIRS]
)


@dataclass
class Form:
    """A bundle whose artifact `name` is damaged and mended again."""

    bundle: Bundle
    name: str
    sound: bytes
    refused: dict = field(default_factory=dict)

    def __post_init__(self):
        self.model = onnx.load_from_string(self.sound)
        self.cases = {case.name: case for case in standard_cases(self.bundle.spec, names=NAMES)}
        self.locator = Locator(self.bundle, self.bundle.artifact(self.name))

    @property
    def path(self):
        return self.bundle.folder / self.bundle.artifact(self.name).files[0].file

    def with_file(self, data) -> Bundle:
        """The bundle with `data` as the artifact's file, recorded as if it were the right one."""
        artifact = self.bundle.artifact(self.name)
        self.path.write_bytes(data)
        files = (FileRecord.of(self.bundle.folder, artifact.files[0].file),)
        self.bundle.record(replace(artifact, files=files))
        return self.bundle

    def verdict(self, mutant):
        """What `verify` says of the damaged file; asked for once."""
        if mutant.name not in self.refused:
            data, _, _ = mutant.applied(self.model)
            self.refused[mutant.name] = verified(self.with_file(data), self.name)
        return self.refused[mutant.name]


def verified(bundle, name):
    return verify(bundle, [name], names=NAMES, fail_fast=True)


@pytest.fixture(scope="module", autouse=True)
def one_reference_run_for_equal_inputs():
    """Every mutant meets the same inputs: what PyTorch makes of them is computed once."""
    run, known = ReferenceSession.run, {}

    def remembered(session, feeds):
        digest = hashlib.sha256(b"".join(feeds[name].tobytes() for name in sorted(feeds))).digest()
        key = (session.signature.inputs, session.name, digest)
        if key not in known:
            known[key] = run(session, feeds)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceSession, "run", remembered)
        yield


@pytest.fixture(scope="module")
def forms(demo_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutants")
    made = {}
    for form in (DEMO, PORTABLE):
        shutil.copytree(demo_bundle.folder, folder / form)
        bundle = Bundle.load(folder / form)
        sound = bundle.artifact().path(bundle.folder).read_bytes()
        if form == PORTABLE:
            sound = lower_to_portable(onnx.load_from_string(sound)).model.SerializeToString()
            bundle = with_portable(bundle, sound)
        made[form] = Form(bundle, PORTABLE if form == PORTABLE else CANONICAL, sound)
    causal = export(replace(load_spec("gpt2"), dims=SMALL_DIMS), folder / CAUSAL)
    made[CAUSAL] = Form(causal, CANONICAL, causal.artifact().path(causal.folder).read_bytes())
    return made


def with_portable(bundle, data) -> Bundle:
    (bundle.folder / "portable.onnx").write_bytes(data)
    canonical = bundle.artifact(CANONICAL)
    files = (FileRecord.of(bundle.folder, "portable.onnx"),)
    bundle.record(
        Artifact(PORTABLE, "onnxruntime", canonical.precision, canonical.signature, files, {"lowering": []})
    )
    return bundle


@each_mutant
def test_a_damaged_file_is_refused(forms, form, mutant):
    report = forms[form].verdict(mutant)
    assert not report.passed
    assert any(case.outcome == "failed" for case in report.cases)


@pytest.mark.parametrize("form", FORMS)
def test_the_file_as_it_was_is_accepted(forms, form):
    whole = forms[form]
    report = verified(whole.with_file(whole.sound), whole.name)
    assert report.passed
    assert [case.name for case in report.cases] == list(NAMES)


@each_mutant
def test_the_damaged_node_or_one_that_reads_it_is_named(forms, form, mutant, tmp_path):
    data, model, nodes = mutant.applied(forms[form].model)
    (tmp_path / "model.onnx").write_bytes(data)
    failed = forms[form].verdict(mutant).cases[-1].name
    cases = forms[form].cases
    case = cases.get(failed, cases[NAMES[0]])
    found = forms[form].locator.in_file(tmp_path / "model.onnx", case)
    if nodes:
        assert found.place.node in near(Graph(model), nodes)
    else:  # no node is damaged: what is said must name the file or the input
        assert (found.kind, found.place.node) in ((UNREADABLE, ""), (CANNOT_RUN, ""))
        assert "no ONNX file" in found.note or "['keep']" in found.note


def near(graph, nodes):
    """The damaged nodes and those that read what they give."""
    given = {value for name in nodes for value in graph.node(name).output}
    return {*nodes, *(reader.name for value in given for reader in graph.consumers(value))}


@pytest.mark.parametrize("form", FORMS)
def test_a_lost_key_bias_is_no_damage(forms, form):
    whole = forms[form]
    copy = onnx.ModelProto()
    copy.CopyFrom(whole.model)
    graph = Graph(copy)
    add = graph.add_of("key")
    graph.bypass(add, add.input[0])
    bundle = whole.with_file(copy.SerializeToString())
    assert verified(bundle, whole.name).passed


def damaged(form, name):
    """A bundle with the mutant in it, and the nodes that it damaged."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    data, _, nodes = mutant.applied(form.model)
    return form.with_file(data).folder, nodes


@pytest.mark.parametrize("name", ["mask-renamed", "operator-unknown", "file-cut-short"])
def test_the_command_line_ends_with_1_on_what_does_not_load_and_says_where(forms, cli, name):
    folder, nodes = damaged(forms[DEMO], name)
    where = ("--artifact", CANONICAL, "--case", NAMES[0], "--fail-fast", "--locate")
    result = cli("verify", folder, *where, "--json")
    assert result.exit_code == 1
    (fault,) = json.loads(result.stdout)["located"]["faults"]
    assert fault["place"]["node"] == (nodes[0] if nodes else "")


def test_the_command_line_tells_the_node_its_line_and_how_it_differs(forms, cli):
    folder, (node,) = damaged(forms[DEMO], "wrong-scale")
    result = cli("verify", folder, "--artifact", CANONICAL, "--case", NAMES[0], "--locate")
    assert result.exit_code == 1
    told = result.stdout[result.stdout.index("located: ") :].splitlines()
    assert told[0] == f"located: canonical, on {NAMES[0]}: value out of budget"
    assert told[1] == f"  node {node} (Attention), value 'scaled_dot_product_attention'"
    assert re.fullmatch(r"  from attention\.py:\d+ in .*", told[2])
    assert re.fullmatch(r"  error \S+ at \[\d+, \d+, \d+, \d+\], allowed \S+", told[3])
    assert re.fullmatch(r"  attribute scale is 0\.03125, the reference has .*", told[4])


def test_the_table_of_mutants_is_the_one_in_the_documents():
    assert TABLE.read_text(encoding="utf-8") == table(), "run python tests/mutants.py"


def test_there_are_at_least_twenty_mutants_of_each_form():
    assert {form: sum(form in mutant.forms for mutant in MUTANTS) >= 20 for form in FORMS} == dict.fromkeys(
        FORMS, True
    )
