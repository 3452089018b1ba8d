"""What a foreign ONNX file takes, gives and computes in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper, shape_inference

from mha_deploy.errors import GraphError, InputError, SpecError
from mha_deploy.precision import Precision
from mha_deploy.proof_inputs import symbols
from mha_deploy.signature import Dim, TensorSpec
from mha_deploy.tensorrt.graph import FLOATS, parse_model, stored_tensors, walk

# Products, whose operands' type is what a graph computes in. Those of com.microsoft are ONNX Runtime's.
_PRODUCTS = {
    "Attention", "Conv", "Einsum", "FusedGemm", "FusedMatMul", "Gemm", "GroupQueryAttention", "MatMul",
    "MultiHeadAttention",
}  # fmt: skip
_QUANTISED = {
    "ConvInteger", "DequantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "MatMulNBits", "QAttention", "QGemm", "QLinearConv", "QLinearMatMul",
}  # fmt: skip
_FLOAT_PRECISIONS = {
    "fp64": Precision.FP64,
    "fp32": Precision.FP32,
    "fp16": Precision.FP16,
    "bf16": Precision.BF16,
}
DEFAULT_RANGE = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """`precision` is the one to judge by: the coarsest of the products and the stored weights.

    `computes` names all that were found ("fp16+fp32"). `is_attention`: an attention was found in
    the graph. `remarks` say what could not be read, one line each.
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    opset: int
    precision: Precision
    computes: str
    is_attention: bool
    remarks: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The symbols of the inputs' dynamic axes, in order."""
        return tuple(
            dict.fromkeys(
                name
                for tensor in self.inputs
                for axis in tensor.shape
                if isinstance(axis, str)
                for name in symbols(axis)
            )
        )

    @property
    def judged(self) -> str:
        """What it computes in and by which precision it is judged, for people."""
        return f"computes in {self.computes}, opset {self.opset}; judged as {self.precision.value}"

    def check_budget(self, max_relative_error: float) -> None:
        """A precision without a yardstick needs a declared budget.

        Raises:
            InputError: there is none.
        """
        if self.precision.is_integer and not max_relative_error:
            raise InputError(
                f"{self.path.name} computes in {self.computes}, for which no PyTorch run can be a yardstick; "
                "declare its budget: --max-relative-error 2.5%"
            )

    def output(self, name: str, fits: Sequence[TensorSpec] = ()) -> TensorSpec:
        """The output of that name; without one, the only one, or the only one among `fits`.

        Raises:
            InputError: there is none of that name, or several to choose from.
        """
        listed = ", ".join(str(tensor) for tensor in self.outputs)
        if name:
            found = [tensor for tensor in self.outputs if tensor.name == name]
        else:
            found = list(self.outputs if len(self.outputs) == 1 else fits)
        if len(found) == 1:
            return found[0]
        what = f"no output {name!r}" if name else f"{len(self.outputs)} outputs"
        raise InputError(f"{self.path.name} has {what}; name one with --output-name: {listed}")


