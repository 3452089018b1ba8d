"""Ways to damage the ONNX of an attention block, each small and each one wrong.

A mutant edits a sound model in place and says which nodes it damaged, by their names in the damaged
file. `docs/mutants.md` is the table of them; run this file to write it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

DEMO, CAUSAL, PORTABLE = "demo", "causal", "portable"
FORMS = (DEMO, CAUSAL, PORTABLE)
TABLE = Path(__file__).parent.parent / "docs" / "mutants.md"
CONTEXT = "scaled_dot_product_attention"
HEADS = 12  # of each form


class Graph:
    """A model with what a mutant needs to find its way in it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph

    def node(self, name: str) -> NodeProto:
        return next(node for node in self.graph.node if node.name == name)

    def only(self, op_type: str) -> NodeProto:
        (node,) = (node for node in self.graph.node if node.op_type == op_type)
        return node

    def producer(self, value: str) -> NodeProto:
        return next(node for node in self.graph.node if value in node.output)

    def consumers(self, value: str) -> list[NodeProto]:
        return [node for node in self.graph.node if value in node.input]

    def add_of(self, projection: str) -> NodeProto:
        """The Add that brings a projection's bias."""
        (node,) = self.consumers(f"{projection}.bias")
        return node

    def product_of(self, projection: str) -> NodeProto:
        """The MatMul with a projection's weight."""
        return self.producer(self.add_of(projection).input[0])

    def heads_of(self, projection: str) -> str:
        """A projection split into heads, [batch, heads, length, head_dim]."""
        (view,) = self.consumers(self.add_of(projection).output[0])
        (transpose,) = self.consumers(view.output[0])
        return transpose.output[0]

    def array(self, initializer: str) -> np.ndarray:
        return numpy_helper.to_array(self._stored(initializer)).copy()

    def store(self, initializer: str, array: np.ndarray) -> None:
        self._stored(initializer).CopyFrom(numpy_helper.from_array(array, initializer))

    def _stored(self, initializer: str) -> TensorProto:
        return next(stored for stored in self.graph.initializer if stored.name == initializer)

    def constant(self, value: object, dtype: str) -> str:
        name = f"mutant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def put(self, readers: list[NodeProto], op_type: str, *inputs: str, **attributes: object) -> str:
        """A new node in front of the first of `readers`, which do not read it yet; its name and value."""
        name = f"mutant_{op_type}_{len(self.graph.node)}"
        place = min(list(self.graph.node).index(reader) for reader in readers)
        self.graph.node.insert(place, helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def after(self, value: str, op_type: str, *more: str, **attributes: object) -> str:
        """A new node behind `value`; whoever read the value reads the node. The node's name."""
        readers = self.consumers(value)
        name = self.put(readers, op_type, value, *more, **attributes)
        redirect(readers, value, name)
        return name

    def bypass(self, node: NodeProto, value: str) -> list[str]:
        """Take a node out; `value` stands for its output. The names of the nodes that read it now."""
        readers = self.consumers(node.output[0])
        if readers:
            redirect(readers, node.output[0], value)
        else:  # what the graph gives out keeps its name
            source = self.producer(value)
            source.output[:] = [node.output[0] if each == value else each for each in source.output]
            readers = [source]
        self.graph.node.remove(node)
        return [reader.name for reader in readers]

    @property
    def keep(self) -> str:
        """The padding mask with its axes of heads and queries, [batch, 1, 1, length]."""
        spread = [node for node in self.consumers("mask") if node.op_type == "Unsqueeze"]
        return next(node.output[0] for node in spread if len(self.array(node.input[1])) == 2)


def redirect(readers: list[NodeProto], old: str, new: str) -> None:
    for reader in readers:
        reader.input[:] = [new if each == old else each for each in reader.input]


Damage = Callable[[Graph], list[str]]


def _unread(data: bytes) -> bytes:
    return data


@dataclass(frozen=True, slots=True)
class Mutant:
    """`damage` edits the graph and returns the names of the nodes that it damaged; none where the
    fault is no node's. `on_bytes` damages the written file. `runs`: the damaged file loads and runs
    at some size."""

    name: str
    what: str
    damage: Damage
    forms: tuple[str, ...] = FORMS
    runs: bool = True
    on_bytes: Callable[[bytes], bytes] = _unread

    def applied(self, model: onnx.ModelProto) -> tuple[bytes, onnx.ModelProto, list[str]]:
        """The damaged file, its model, and the damaged nodes; `model` stays as it is."""
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        nodes = self.damage(Graph(copy))
        return self.on_bytes(copy.SerializeToString()), copy, nodes


MUTANTS: list[Mutant] = []


def mutant(
    what: str,
    *,
    forms: tuple[str, ...] = FORMS,
    runs: bool = True,
    on_bytes: Callable[[bytes], bytes] = _unread,
) -> Callable[[Damage], Damage]:
    def register(damage: Damage) -> Damage:
        name = damage.__name__.replace("_", "-")
        MUTANTS.append(Mutant(name, what, damage, forms, runs, on_bytes))
        return damage

    return register


CANONICAL = (DEMO, CAUSAL)


@mutant("scores scaled by 1/head_dim, not by its root", forms=CANONICAL)
def wrong_scale(g: Graph) -> list[str]:
    node = g.only("Attention")
    head_dim = g.array(g.product_of("query").input[1]).shape[1] // HEADS
    node.attribute.append(helper.make_attribute("scale", 1.0 / head_dim))
    return [node.name]


@mutant("scores scaled 1 % too large", forms=(PORTABLE,))
def scale_one_percent_off(g: Graph) -> list[str]:
    scaled = g.consumers(g.heads_of("query"))
    (node,) = (n for n in scaled if n.op_type == "Mul")
    factor = g.producer(node.input[1])
    stored = numpy_helper.to_array(factor.attribute[0].t)
    node.input[1] = g.constant(stored * 1.01, "float32")
    return [node.name]


@mutant("scores capped softly at 30", forms=CANONICAL)
def scores_capped(g: Graph) -> list[str]:
    node = g.only("Attention")
    kept = [a for a in node.attribute if a.name != "softcap"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("softcap", 30.0)])
    return [node.name]


