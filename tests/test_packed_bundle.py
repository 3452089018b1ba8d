"""A bundle with the packed layout: exported, proved, verified, inferred, timed and built as an engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import small_spec

from mha_deploy.benchmark import bench
from mha_deploy.bundle import Bundle
from mha_deploy.cases import standard_cases
from mha_deploy.errors import BenchError, CheckError, InputError
from mha_deploy.file_record import FileRecord
from mha_deploy.inference import infer
from mha_deploy.pipeline import export
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request, join
from mha_deploy.runner import BatchRunner
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.signature import Dim
from mha_deploy.typed import Variant
from mha_deploy.variants import check_numerically
from mha_deploy.verification import verify

PACKED = Variant(Precision.FP32, layout="packed")
DIMS = (Dim("batch", 1, 2, 4), Dim("seq", 1, 8, 64))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Heads of 32, which have a fused kernel; read it, never write to it."""
    folder = tmp_path_factory.mktemp("packed") / "bundle"
    return export(small_spec(d_model=64, num_heads=2, dims=DIMS), folder, layout="packed")


@pytest.fixture
def copy(made, tmp_path):
    return Bundle.load(shutil.copytree(made.folder, tmp_path / "copy"))


def ragged(random, lengths):
    return {
        "x": random.standard_normal((sum(lengths), 64), dtype=np.float32),
        "lengths": np.array(lengths, np.int32),
    }


def test_export_adds_a_checked_and_proved_artifact_beside_the_canonical_one(made):
    assert [(a.name, a.layout) for a in made.artifacts] == [("canonical", "padded"), ("packed", "packed")]
    details = made.artifact("packed").details
    assert details["checked"] == "9 cases against PyTorch, in ONNX Runtime"
    assert details["axes_proved_at"] == made.artifact().details["axes_proved_at"]


def chosen(bundle, *names):
    return [case for case in standard_cases(bundle.spec) if case.name in names]


def test_verify_holds_the_packed_artifact_to_the_cases_of_the_padded_one(made):
    report = verify(made, cases=chosen(made, "odd", "fully-masked-row", "padding-garbage"))
    assert report.passed
    names = {case.name for case in report.cases if case.artifact == "packed"}
    assert names == {"odd", "fully-masked-row", "padding-garbage"}


def test_verify_sees_a_packed_graph_that_is_wrong(copy):
    artifact = copy.artifact("packed")
    path = artifact.path(copy.folder)
    model = onnx.load(path)
    bias = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [64])
    bias.raw_data = (onnx.numpy_helper.to_array(bias) + np.float32(0.01)).tobytes()
    onnx.save(model, path)
    copy.record(replace(artifact, files=(FileRecord.of(copy.folder, artifact.files[0].file),)))
    assert not verify(copy, ["packed"], cases=chosen(copy, "odd")).passed
    with pytest.raises(CheckError, match="packed does not compute what PyTorch computes"):
        check_numerically(copy, PACKED, path)


def test_a_session_is_in_the_artifact_s_layout_or_padded_where_that_is_asked_for(made):
    with made.open_session("packed") as session:
        assert isinstance(session, PackedSession)
        assert [str(tensor) for tensor in session.signature.inputs] == [
            "x [tokens, 64] float32",
            "lengths [requests] int64",
        ]
    with made.open_padded_session("packed") as session:
        assert isinstance(session, PaddedView)
        assert session.signature == made.signature
    with made.open_padded_session() as session:
        assert not isinstance(session, PaddedView)


def test_infer_answers_packed_requests_through_the_packed_artifact(made, random):
    tensors = ragged(random, [5, 64, 1, 7, 6, 6, 33, 2, 1, 30, 5, 5])
    expected = infer(made, tensors)
    answers = infer(made, tensors, "packed")
    np.testing.assert_allclose(answers.y, expected.y, rtol=0, atol=1e-6 * np.abs(expected.y).max())
    report = answers.report
    assert (report.requests, report.tokens) == (12, 165)
    assert 2 <= report.batches == len(report.batch_ms) <= 12
    assert 0 <= report.padded_tokens < 12 * 64 - 165


def test_infer_counts_the_positions_that_one_run_is_filled_up_with(made, random, monkeypatch):
    monkeypatch.setattr(PackedSession, "runs", lambda _self, lengths: [tuple(range(len(lengths)))])
    report = infer(made, ragged(random, [5, 2, 8]), "packed").report
    assert (report.batches, report.tokens, report.padded_tokens) == (1, 15, 9)


