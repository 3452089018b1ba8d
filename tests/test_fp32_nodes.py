"""Which nodes fp32 would cure, the list from `verify` to `optimize`, and a graph that keeps them in it."""

from __future__ import annotations

import json
import shutil

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
from mha_deploy.errors import InputError
from mha_deploy.file_record import FileRecord
from mha_deploy.islands import read_keep_fp32
from mha_deploy.locating import OVERFLOW, locate
from mha_deploy.locating.smallest import smallest_set
from mha_deploy.locating.spliced import quantised_nodes, splice_fp32
from mha_deploy.manifest import Artifact
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.quantization.plan import Plan, Source
from mha_deploy.quantization.rewrite import rewritten
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.twin import write_twin
from mha_deploy.typed import Variant, write_typed
from mha_deploy.variants import typed_artifact
from mha_deploy.verification import FAILED, OUT_OF_RANGE, PASSED, Judge, verify
from mha_deploy.verification.beyond_range import judged_beyond_range
from mha_deploy.verification.run import given_cases
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


def test_the_file_that_verify_writes_makes_optimize_a_variant_that_passes(hot_bundle, cli, tmp_path):
    keep, case = tmp_path / "keep.json", ("--case", "ragged-padding")
    found = cli("verify", hot_bundle.folder, "--artifact", "fp16", *case, "--locate", "--keep-fp32-to", keep)
    assert found.exit_code == 1
    assert "located: fp16, on ragged-padding: beyond the precision's range" in found.stdout
    assert f"--keep-fp32 {','.join(read_keep_fp32(str(keep)))}" in found.stdout
    made = cli("optimize", hot_bundle.folder, "--precision", "fp16", "--keep-fp32", keep)
    assert made.exit_code == 0, made.stderr
    details = Bundle.load(hot_bundle.folder).artifact("fp16-islands").details
    assert tuple(details["keep_fp32"]) == read_keep_fp32(str(keep))
    held = cli("verify", hot_bundle.folder, "--artifact", "fp16-islands", *case, "--json")
    assert held.exit_code == 0
    assert "held to fp32's budget x 8192" in json.loads(held.stdout)["cases"][0]["note"]


def test_a_feature_that_is_off_fails_beyond_the_range_too(hot_bundle, hot, tmp_path):
    """The largest error hides one feature that is a little off everywhere; the second gate does not."""
    _, found = hot
    keep, path = found.fp32[0].nodes, tmp_path / "model.onnx"
    write_typed(hot_bundle.reference(), Variant(HALF, keep_fp32=keep), path)
    write_twin(path, path)
    judge, case = Judge(hot_bundle.reference()), standard_cases(hot_bundle.spec, names=["opt"])[0]

    def outcome():
        with OnnxRuntimeSession(path, hot_bundle.signature, precision=HALF) as session:
            return judged_beyond_range(judge, session, "fp16", case)

    assert outcome().outcome == PASSED
    model = onnx.load(path)
    graph = Graph(model)
    bias = graph.array("output.bias")
    bias[3] += 0.9 * outcome().allowed
    graph.store("output.bias", bias)
    onnx.save(model, path)
    off = outcome()
    assert off.max_abs_error <= off.allowed
    assert (off.outcome, off.by_feature.feature) == (FAILED, 3)


def test_the_nodes_of_a_packed_graph_are_found_and_kept_too(hot_bundle, tmp_path):
    shutil.copytree(hot_bundle.folder, tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    typed_artifact(bundle, Variant(HALF, layout="packed"))
    bundle, cases = Bundle.load(bundle.folder), cases_of(bundle, ("ragged-padding",))
    report = verify(bundle, ["packed-fp16"], cases=cases, fail_fast=True)
    found = locate(bundle, report, lambda _: cases)
    assert [fault.kind for fault in found.faults] == [OVERFLOW]
    (nodes,) = found.fp32
    assert nodes.cures
    typed_artifact(bundle, Variant(HALF, layout="packed", keep_fp32=nodes.nodes))
    held = verify(Bundle.load(bundle.folder), ["packed-fp16-islands"], cases=cases)
    assert [case.outcome for case in held.cases] == [PASSED]


@pytest.fixture(scope="module")
def quantised(demo_bundle, tmp_path_factory):
    """The demo's bundle with a plain dynamic int8 form, one scale a batch, which fails at 2.5 %."""
    folder = tmp_path_factory.mktemp("int8") / "bundle"
    shutil.copytree(demo_bundle.folder, folder)
    source = Source.of(onnx.load(demo_bundle.artifact().path(demo_bundle.folder)), demo_bundle.spec)
    onnx.save(rewritten(source, Plan("dynamic", source.products, {})), folder / "int8.onnx")
    files = (FileRecord.of(folder, "int8.onnx"),)
    signature, details = demo_bundle.signature, {"max_relative_error": 0.025}
    bundle = Bundle.load(folder)
    bundle.record(Artifact("int8", "onnxruntime", Precision.INT8, signature, files, details))
    return bundle


def test_the_products_that_int8_is_too_coarse_for_are_found_and_put_back(quantised, cli, tmp_path):
    keep = tmp_path / "keep.json"
    where = ("--artifact", "int8", "--case", "real-inputs", "--locate", "--keep-fp32-to", keep)
    result = cli("verify", quantised.folder, *where, "--json")
    assert result.exit_code == 1
    (nodes,) = json.loads(result.stdout)["located"]["keep_fp32"]
    assert (nodes["cures"], nodes["smallest"], nodes["still_failing"]) == (True, True, [])
    canonical = onnx.load(quantised.artifact().path(quantised.folder))
    model = onnx.load(quantised.artifact("int8").path(quantised.folder))
    products = quantised_nodes(model, canonical)
    assert set(read_keep_fp32(str(keep))) < set(products)
    onnx.save(splice_fp32(model, canonical, nodes["keep_fp32"]), tmp_path / "spliced.onnx")
    judge = Judge(quantised.reference(), max_relative_error=0.025)
    (case,) = given_cases(quantised.spec, {}, quantised.real_inputs())
    with OnnxRuntimeSession(
        tmp_path / "spliced.onnx", quantised.signature, precision=Precision.INT8
    ) as session:
        assert judge(session, "int8", case).outcome == PASSED


def test_with_every_product_put_back_an_int8_graph_computes_what_the_canonical_one_does(quantised, tmp_path):
    canonical = onnx.load(quantised.artifact().path(quantised.folder))
    model = onnx.load(quantised.artifact("int8").path(quantised.folder))
    whole = splice_fp32(model, canonical, quantised_nodes(model, canonical))
    onnx.save(whole, tmp_path / "whole.onnx")
    assert quantised_nodes(whole, canonical) == ()
    feeds = cases_of(quantised, ("odd",))[0].feeds
    with (
        OnnxRuntimeSession(tmp_path / "whole.onnx", quantised.signature) as spliced,
        quantised.open_session(CANONICAL) as right,
    ):
        np.testing.assert_array_equal(spliced.run(feeds)["y"], right.run(feeds)["y"])


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


def test_keep_fp32_to_is_refused_without_locate(small_bundle, cli, tmp_path):
    result = cli("verify", small_bundle.folder, "--keep-fp32-to", tmp_path / "keep.json")
    assert result.exit_code == 2
    assert "give both" in result.stderr
