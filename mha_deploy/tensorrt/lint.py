"""Operators and attributes that TensorRT's parser refuses, or drops without a word.

Read off TensorRT for RTX 1.7 with single-operator models. Most of these have a lowering with the
same meaning; `rule` names the finding for whoever applies one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto

from mha_deploy.tensorrt.attentions import Wiring, attributes, given, head_sizes, wire
from mha_deploy.tensorrt.backend import Backend
from mha_deploy.tensorrt.graph import Graph, node_name, stored_tensors, walk
from mha_deploy.tensorrt.log import recording
from mha_deploy.tensorrt.messages import RefusedError, explain

_FUSED_ELSEWHERE = frozenset(
    [
        "Attention",
        "BiasGelu",
        "BiasSoftmax",
        "BiasSplitGelu",
        "DecoderMaskedMultiHeadAttention",
        "EmbedLayerNormalization",
        "FastGelu",
        "FusedGemm",
        "FusedMatMul",
        "GroupQueryAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "QAttention",
        "QuickGelu",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "SparseAttention",
    ]
)
_NO_IMPORTER = frozenset(
    ("BitCast", "DynamicQuantizeLinear", "FlexAttention", "MatMulInteger", "QLinearMatMul")
)
_STANDARD = ("", "ai.onnx")
# Of opset 25, the newest version of the operator; what is not among them is not known to be read.
_ATTENTION_ATTRIBUTES = frozenset(
    (
        *("is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap", "softmax_precision"),
        *("left_window_size", "qk_matmul_output_mode", "right_window_size"),
    )
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that stops a build: the node, a short `rule`, what it has and why that is no good."""

    node: str
    rule: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what}. {self.why}"


class LintError(RefusedError):
    """The graph holds what TensorRT refuses or drops; `findings` has each."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        listed = "\n".join(f"  - {finding}" for finding in findings)
        super().__init__(f"TensorRT cannot take this graph as it is:\n{listed}")

    def __reduce__(self) -> tuple[type[LintError], tuple[tuple[Finding, ...]], dict[str, Any]]:
        """Made anew from its findings: an exception's own way would give it its text for them."""
        return type(self), (self.findings,), {**self.__dict__, "args": self.args}


def lint(graph: Graph) -> tuple[Finding, ...]:
    """Everything known to be refused or dropped, nodes of nested bodies included."""
    wiring = wire(graph.model)
    findings = [*_doubles(graph), *_unused_inputs(graph)]
    for node in walk(graph.model.graph):
        where = f"{node_name(node)} ({node.op_type})"
        for rule, what, why in _node_problems(node, wiring):
            findings.append(Finding(where, rule, what, why))
    return tuple(findings)


Problem = tuple[str, str, str]


def _node_problems(node: onnx.NodeProto, wiring: Wiring) -> Iterator[Problem]:
    if node.domain == "com.microsoft" and node.op_type in _FUSED_ELSEWHERE:
        yield (
            "fused-elsewhere",
            f"is an operator of ONNX Runtime's own (com.microsoft.{node.op_type})",
            "TensorRT does not know it; export without onnxruntime.transformers.optimizer",
        )
    elif node.domain == "com.microsoft" and node.op_type == "MultiHeadAttention" and given(node, 4):
        yield ("key-padding-mask", "has a key_padding_mask", "TensorRT does not take it; give attention_bias")
    elif node.domain in _STANDARD and node.op_type == "Attention":
        for check in _ATTENTION:
            yield from check(node, wiring)
    elif node.domain in _STANDARD and node.op_type in _NO_IMPORTER:
        yield ("no-importer", "has no importer in TensorRT", "export without it")
    elif node.op_type == "Cast" and attributes(node).get("to") == TensorProto.DOUBLE:
        yield ("float64", "casts to fp64", "TensorRT has no fp64 and would compute in fp32")


def _doubles(graph: Graph) -> Iterator[Finding]:
    why = "TensorRT has no fp64 and would compute in fp32 without saying so; export in fp32 or fp16"
    body = graph.model.graph
    for value in (*body.input, *body.output):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            yield Finding(value.name, "float64", "is an fp64 input or output", why)
    doubles = [
        tensor.name or "a constant"
        for tensor in stored_tensors(graph.model)
        if tensor.data_type == TensorProto.DOUBLE and len(tensor.dims) > 0
    ]
    if doubles:
        yield Finding(doubles[0], "float64", f"is an fp64 weight ({len(doubles)} in all)", why)


