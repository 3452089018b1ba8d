"""ONNX files as other tools make them, and bundles that hold a reference only."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from graphs import mha_model
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.bundle import Bundle
from mha_deploy.file_record import FileRecord
from mha_deploy.manifest import CHECKPOINT, Manifest
from mha_deploy.spec import PROJECTIONS, AttentionSpec

REFERENCE = """
import torch
from torch import nn

WIDTH, HEADS = 32, 4


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, key_padding_mask):
        return self.attention(x, x, x, key_padding_mask=key_padding_mask)


class OfTokens(nn.Module):
    # Integers only, a mask of 1 = keep, several outputs by name: as Hugging Face has it.

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(20, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        hidden = (1 - attention_mask[:, None].to(x.dtype)) * torch.finfo(x.dtype).min
        weights = (self.project(x) @ x.mT / WIDTH**0.5 + hidden).softmax(-1)
        return {"y": weights @ x, "embedded": x}


def tokens():
    return OfTokens()


def right():
    return Padded()


def other_weights():
    module = Padded()
    with torch.no_grad():
        module.attention.out_proj.weight[3] *= 1.001
    return module


def no_module():
    return 3


def raises():
    raise KeyError("weights.pt")
"""


def reference_bundle(spec, folder, weights=()):
    """A bundle without artifacts: all that verifying a foreign file needs."""
    torch.manual_seed(0)
    module = MultiHeadAttention(spec)
    module.load_state_dict(dict(weights) or module.state_dict())
    folder.mkdir()
    save_file(module.state_dict(), folder / "weights.safetensors")
    checkpoint, machine = dict.fromkeys(CHECKPOINT, ""), {"versions": {}}
    made = {"mha_deploy": "", "created": "", "checkpoint": checkpoint, "machine": machine}
    Manifest(spec, FileRecord.of(folder, "weights.safetensors"), (), made).write(folder)
    return Bundle.load(folder)


def foreign_block(form, folder, **block):
    """A spelled-out attention of `form`, as ONNX, and a bundle with the same weights: (bundle, model)."""
    model = mha_model(form)
    stored = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    read = [stored[name] for node in model.graph.node for name in node.input if name.startswith("weight_")]
    names = [f"{p}.{kind}" for p in PROJECTIONS for kind in ("weight", "bias")]
    weights = {name: (t.T if t.ndim == 2 else t).contiguous() for name, t in zip(names, read, strict=True)}
    spec = AttentionSpec(
        d_model=form.width, num_heads=form.heads, num_kv_heads=form.kv_heads, head_dim=form.head_dim, **block
    )
    return reference_bundle(spec, folder / "bundle", weights), model


def with_tiled_heads(model):
    """Key/value heads in the order 0, 1, 0, 1 where 0, 0, 1, 1 is right."""
    makes = {node.output[0]: node for node in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "Expand":
            wide = makes[node.input[0]]
            groups = _constant(model, node.input[1])[2]
            _store(model, wide.input[1], [1])
            _store(model, node.input[1], [1, groups, 1, 1, 1])


def aligned_to_the_last_key(model):
    """Causal from the last key, where from the first is right."""
    nodes = list(model.graph.node)
    makes = {node.output[0]: node for node in nodes}
    compare = next(node for node in nodes if node.op_type == "LessOrEqual")
    columns, rows = makes[compare.input[0]], makes[makes[compare.input[1]].input[0]]
    before = [
        helper.make_node("Sub", [columns.input[1], rows.input[1]], ["longer"]),
        helper.make_node("Add", [compare.input[1], "longer"], ["shifted"]),
    ]
    compare.input[1] = "shifted"
    at = nodes.index(compare)
    replaced(model.graph.node, [*nodes[:at], *before, *nodes[at:]])


def _constant(model, name):
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


def _store(model, name, values):
    stored = next(t for t in model.graph.initializer if t.name == name)
    stored.CopyFrom(numpy_helper.from_array(np.array(values, np.int64), name))


def replaced(repeated, values):
    """protobuf's lists take no assignment."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del repeated[:]
    repeated.extend(copies)


def edited(source, path, *, mask="", rename=(), sizes=(), extra_output=False):
    """A copy of `source` as another exporter would have left it.

    `mask` turns its boolean input into "int64", "additive" [batch, 1, 1, key] or "ignore"; `rename`
    gives inputs and outputs other names; `sizes` fixes axes.
    """
    model = onnx.load(source)
    graph = model.graph
    if mask:
        replaced(graph.node, [*_front_end(graph, mask), *graph.node])
    for old, new in rename:
        for value in (*graph.input, *graph.output):
            value.name = new if value.name == old else value.name
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
    for value in (*graph.input, *graph.output):
        for axis in value.type.tensor_type.shape.dim:
            for name, size in sizes:
                if axis.dim_param == name:
                    axis.dim_value = size
    if extra_output:
        graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["again"]))
        shape = [axis.dim_param or axis.dim_value for axis in graph.output[0].type.tensor_type.shape.dim]
        graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, shape))
    onnx.save(model, path)
    return path


def _front_end(graph, form):
    """Nodes that make the boolean mask of another form of it, which becomes the input."""
    value = next(v for v in graph.input if v.name == "mask")
    batch, keys = (axis.dim_param for axis in value.type.tensor_type.shape.dim)
    graph.input.remove(value)
    if form == "ignore":
        graph.input.append(helper.make_tensor_value_info("ignored", TensorProto.BOOL, [batch, keys]))
        return [helper.make_node("Not", ["ignored"], ["mask"])]
    if form == "int64":
        graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [batch, keys]))
        return [helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.BOOL)]
    graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [batch, 1, 1, keys]))
    graph.initializer.append(numpy_helper.from_array(torch.tensor([1, 2]).numpy(), "middle"))
    graph.initializer.append(numpy_helper.from_array(torch.tensor(-1.0).numpy(), "below"))
    return [
        helper.make_node("Squeeze", ["bias", "middle"], ["flat"]),
        helper.make_node("Greater", ["flat", "below"], ["mask"]),
    ]