def test_infer_takes_padded_inputs_too(made, random):
    feeds = {"x": random.standard_normal((2, 9, 64), dtype=np.float32), "mask": np.ones((2, 9), bool)}
    feeds["mask"][1, 4:] = False
    expected, y = infer(made, feeds).y, infer(made, feeds, "packed").y
    np.testing.assert_allclose(y[0], expected[0], rtol=0, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(y[1, :4], expected[1, :4], rtol=0, atol=1e-6 * np.abs(expected).max())


def test_bench_which_has_a_grid_of_padded_sizes_refuses_the_packed_artifact_by_its_dims(made):
    with pytest.raises(BenchError, match="'packed' has dims rows, longest, tokens; the grid is one of batch"):
        bench(made, "packed")


def test_a_runner_serves_the_packed_artifact_under_the_padded_contract(copy, random):
    requests = [Request({"x": random.standard_normal((n, 64), dtype=np.float32)}, n, n) for n in (3, 9)]
    expected = infer(copy, join(copy.spec, requests), "packed").y
    with BatchRunner.over(copy, "packed") as runner:
        answers = [runner.submit(request).result().y for request in requests]
    np.testing.assert_allclose(np.concatenate(answers), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_inspect_names_the_layout(made, cli):
    text = " ".join(cli("inspect", made.folder).stdout.replace("│", " ").split())
    assert "layout: packed" in text
    assert text.count("layout: ") == 1
    listed = json.loads(cli("inspect", made.folder, "--json").stdout)["artifacts"]
    assert [artifact["layout"] for artifact in listed] == ["padded", "packed"]


def test_a_manifest_from_before_there_were_layouts_holds_padded_artifacts(copy):
    file = copy.folder / "manifest.json"
    data = json.loads(file.read_text())
    data["artifacts"] = data["artifacts"][:1]
    del data["artifacts"][0]["layout"]
    file.write_text(json.dumps(data))
    assert {artifact.layout for artifact in Bundle.load(copy.folder).artifacts} == {"padded"}


def test_an_unknown_layout_is_refused(copy, made):
    with pytest.raises(InputError, match="layout 'sparse'; expected one of padded, packed"):
        Variant(Precision.FP32, layout="sparse")
    file = copy.folder / "manifest.json"
    file.write_text(file.read_text().replace('"layout": "packed"', '"layout": "sparse"'))
    with pytest.raises(InputError, match=r"has layout 'sparse'; expected padded, packed"):
        Bundle.load(copy.folder)


def test_a_full_mask_is_refused_before_anything_is_made(cli, tmp_path):
    spec = tmp_path / "full.toml"
    spec.write_text('[attention]\nd_model = 32\nnum_heads = 4\nmask = "full"\n\n[weights]\nseed = 0\n')
    result = cli("export", spec, "-o", tmp_path / "out", "--layout", "packed")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "mask = 'full' has no packed layout" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (PACKED, "packed"),
        (Variant(Precision.FP16, layout="packed"), "packed-fp16"),
        (Variant(Precision.BF16, "same", "packed"), "packed-bf16-io"),
        (Variant(Precision.FP16, "same"), "fp16-io"),
    ],
)
def test_a_variant_is_named_by_layout_precision_and_interface(variant, name):
    assert variant.name == name


def test_a_packed_engine_is_built_with_its_attention_fused(copy, cli):
    pytest.importorskip("tensorrt_rtx")
    result = cli("build-engine", copy.folder, "--fp16", "--layout", "packed", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [attention["fused"] for attention in report["attentions"]] == [True]
    assert (report["precision"], report["warnings"]) == ("fp16", [])
    assert report["command"] == "mha-deploy build-engine BUNDLE --fp16 --layout packed"
    assert report["profiles"] == [{"rows": [1, 2, 4], "longest": [1, 8, 64], "tokens": [1, 16, 256]}]
    assert "against PyTorch" in report["checked"]
    bundle = Bundle.load(copy.folder)
    engine = bundle.artifact("packed-fp16-tensorrt-rtx")
    assert (engine.layout, bundle.artifact("packed-fp16").layout) == ("packed", "packed")


def test_the_packed_fp32_graph_builds_as_it_is(made, tmp_path, cli):
    pytest.importorskip("tensorrt_rtx")
    profile = "rows=1:2:4,longest=1:8:64,tokens=1:16:256"
    graph = made.artifact("packed").path(made.folder)
    result = cli("build-engine", graph, "-o", tmp_path / "out", "--profile", profile, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [a["reason"] for a in report["attentions"]] == [
        "precision: fp32 attention has no fused kernel, fp16 and bf16 have"
    ]


def test_layout_is_for_bundles(made, tmp_path, cli):
    graph = made.artifact("packed").path(made.folder)
    result = cli("build-engine", graph, "-o", tmp_path / "out", "--layout", "packed")
    assert result.exit_code == 2
    assert "--layout is for bundles" in result.stderr


def test_an_engine_may_not_take_the_name_of_a_packed_form(made, cli):
    for name in ("packed", "packed-fp16"):
        result = cli("build-engine", made.folder, "--fp16", "--name", name)
        assert "is the name of an ONNX form" in result.stderr