@mutant("padding kept and tokens masked")
def mask_inverted(g: Graph) -> list[str]:
    return [g.after(g.keep, "Not")]


@mutant("the mask of key i put on key i + 1")
def mask_shifted_by_one(g: Graph) -> list[str]:
    keep = g.keep
    readers = g.consumers(keep)
    ends = {n: g.constant([n], "int64") for n in (-1, 0, 3, 2**31)}
    last = g.put(readers, "Slice", keep, ends[-1], ends[2**31], ends[3])
    others = g.put(readers, "Slice", keep, ends[0], ends[-1], ends[3])
    shifted = g.put(readers, "Concat", last, others, axis=3)
    redirect(readers, keep, shifted)
    return [last, others, shifted]


@mutant("every sample masked as the first one")
def mask_of_the_first_sample(g: Graph) -> list[str]:
    return [g.after(g.keep, "Slice", *(g.constant([n], "int64") for n in (0, 1, 0)))]


@mutant("heads 0 and 1 swapped in the context")
def heads_swapped(g: Graph) -> list[str]:
    return [g.after(CONTEXT, "Gather", g.constant([1, 0, *range(2, HEADS)], "int64"), axis=1)]


@mutant("keys used as values and values as keys")
def key_and_value_swapped(g: Graph) -> list[str]:
    key, value = g.heads_of("key"), g.heads_of("value")
    other = {key: value, value: key}
    readers = {n.name: n for each in (key, value) for n in g.consumers(each) if n.op_type != "Shape"}
    for node in readers.values():
        node.input[:] = [other.get(each, each) for each in node.input]
    return list(readers)


@mutant("query and key projected by each other's weights")
def query_and_key_weights_swapped(g: Graph) -> list[str]:
    query, key = g.product_of("query"), g.product_of("key")
    query.input[1], key.input[1] = key.input[1], query.input[1]
    return [query.name, key.name]


@mutant("the Add of the query's bias lost")
def query_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "query")


@mutant("the Add of the value's bias lost")
def value_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "value")


@mutant("the Add of the output's bias lost")
def output_bias_lost(g: Graph) -> list[str]:
    return _without_bias(g, "output")


def _without_bias(g: Graph, projection: str) -> list[str]:
    add = g.add_of(projection)
    return g.bypass(add, add.input[0])


@mutant("the output's bias added twice")
def output_bias_twice(g: Graph) -> list[str]:
    product = g.product_of("output")
    return [g.after(product.output[0], "Add", "output.bias")]


@mutant("one weight row of the query projection 0.1 % too large")
def query_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "query")


@mutant("one weight row of the value projection 0.1 % too large")
def value_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "value")


@mutant("one weight row of the output projection 0.1 % too large")
def output_weight_row_off(g: Graph) -> list[str]:
    return _row_off(g, "output")


def _row_off(g: Graph, projection: str) -> list[str]:
    product = g.product_of(projection)
    weight = g.array(product.input[1])  # [in, out]: a row of PyTorch's weight is a column here
    weight[:, 5] *= np.float32(1.001)
    g.store(product.input[1], weight)
    return [product.name]


@mutant("the output's weight transposed")
def output_weight_transposed(g: Graph) -> list[str]:
    product = g.product_of("output")
    g.store(product.input[1], g.array(product.input[1]).T.copy())
    return [product.name]


@mutant("the value's weight rounded to bf16")
def value_weight_in_bf16(g: Graph) -> list[str]:
    product = g.product_of("value")
    bits = g.array(product.input[1]).view(np.uint32)
    g.store(product.input[1], ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32))
    return [product.name]


@mutant("a query does not see its own position", forms=(CAUSAL,))
def causal_off_by_one_back(g: Graph) -> list[str]:
    node = g.only("GreaterOrEqual")
    node.op_type = "Greater"
    return [node.name]


@mutant("a query sees one position of the future", forms=(CAUSAL,))
def causal_off_by_one_ahead(g: Graph) -> list[str]:
    node = g.only("GreaterOrEqual")
    later = g.put([node], "Add", node.input[0], g.constant([1], "int64"))
    node.input[0] = later
    return [later]


