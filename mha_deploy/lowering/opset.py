"""Saying the same graph in an older opset, where every operator in it allows that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.inliner
from onnx import NodeProto, TensorProto, defs, helper

from mha_deploy.errors import GraphError
from mha_deploy.lowering.graph_edit import DEFAULT_DOMAINS, TensorInfo, label, opset_of, tensor_infos, walk
from mha_deploy.lowering.steps import Step, refusal

PORTABLE_OPSET = 20
PORTABLE_IR = 9  # the IR version that came with opset 20

# Newer versions mostly widen type lists. These changed meaning under the same attributes.
CHANGED_MEANING = {"GroupNormalization"}


def inline_newer_functions(
    model: onnx.ModelProto, keep: tuple[str, ...]
) -> tuple[onnx.ModelProto, list[Step]]:
    """Replace operators that opset 20 lacks, and that the standard defines as functions, by their bodies.

    `model` is changed too; those in `keep` stay.
    """
    newer = [
        node
        for node in walk(model.graph.node)
        if node.domain in DEFAULT_DOMAINS and node.op_type not in keep and _is_newer(node.op_type)
    ]
    if not newer:
        return model, []
    for node in newer:
        _write_defaults(node, opset_of(model))
    wanted = sorted({("", node.op_type) for node in newer})
    inlined = onnx.inliner.inline_selected_functions(model, wanted, inline_schema_functions=True)
    why = f"opset {PORTABLE_OPSET} has no"
    return inlined, [Step(label(node), "inline", f"{why} {node.op_type}") for node in newer]


def _write_defaults(node: NodeProto, opset: int) -> None:
    """Spell out attributes that were left at their default: the inliner takes them for absent."""
    try:
        attributes = defs.get_schema(node.op_type, opset, "").attributes
    except defs.SchemaError:
        return
    given = {attribute.name for attribute in node.attribute}
    node.attribute.extend(
        attribute.default_value
        for name, attribute in attributes.items()
        if name not in given and attribute.default_value.name
    )


def _is_newer(op_type: str) -> bool:
    try:
        defs.get_schema(op_type, PORTABLE_OPSET, "")
    except defs.SchemaError:
        return True
    return False


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
        raise _absent(node, f"operator {node.op_type}") from None
    new = defs.get_schema(node.op_type, opset, "")
    if new.since_version == old.since_version:
        return
    if node.op_type in CHANGED_MEANING:
        raise refusal(label(node), f"operator {node.op_type}", f"opset {PORTABLE_OPSET} means another by it")
    _drop_new_attributes(node, old, new)
    _check_types(node, node.input, old.inputs, infos)
    _check_types(node, node.output, old.outputs, infos)


def _absent(node: NodeProto, what: str) -> GraphError:
    return refusal(label(node), what, f"opset {PORTABLE_OPSET} has none")


def _drop_new_attributes(node: NodeProto, old: defs.OpSchema, new: defs.OpSchema) -> None:
    for attribute in [a for a in node.attribute if a.name not in old.attributes]:
        default = new.attributes[attribute.name].default_value
        if helper.get_attribute_value(attribute) != helper.get_attribute_value(default):
            raise _absent(node, f"attribute {attribute.name!r} of {node.op_type}")
        node.attribute.remove(attribute)


def _check_types(
    node: NodeProto,
    names: Sequence[str],
    formals: Sequence[defs.OpSchema.FormalParameter],
    infos: Mapping[str, TensorInfo],
) -> None:
    # The last formal parameter stands for all that follow where it is variadic.
    variadic = bool(formals) and formals[-1].option == defs.OpSchema.FormalParameterOption.Variadic
    if len(names) > len(formals) and not variadic:
        raise _absent(node, f"tensor {names[len(formals)]!r} of {node.op_type}")
    for position, name in enumerate(names):
        if name not in infos or not infos[name].dtype:
            continue
        spelt = f"tensor({TensorProto.DataType.Name(infos[name].dtype).lower()})"
        if spelt not in formals[min(position, len(formals) - 1)].types:
            raise _absent(node, f"{node.op_type} of {spelt}")