def read_foreign(path: Path) -> ForeignFile:
    """Read `path` without running it.

    Raises:
        InputError: there is no such file.
        GraphError: it does not parse, or an input's shape is not declared.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}; give the path of an ONNX model")
    model = parse_model(path)
    remarks = []
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset > onnx.defs.onnx_opset_version():
        remarks.append(
            f"types inside the graph: it uses opset {opset}, the onnx package here knows up to "
            f"{onnx.defs.onnx_opset_version()}; its precision was read from what it stores"
        )
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_tensor(value) for value in model.graph.input if value.name not in weights)
    kinds = _kinds(model)
    return ForeignFile(
        path=path,
        inputs=inputs,
        outputs=tuple(_tensor(value) for value in model.graph.output),
        opset=opset,
        precision=_judged_by(kinds),
        computes="+".join(kinds),
        is_attention=_has_attention(model),
        remarks=tuple(remarks),
    )


def dims_of(file: ForeignFile, texts: Sequence[str]) -> tuple[Dim, ...]:
    """A range for every symbol of the file: those that `texts` give, else 1..8..32.

    Raises:
        InputError: a text names no axis of the file, or is no range.
    """
    given = parse_dims(texts, file.axes)
    return tuple(given.get(name, Dim(name, *DEFAULT_RANGE)) for name in file.axes)


def parse_dims(texts: Sequence[str], known: Sequence[str]) -> dict[str, Dim]:
    """`seq=1:128:512`, `seq=1:512` or `seq=16` as dims, by name; the opt left out is the middle.

    Raises:
        InputError: an axis that is not known or given twice, or no range.
    """
    dims: dict[str, Dim] = {}
    for text in texts:
        name, _, numbers = (part.strip() for part in text.partition("="))
        if name not in known or name in dims:
            why = (
                "twice" if name in dims else f"no such axis; dynamic axes here: {', '.join(known) or 'none'}"
            )
            raise InputError(
                f"--dim {text}: {name!r} is given {why}" if name in dims else f"--dim {text}: {why}"
            )
        try:
            sizes = [int(number) for number in numbers.split(":")]
            low, high = sizes[0], sizes[-1]
            dims[name] = Dim(name, low, sizes[1] if len(sizes) == 3 else (low + high) // 2, high)
        except (ValueError, SpecError) as error:
            raise InputError(
                f"--dim {text}: expected AXIS=SIZE, AXIS=MIN:MAX or AXIS=MIN:OPT:MAX with "
                "1 <= MIN <= OPT <= MAX"
            ) from error
    return dims


def _tensor(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        raise GraphError(f"{value.name!r} is no tensor; sequences and maps are not supported")
    axes: list[str | int] = [
        axis.dim_value if axis.HasField("dim_value") else axis.dim_param or f"{value.name}_axis{position}"
        for position, axis in enumerate(kind.shape.dim)
    ]
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    return TensorSpec(value.name, dtype, tuple(axes))


def _kinds(model: onnx.ModelProto) -> list[str]:
    """What the products compute in and the weights are stored in: "int8", "fp16", ..., coarsest first."""
    return sorted(set(_products(model)) | set(_stored(model)), key=_coarseness) or ["fp32"]


def _coarseness(kind: str) -> float:
    return -_FLOAT_PRECISIONS[kind].eps if kind in _FLOAT_PRECISIONS else -1.0


def _stored(model: onnx.ModelProto) -> Iterator[str]:
    """Of matrices: scalars and small vectors are constants of the arithmetic, not weights."""
    for tensor in stored_tensors(model):
        if len(tensor.dims) >= 2 and tensor.data_type in FLOATS:
            yield FLOATS[tensor.data_type]


def _products(model: onnx.ModelProto) -> Iterator[str]:
    types = _types(model)
    for node in walk(model.graph):
        if node.op_type in _QUANTISED:
            yield "fp8" if FLOATS.get(types.get(node.input[0], 0)) == "fp8" else "int8"
        elif node.op_type in _PRODUCTS and FLOATS.get(types.get(node.input[0], 0)):
            yield FLOATS[types[node.input[0]]]


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types by name, as far as shape inference gets."""
    try:
        graph = shape_inference.infer_shapes(model).graph
    except Exception:  # the runtime, not shape inference, says whether a file is right
        graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type.elem_type for value in values} | {
        tensor.name: tensor.data_type for tensor in graph.initializer
    }


def _judged_by(kinds: Sequence[str]) -> Precision:
    return _FLOAT_PRECISIONS.get(kinds[0], Precision.INT8)


def _has_attention(model: onnx.ModelProto) -> bool:
    """An operator of that kind, or a softmax, which spelled-out ones have whatever is fused around it."""
    return any(n.op_type.endswith("Attention") or n.op_type == "Softmax" for n in walk(model.graph))