@mutant("the future not masked", forms=(CAUSAL,))
def causality_lost(g: Graph) -> list[str]:
    return [g.after(g.only("GreaterOrEqual").output[0], "Or", g.constant(True, "bool"))]


@mutant("causal where it must not be", forms=(DEMO,))
def causal_by_mistake(g: Graph) -> list[str]:
    node = g.only("Attention")
    kept = [a for a in node.attribute if a.name != "is_causal"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("is_causal", 1)])
    return [node.name]


@mutant("softmax over the queries, not over the keys", forms=(PORTABLE,))
def softmax_over_the_wrong_axis(g: Graph) -> list[str]:
    node = g.only("Softmax")
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", -2))
    return [node.name]


@mutant("a fully masked row left to the softmax", forms=(PORTABLE,))
def empty_row_guard_removed(g: Graph) -> list[str]:
    guard = g.producer(CONTEXT)
    guard.op_type = "Identity"
    guard.input[:] = [guard.input[1]]
    return [guard.name]


@mutant("values rounded to fp16 on their way")
def fp16_cast_in_the_middle(g: Graph) -> list[str]:
    value = g.add_of("value").output[0]
    narrow = g.after(value, "Cast", to=TensorProto.FLOAT16)
    return [narrow, g.after(narrow, "Cast", to=TensorProto.FLOAT)]


@mutant("context rounded to fp16 on its way")
def fp16_cast_of_the_context(g: Graph) -> list[str]:
    narrow = g.after(CONTEXT, "Cast", to=TensorProto.FLOAT16)
    return [narrow, g.after(narrow, "Cast", to=TensorProto.FLOAT)]


@mutant("a cast to fp16 with no way back", runs=False)
def fp16_cast_left_open(g: Graph) -> list[str]:
    return [g.after(g.add_of("key").output[0], "Cast", to=TensorProto.FLOAT16)]


@mutant("the length fixed in the reshape of the query's heads")
def length_frozen(g: Graph) -> list[str]:
    (view,) = g.consumers(g.add_of("query").output[0])
    sizes = g.producer(view.input[1])
    fixed = [sizes.input[0], g.constant([8], "int64"), *sizes.input[2:]]
    view.input[1] = g.put([view], "Concat", *fixed, axis=0)
    return [view.input[1], view.name]


@mutant("the batch fixed to 1 in the reshape of the context")
def batch_frozen(g: Graph) -> list[str]:
    product = g.product_of("output")
    view = g.producer(product.input[0])
    sizes = g.producer(view.input[1])
    sizes.input[0] = g.constant([1], "int64")
    return [sizes.name, view.name]


@mutant("heads merged without the transpose that belongs there")
def heads_merged_in_wrong_order(g: Graph) -> list[str]:
    (transpose,) = g.consumers(CONTEXT)
    return g.bypass(transpose, CONTEXT)


@mutant("the mask read and ignored")
def mask_ignored(g: Graph) -> list[str]:
    return [g.after(g.keep, "Or", g.constant(True, "bool"))]


@mutant("the mask under another name", runs=False)
def mask_renamed(g: Graph) -> list[str]:
    redirect(list(g.graph.node), "mask", "keep")
    next(value for value in g.graph.input if value.name == "mask").name = "keep"
    return []


@mutant("the selection that keeps padding out removed")
def padding_guard_removed(g: Graph) -> list[str]:
    guard = g.node("node_where")
    return g.bypass(guard, guard.input[1])


@mutant("an operator that nobody has", runs=False)
def operator_unknown(g: Graph) -> list[str]:
    product = g.product_of("output")
    product.op_type = "MatrixMul"
    return [product.name]


@mutant("a weight missing", runs=False)
def weight_missing(g: Graph) -> list[str]:
    product = g.product_of("value")
    g.graph.initializer.remove(g._stored(product.input[1]))
    return [product.name]


@mutant("the file cut off in its middle", runs=False, on_bytes=lambda data: data[: len(data) // 2])
def file_cut_short(g: Graph) -> list[str]:
    return []


def table() -> str:
    """The mutants as docs/mutants.md has them."""
    rows = [
        f"| `{m.name}` | {m.what} | {', '.join(m.forms)} | {'numbers' if m.runs else 'loading or running'} |"
        for m in MUTANTS
    ]
    return "\n".join([*HEAD, *rows, ""])


HEAD = (
    "# Mutants",
    "",
    "Ways in which the tests damage the ONNX of an attention block, one at a time. `verify` refuses every",
    "one (exit code 1) and accepts the file as it was; `verify --locate` names the damaged node or one that",
    "reads it, wherever a node is damaged.",
    "",
    "`demo` is the demo's canonical graph, `portable` its opset 20 form, `causal` the canonical graph of the",
    "preset gpt2 over smaller dims. That the key's bias is lost is no mutant: it adds the same number to",
    "every score of a query, and the softmax cancels it. Generated by `python tests/mutants.py`.",
    "",
    "| mutant | what is wrong | of | shows in |",
    "|---|---|---|---|",
)

if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(), encoding="utf-8")
