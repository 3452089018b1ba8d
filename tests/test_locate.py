"""Where an artifact goes wrong, which nodes fp32 would cure, and a graph that keeps them in it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import safetensors.torch
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import Graph
from onnx import TensorProto, numpy_helper

from mha_deploy.bundle import CANONICAL, Bundle
from mha_deploy.cases import standard_cases
from mha_deploy.errors import CheckError, InputError
from mha_deploy.islands import read_keep_fp32
from mha_deploy.locating import FUSION, NOT_FOUND, OVERFLOW, VALUE, Locator, locate, search
from mha_deploy.locating.expected import Expected
from mha_deploy.locating.exposed import ExposedGraph
from mha_deploy.locating.smallest import smallest_set
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.twin import write_twin
from mha_deploy.typed import Variant, write_typed
from mha_deploy.variants import typed_artifact
from mha_deploy.verification import OUT_OF_RANGE, PASSED, verify
from mha_deploy.weights import read_weights

HALF = Precision.FP16
CASES = ("ragged-padding", "min")


def cases_of(bundle, names=CASES):
    return [case for case in standard_cases(bundle.spec) if case.name in names]


@pytest.fixture(scope="module")
def hot_bundle(tmp_path_factory):
    """A block whose queries overflow fp16 and whose keys are small for it: their product is ordinary."""
    folder, spec = tmp_path_factory.mktemp("hot"), small_spec()
    tensors = {name: tensor.clone() for name, tensor in read_weights(spec).tensors.items()}
    for kind in ("weight", "bias"):
        tensors[f"query.{kind}"] *= 1e5
        tensors[f"key.{kind}"] /= 1e5
    safetensors.torch.save_file(tensors, folder / "w.safetensors")
    bundle = export(spec, folder / "bundle", weights=folder / "w.safetensors")
    typed_artifact(bundle, Variant(HALF))
    return Bundle.load(bundle.folder)


@pytest.fixture(scope="module")
def hot(hot_bundle):
    report = verify(hot_bundle, ["fp16"], cases=cases_of(hot_bundle))
    return report, locate(hot_bundle, report, lambda _: cases_of(hot_bundle))


def test_a_block_that_overflows_fp16_is_out_of_range_and_the_first_value_to_overflow_is_named(hot):
    report, found = hot
    assert {case.outcome for case in report.cases} == {OUT_OF_RANGE}
    (fault,) = found.faults
    assert (fault.kind, fault.place.op_type) == (OVERFLOW, "MatMul")
    assert "q, k, v = self._heads(block)" in fault.place.source
    assert "fp16 does not hold it" in fault.note


def test_the_nodes_to_keep_in_fp32_are_those_of_the_overflowing_projection(hot, hot_bundle):
    _, found = hot
    (nodes,) = found.fp32
    graph = Graph(onnx.load(hot_bundle.artifact("fp16").path(hot_bundle.folder)))
    query, others = graph.product_of("query").name, (graph.product_of("value"), graph.product_of("output"))
    assert nodes.cures
    assert {query, graph.add_of("query").name} <= set(nodes.nodes)
    assert not {node.name for node in others} & set(nodes.nodes)
    assert nodes.still_failing == ()


def test_optimize_takes_the_written_list_and_the_variant_then_passes(hot, hot_bundle, cli, tmp_path):
    _, found = hot
    found.fp32[0].write(tmp_path / "keep.json")
    made = cli("optimize", hot_bundle.folder, "--precision", "fp16", "--keep-fp32", tmp_path / "keep.json")
    assert made.exit_code == 0, made.stderr
    bundle = Bundle.load(hot_bundle.folder)
    assert bundle.artifact("fp16-islands").details["keep_fp32"] == list(found.fp32[0].nodes)
    report = verify(bundle, ["fp16-islands"], cases=cases_of(bundle))
    assert {case.outcome for case in report.cases} == {PASSED}
    assert "held to fp32's budget x 8192" in report.cases[0].note


def test_an_engine_is_built_with_the_nodes_in_fp32_and_its_passport_says_so(hot, hot_bundle, cli):
    pytest.importorskip("tensorrt_rtx")
    _, found = hot
    keep = ",".join(found.fp32[0].nodes)
    built = cli("build-engine", hot_bundle.folder, "--fp16", "--keep-fp32", keep, "--json")
    assert built.exit_code == 0, built.stderr
    passport = json.loads(built.stdout)
    assert all(any(name in kept for kept in passport["kept_fp32"]) for name in found.fp32[0].nodes)
    assert f"--keep-fp32 {keep}" in passport["command"]


@pytest.mark.parametrize("io", ["fp32", "same"])
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_with_every_node_in_fp32_a_typed_graph_rounds_inputs_context_and_output_only(
    small_bundle, tmp_path, precision, io
):
    from mha_deploy.islands import computed_in_16_bits

    module, path = small_bundle.reference(), tmp_path / "model.onnx"
    write_typed(module, Variant(precision, io), path)
    every = computed_in_16_bits(onnx.load(path))
    write_typed(module, Variant(precision, io, keep_fp32=every), path)
    write_twin(path, tmp_path / "twin.onnx")
    case = cases_of(small_bundle)[0]
    rounded = {
        n: a if a.dtype == bool or io == "fp32" else a.astype(precision.numpy) for n, a in case.feeds.items()
    }
    feeds = {n: a if a.dtype == bool else a.astype(np.float32) for n, a in rounded.items()}
    with OnnxRuntimeSession(tmp_path / "twin.onnx", small_bundle.signature) as session:
        y = session.run(feeds)["y"][case.compared]
    with small_bundle.open_session(CANONICAL) as session:
        right = session.run(feeds)["y"][case.compared]
    largest = np.abs(right).max()
    np.testing.assert_allclose(y, right, atol=largest * precision.eps, rtol=0)


def test_a_kept_node_reads_the_weights_as_they_were_before_rounding(small_bundle, tmp_path):
    module, path = small_bundle.reference(), tmp_path / "model.onnx"
    write_typed(module, Variant(HALF), path)
    node = Graph(onnx.load(path)).product_of("query").name
    write_typed(module, Variant(HALF, keep_fp32=(node,)), path)
    graph = Graph(onnx.load(path))
    weight = next(t for t in graph.graph.initializer if t.name == graph.node(node).input[1])
    np.testing.assert_array_equal(numpy_helper.to_array(weight), module.query.weight.detach().numpy().T)
    assert weight.data_type == TensorProto.FLOAT


def test_a_node_that_is_not_there_cannot_be_kept_in_fp32(small_bundle, tmp_path):
    with pytest.raises(
        InputError, match=r"no node lost to keep in fp32; these compute in 16 bits: node_where"
    ):
        write_typed(small_bundle.reference(), Variant(HALF, keep_fp32=("lost",)), tmp_path / "model.onnx")


def test_nothing_can_be_kept_in_fp32_where_everything_is():
    with pytest.raises(InputError, match="every node computes in fp32 already"):
        Variant(Precision.FP32, keep_fp32=("a",))


def test_a_list_of_nodes_is_read_from_names_and_from_a_file(tmp_path):
    (tmp_path / "keep.json").write_text('{"keep_fp32": ["a", "b"]}')
    (tmp_path / "bad.json").write_text('{"keep_fp32": "a"}')
    assert read_keep_fp32("a, b") == read_keep_fp32(str(tmp_path / "keep.json")) == ("a", "b")
    with pytest.raises(InputError, match="expected a list of names of nodes"):
        read_keep_fp32(str(tmp_path / "bad.json"))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 8), st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_the_smallest_set_is_the_smallest(count, ways):
    """Each of `ways` is enough; what holds, holds with more."""
    names = [str(number) for number in range(count)]
    enough = [{str(number % count) for number in way} for way in ways]
    found = smallest_set(names, lambda chosen: any(way <= set(chosen) for way in enough), most_trials=10_000)
    assert found.proved
    assert len(found.members) == min(len(way) for way in enough)
    assert set(found.members) in enough


def test_no_set_is_found_where_not_even_all_do():
    assert smallest_set(["a", "b"], lambda _: False) is None


def test_few_trials_leave_a_set_that_no_member_can_leave():
    enough = [{"0", "1", "2"}, {"5", "6", "7"}]
    found = smallest_set(list("01234567"), lambda c: any(way <= set(c) for way in enough), most_trials=9)
    assert not found.proved
    assert set(found.members) in enough


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
    expected = Expected.of(small_bundle, small_bundle.artifact(CANONICAL))
    graph = Graph(expected.truth)
    bias = graph.array("output.bias")
    graph.store("output.bias", bias + 0.01)
    with pytest.raises(CheckError, match="differs from PyTorch in fp64: the export itself is at fault"):
        expected.values(cases_of(small_bundle)[0].feeds)


def test_a_sound_bundle_has_nothing_to_locate(small_bundle):
    report = verify(small_bundle, cases=cases_of(small_bundle))
    assert locate(small_bundle, report, lambda _: cases_of(small_bundle)).faults == ()


def test_keep_fp32_to_is_refused_without_locate(small_bundle, cli, tmp_path):
    result = cli("verify", small_bundle.folder, "--keep-fp32-to", tmp_path / "keep.json")
    assert result.exit_code == 2
    assert "give both" in result.stderr
