"""Saying the same graph in an older opset, where every operator in it allows that."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import NodeProto, TensorProto, defs, helper

from mha_deploy.lowering.graph_edit import DEFAULT_DOMAINS, TensorInfo, label, opset_of, tensor_infos, walk
from mha_deploy.lowering.steps import Step, refusal

PORTABLE_OPSET = 20
PORTABLE_IR = 9  # the IR version that came with opset 20

# Newer versions mostly widen type lists. These changed meaning under the same attributes.
CHANGED_MEANING = {"GroupNormalization"}


def retarget(model: onnx.ModelProto) -> list[Step]:
    """Declare the model as opset 20, in place, once every node is known to mean the same there.

    Raises:
        GraphError: naming the node that opset 20 does not have, or not with this type or attribute.
    """
    opset = opset_of(model)
    if opset <= PORTABLE_OPSET:
        return []
    infos = tensor_infos(model)
    for node in walk(model.graph.node):
        if node.domain in DEFAULT_DOMAINS:
            _retarget_node(node, opset, infos)
    for function in model.functions:
        if any(o.domain in DEFAULT_DOMAINS and o.version > PORTABLE_OPSET for o in function.opset_import):
            raise refusal(
                function.name,
                f"a model-local function in opset {opset}",
                "run onnx.inliner.inline_local_functions first",
            )
    for entry in model.opset_import:
        if entry.domain in DEFAULT_DOMAINS:
            entry.version = PORTABLE_OPSET
    model.ir_version = min(model.ir_version, PORTABLE_IR)
    return [Step("model", "retarget-opset", f"opset {opset} becomes {PORTABLE_OPSET}")]


def _retarget_node(node: NodeProto, opset: int, infos: Mapping[str, TensorInfo]) -> None:
    try:
        old = defs.get_schema(node.op_type, PORTABLE_OPSET, "")
    except defs.SchemaError:
        raise refusal(label(node), f"operator {node.op_type}", f"opset {PORTABLE_OPSET} has none") from None
    new = defs.get_schema(node.op_type, opset, "")
    if new.since_version == old.since_version:
        return
    if node.op_type in CHANGED_MEANING:
        raise refusal(label(node), f"operator {node.op_type}", f"it means something else in opset {PORTABLE_OPSET}")
    _drop_new_attributes(node, old, new)
    _check_types(node, old, infos)


def _drop_new_attributes(node: NodeProto, old: defs.OpSchema, new: defs.OpSchema) -> None:
    for attribute in [a for a in node.attribute if a.name not in old.attributes]:
        default = new.attributes[attribute.name].default_value
        if helper.get_attribute_value(attribute) != helper.get_attribute_value(default):
            raise refusal(
                label(node), f"attribute {attribute.name!r} of {node.op_type}", f"opset {PORTABLE_OPSET} has none"
            )
        node.attribute.remove(attribute)


def _check_types(node: NodeProto, old: defs.OpSchema, infos: Mapping[str, TensorInfo]) -> None:
    for names, formals in ((node.input, old.inputs), (node.output, old.outputs)):
        for position, name in enumerate(names):
            # The last formal parameter stands for all that follow where it is variadic.
            variadic = formals and formals[-1].option == defs.OpSchema.FormalParameterOption.Variadic
            if position >= len(formals) and not variadic:
                raise refusal(
                    label(node), f"{len(names)} tensors of {node.op_type}", f"opset {PORTABLE_OPSET} has fewer"
                )
            info = infos.get(name)
            if info is None or not info.dtype:
                continue
            spelt = f"tensor({TensorProto.DataType.Name(info.dtype).lower()})"
            if spelt not in formals[min(position, len(formals) - 1)].types:
                raise refusal(
                    label(node), f"{spelt} in {node.op_type}", f"opset {PORTABLE_OPSET} does not allow that type"
                )