def _unused_inputs(graph: Graph) -> Iterator[Finding]:
    body = graph.model.graph
    needed = {value.name for value in body.output}
    for node in reversed(body.node):  # in order, so every reader comes before its maker here
        if needed.intersection(node.output):
            needed.update(node.input)
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    needed.update(name for reader in walk(inner) for name in reader.input)
                    needed.update(value.name for value in inner.output)
    why = "what is fed there would be ignored without a word; remove it from the graph"
    for tensor in graph.inputs:
        if tensor.name not in needed:
            yield Finding(tensor.name, "unused-input", "is an input that no output depends on", why)


def _attributes_refused(node: onnx.NodeProto, _: Wiring) -> Iterator[Problem]:
    options = attributes(node)
    if options.get("softcap", 0.0) != 0.0:
        yield ("softcap", f"has softcap = {options['softcap']:g}", "TensorRT has no capped attention")
    if "softmax_precision" in options:
        yield ("softmax-precision", "sets softmax_precision", "TensorRT refuses the attribute")
    if options.get("is_causal", 0) and given(node, 3):
        yield (
            "causal-and-mask",
            "has is_causal and a mask",
            "TensorRT takes one of the two; fold the causal rule into the mask",
        )


def _outputs_and_caches(node: onnx.NodeProto, _: Wiring) -> Iterator[Problem]:
    if any(node.output[1:]):
        names = ", ".join(name for name in node.output[1:] if name)
        yield ("second-output", f"has further outputs ({names})", "TensorRT takes an Attention with one")
    if given(node, 4) or given(node, 5):
        yield ("cache", "has past_key or past_value", "TensorRT takes no cache; concatenate it outside")


def _lengths_dropped(node: onnx.NodeProto, _: Wiring) -> Iterator[Problem]:
    if given(node, 6):
        yield (
            "lengths-dropped",
            f"has nonpad_kv_seqlen ({given(node, 6)})",
            "TensorRT drops it without an error and would attend to padding; turn it into a mask",
        )


def _attributes_dropped(node: onnx.NodeProto, _: Wiring) -> Iterator[Problem]:
    options = attributes(node)
    sizes = [options.get(f"{side}_window_size", -1) for side in ("left", "right")]
    if max(sizes) >= 0:
        yield (
            "window-dropped",
            f"has window sizes {sizes[0]} and {sizes[1]}",
            "TensorRT drops them without an error and would attend to everything; use a mask",
        )
    for name in sorted(set(options) - _ATTENTION_ATTRIBUTES):
        yield (
            "attribute-unknown",
            f"has attribute {name}",
            "it is newer than this lint; TensorRT may drop it",
        )


def _head_counts(node: onnx.NodeProto, wiring: Wiring) -> Iterator[Problem]:
    options = attributes(node)
    shapes = [wiring.shape(name) for name in node.input[:2]]
    heads = [shape[1] if len(shape) == 4 else 0 for shape in shapes]
    queries = options.get("q_num_heads", heads[0])
    keys = options.get("kv_num_heads", heads[1])
    if queries and keys and queries % keys:
        yield (
            "head-count",
            f"has {queries} query heads for {keys} key/value heads",
            "every key/value head must serve the same number of query heads",
        )


def _value_size(node: onnx.NodeProto, wiring: Wiring) -> Iterator[Problem]:
    head, value = head_sizes(node, wiring)
    if head and value and head != value:
        yield (
            "value-head-size",
            f"has value heads of {value} and query/key heads of {head}",
            "TensorRT wants one size; pad the value heads and cut the result",
        )


def _mask_type(node: onnx.NodeProto, wiring: Wiring) -> Iterator[Problem]:
    mask, own = wiring.dtype(given(node, 3)), wiring.dtype(node.input[0])
    if mask and own and mask != own:
        yield (
            "mask-type",
            f"has an {mask} mask and {own} query, key and value",
            "TensorRT wants a bool mask or one of their type; insert a Cast",
        )


_ATTENTION: tuple[Callable[[onnx.NodeProto, Wiring], Iterator[Problem]], ...] = (
    _attributes_refused,
    _outputs_and_caches,
    _lengths_dropped,
    _attributes_dropped,
    _head_counts,
    _value_size,
    _mask_type,
)


def parser_findings(backend: Backend, graph: Graph) -> tuple[Finding, ...]:
    """Every node that the parser of this very TensorRT refuses, in its words and ours."""
    module = backend.module
    with recording():
        builder = module.Builder(backend.logger)
        network = builder.create_network(backend.network_flags())  # must outlive its parser
        parser = module.OnnxParser(network, backend.logger)
        if backend.supports_model(parser, graph.path.read_bytes(), str(graph.path)):
            return ()
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        return tuple(
            Finding(
                f"{error.node_name() or 'node ' + str(error.node())} ({error.node_operator()})",
                "parser",
                "is refused by TensorRT's parser",
                str(explain([f"{error.func()}: {error.desc()}"])),
            )
            for error in errors
        )
