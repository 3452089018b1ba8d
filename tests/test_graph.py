"""The exported file: symbolic axes, no randomness, nothing of this machine, weights in their place."""

from __future__ import annotations

import logging

import onnx
import pytest
import torch
from conftest import small_spec

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.errors import FrozenAxisError, GraphError
from mha_deploy.graph import traced_sizes, write_graph
from mha_deploy.onnx_files import check_graph
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.signature import Dim

SPEC = small_spec()


class TakesTheBatchAsANumber(MultiHeadAttention):
    def forward(self, *inputs):
        y = super().forward(*inputs)
        return y.reshape(int(inputs[0].shape[0]), -1, 32)


class ReshapesToTheTracedBatch(MultiHeadAttention):
    def forward(self, *inputs):
        return super().forward(*inputs).reshape(traced_sizes(SPEC.signature)["batch"], -1, 32)


class AddsNoise(MultiHeadAttention):
    def forward(self, *inputs):
        return super().forward(*inputs) + torch.rand_like(inputs[0])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    module = MultiHeadAttention(small_spec(dropout=0.5)).train()
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    write_graph(module, SPEC.signature, path)
    return module, path


def test_attention_stays_one_node_at_opset_23(exported):
    model = onnx.load(exported[1])
    assert [node.op_type for node in model.graph.node].count("Attention") == 1
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 23)]
    assert {node.domain for node in model.graph.node} == {""}


def test_a_module_left_in_training_is_exported_without_dropout_and_left_in_training(exported):
    module, path = exported
    assert module.training
    assert not [n for n in onnx.load(path).graph.node if "Dropout" in n.op_type or "Random" in n.op_type]


def test_every_dynamic_axis_carries_the_name_of_its_dim(exported):
    graph = onnx.load(exported[1]).graph
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {"x": ["batch", "seq", 32], "mask": ["batch", "seq"], "y": ["batch", "seq", 32]}


def test_nodes_name_the_line_they_come_from_and_no_folder(exported):
    sources = [p.value for node in onnx.load(exported[1]).graph.node for p in node.metadata_props]
    assert any(source.startswith("attention.py:") for source in sources)
    assert b"site-packages" not in exported[1].read_bytes()


def test_exporting_twice_gives_the_same_bytes(exported, tmp_path):
    module, path = exported
    write_graph(module, SPEC.signature, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == path.read_bytes()


def test_the_traced_sizes_are_at_least_two_and_all_different():
    spec = small_spec(d_model=3, num_heads=1, kind="cross", kdim=5, vdim=7, dims=())
    sizes = traced_sizes(spec.signature)
    assert len({*sizes.values(), 3, 5, 7}) == 6
    assert min(sizes.values()) >= 2


@pytest.mark.parametrize("module", [TakesTheBatchAsANumber, ReshapesToTheTracedBatch])
def test_a_frozen_axis_is_named(module, tmp_path):
    with pytest.raises(FrozenAxisError, match="axis 'batch'") as caught:
        write_graph(module(SPEC), SPEC.signature, tmp_path / "model.onnx")
    assert caught.value.exit_code == 1


def test_the_node_that_fixed_an_output_is_named(tmp_path):
    with pytest.raises(FrozenAxisError, match=r"axis 'batch' of 'y'.* is 3 .* from node '.*' \(Reshape\)"):
        write_graph(ReshapesToTheTracedBatch(SPEC), SPEC.signature, tmp_path / "model.onnx")


def test_a_random_graph_is_refused(tmp_path):
    with pytest.raises(GraphError, match=r"not deterministic: .*; export in eval mode"):
        write_graph(AddsNoise(SPEC), SPEC.signature, tmp_path / "model.onnx")


def test_a_failed_export_restores_the_mode_and_the_log_levels(tmp_path):
    module = ReshapesToTheTracedBatch(SPEC).train()
    level = logging.getLogger("torch.onnx").level
    with pytest.raises(FrozenAxisError):
        write_graph(module, SPEC.signature, tmp_path / "model.onnx")
    assert module.training
    assert logging.getLogger("torch.onnx").level == level


def test_weights_above_the_limit_go_to_one_external_file_of_their_size(tmp_path):
    module = MultiHeadAttention(SPEC).eval()
    path = tmp_path / "model.onnx"
    write_graph(module, SPEC.signature, path, inline_limit=1000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    size = sum(p.numel() for p in module.parameters() if p.ndim == 2) * 4
    assert size <= (tmp_path / "model.onnx.data").stat().st_size <= size * 1.1
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.bool)
    with OnnxRuntimeSession(path, SPEC.signature) as session:
        y = session.run({"x": x.numpy(), "mask": mask.numpy()})["y"]
    torch.testing.assert_close(torch.from_numpy(y), module(x, mask).detach())


@pytest.mark.parametrize("content", [b"", b"not onnx", "cut"])
def test_a_file_that_is_no_onnx_is_refused_in_one_line(content, exported, tmp_path):
    path = tmp_path / "bad.onnx"
    path.write_bytes(exported[1].read_bytes()[:4000] if content == "cut" else content)
    with pytest.raises(GraphError, match=r"^bad\.onnx is not a valid ONNX file: .+") as caught:
        check_graph(path, SPEC.signature)
    assert "\n" not in str(caught.value)


def test_a_graph_with_other_inputs_is_refused(exported):
    other = small_spec(mask="full").signature
    with pytest.raises(GraphError, match="has no 'attn_mask'; it has x, mask, y"):
        check_graph(exported[1], other)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "cross", "kdim": 20, "vdim": 24, "value_dim": 12, "num_kv_heads": 2, "dims": ()},
        {"mask": "full", "causal": True, "norm": "pre"},
        {"mask": "none", "num_kv_heads": 1, "bias": ("query", "output")},
        {"mask": "none", "causal": True, "norm": "post", "head_dim": 5},
        {"dims": (Dim("batch", 4, 4, 4), Dim("seq", 7, 7, 7))},
    ],
)
def test_every_kind_of_block_exports_and_answers_as_torch_at_sizes_it_never_saw(changes, tmp_path):
    spec = small_spec(**changes)
    module = MultiHeadAttention(spec).eval()
    write_graph(module, spec.signature, tmp_path / "model.onnx")
    generator = torch.Generator().manual_seed(0)
    with OnnxRuntimeSession(tmp_path / "model.onnx", spec.signature) as session:
        for seed in range(4):
            sizes = {
                d.name: min(max((1, 2, 9, d.max)[(seed + i) % 4], d.min), d.max)
                for i, d in enumerate(spec.dims)
            }
            inputs = [
                torch.randn(spec.signature.shape(t, sizes), generator=generator)
                if t.is_float
                else torch.rand(spec.signature.shape(t, sizes), generator=generator) > 0.3
                for t in spec.signature.inputs
            ]
            names = [t.name for t in spec.signature.inputs]
            y = session.run({n: x.numpy() for n, x in zip(names, inputs, strict=True)})["y"]
            torch.testing.assert_close(torch.from_numpy(y), module(*inputs).detach(), rtol=1e-5, atol=2e-6)
