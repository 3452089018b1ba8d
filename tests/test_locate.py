"""Where an artifact goes wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from mutants import Graph

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.cases import standard_cases
from mha_deploy.errors import CheckError
from mha_deploy.locating import FUSION, NOT_FOUND, VALUE, Locator, locate, search
from mha_deploy.locating.expected import Expected
from mha_deploy.locating.exposed import ExposedGraph
from mha_deploy.locating.inputs import inputs_of
from mha_deploy.precision import Precision
from mha_deploy.typed import Variant
from mha_deploy.variants import typed_artifact
from mha_deploy.verification import FAILED, verify

HALF = Precision.FP16
CASES = ("ragged-padding", "min")


def cases_of(bundle, names=CASES):
    return [case for case in standard_cases(bundle.spec) if case.name in names]


@pytest.fixture(scope="module")
def small_locator(small_bundle):
    return Locator(small_bundle, small_bundle.artifact(CANONICAL))


def renamed(model):
    """The same graph with other names for every value inside it and every node."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = {value.name for value in (*copy.graph.input, *copy.graph.output)}
    kept |= {tensor.name for tensor in copy.graph.initializer}
    for index, node in enumerate(copy.graph.node):
        node.name = f"n{index}"
        for names in (node.input, node.output):
            names[:] = [name if name in kept or not name else f"other_{name}" for name in names]
    del copy.graph.value_info[:]
    return copy


def test_values_under_other_names_are_found_by_what_makes_them(small_bundle, small_locator, tmp_path):
    model = renamed(onnx.load(small_bundle.artifact().path(small_bundle.folder)))
    onnx.save(model, tmp_path / "sound.onnx")
    case = cases_of(small_bundle)[0]
    sound = small_locator.in_file(tmp_path / "sound.onnx", case)
    assert (sound.kind, sound.unmatched) == (NOT_FOUND, ())
    graph = Graph(model)
    product = graph.product_of("value")
    weight = graph.array(product.input[1])
    weight[:, 3] *= np.float32(1.001)
    graph.store(product.input[1], weight)
    onnx.save(model, tmp_path / "wrong.onnx")
    wrong = small_locator.in_file(tmp_path / "wrong.onnx", case)
    assert (wrong.kind, wrong.place.node) == (VALUE, product.name)
    assert wrong.because == (f"{product.input[1]} differs from value.weight by 0.001 of itself in row 3",)


def test_values_of_another_structure_are_found_by_their_numbers(small_bundle, small_locator, tmp_path):
    """A product and its Add as one Gemm-like pair under new names: nothing but numbers tells."""
    model = renamed(onnx.load(small_bundle.artifact().path(small_bundle.folder)))
    graph = Graph(model)
    add = graph.add_of("value")
    add.input[:] = [add.input[1], add.input[0]]  # the operands the other way round: no structure matches
    onnx.save(model, tmp_path / "model.onnx")
    found = small_locator.in_file(tmp_path / "model.onnx", cases_of(small_bundle)[0])
    assert (found.kind, found.unmatched) == (NOT_FOUND, ())


class Fusing(ExposedGraph):
    """A runtime that fuses the output's product and Add wrongly, unless their value in between is shown."""

    def __init__(self, model, values=()):
        super().__init__(model, values)
        self._fused = "val_69" not in values

    def run(self, feeds):
        values = super().run(feeds)
        return values | {"y": values["y"] * np.float32(1.01)} if self._fused else values


def test_a_fault_that_exposing_values_cures_is_the_fusions(small_bundle, small_locator, monkeypatch):
    case = cases_of(small_bundle)[0]
    assert small_locator.on(case).kind == NOT_FOUND
    monkeypatch.setattr(search, "ExposedGraph", Fusing)
    found = small_locator.on(case)
    assert found.kind == FUSION
    assert "fusion of nodes is at fault" in found.note
    assert (found.place.op_type, found.place.value) == ("MatMul", "val_69")


def test_an_export_that_does_not_mean_what_pytorch_means_is_told_apart(small_bundle):
    artifact = small_bundle.artifact(CANONICAL)
    expected = Expected.of(small_bundle, artifact)
    graph = Graph(expected.truth)
    bias = graph.array("output.bias")
    graph.store("output.bias", bias + 0.01)
    with pytest.raises(CheckError, match="differs from PyTorch in fp64: the export itself is at fault"):
        expected.values(next(inputs_of(cases_of(small_bundle)[0], artifact, small_bundle.spec)))


def test_a_sound_bundle_has_nothing_to_locate(small_bundle):
    report = verify(small_bundle, cases=cases_of(small_bundle))
    assert locate(small_bundle, report, lambda _: cases_of(small_bundle)).faults == ()


def test_a_value_of_a_packed_graph_is_found(small_bundle, tmp_path):
    shutil.copytree(small_bundle.folder, tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    artifact = typed_artifact(bundle, Variant(Precision.FP32, layout="packed"))
    locator, case = Locator(bundle, artifact), cases_of(bundle)[0]
    assert locator.on(case).kind == NOT_FOUND
    model = onnx.load(artifact.path(bundle.folder))
    graph = Graph(model)
    (product,) = graph.consumers("value.weight")
    graph.store("value.weight", graph.array("value.weight") * np.float32(1.001))
    onnx.save(model, tmp_path / "wrong.onnx")
    wrong = locator.in_file(tmp_path / "wrong.onnx", case)
    assert (wrong.kind, wrong.place.node) == (VALUE, product.name)


def test_a_fault_that_only_another_draw_of_a_case_shows_is_found(small_bundle, small_locator, tmp_path):
    """One token of one sample, drawn often: a value capped too low is wrong where it is large."""
    (case,) = cases_of(small_bundle, ("min",))
    largest = [float(feeds["x"].max()) for feeds, _ in case.draws]
    cap = sorted(largest)[-2]
    assert max(largest) > largest[0]
    model = onnx.load(small_bundle.artifact().path(small_bundle.folder))
    graph = Graph(model)
    guarded = graph.node("node_where").output[0]
    capped = graph.after(guarded, "Min", graph.constant(cap, "float32"))
    onnx.save(model, tmp_path / "capped.onnx")
    found = small_locator.in_file(tmp_path / "capped.onnx", case)
    assert (found.kind, found.place.op_type) == (VALUE, "MatMul")
    assert found.between == (f"{capped} (Min)",)


def test_a_property_that_fails_alone_is_said_to_have_no_place(small_bundle):
    report = verify(small_bundle, names=["ragged-padding", "key-order"])
    (held,) = report.properties
    failed = replace(report, properties=(replace(held, outcome=FAILED),))
    found = locate(small_bundle, failed, lambda _: ())
    assert found.not_looked_into == ("canonical fails key-order alone, which no one run and no node shows",)


def test_locate_is_refused_for_what_is_no_artifact_of_a_bundle(small_bundle, cli):
    file = small_bundle.artifact().path(small_bundle.folder)
    result = cli("verify", small_bundle.folder, "--onnx", file, "--locate")
    assert result.exit_code == 2
    assert "it does not go with --onnx" in result.stderr
