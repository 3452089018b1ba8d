"""The lowerings for TensorRT that leave attention one `Attention` node, which can then be fused."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto, helper

from mha_deploy.lowering.attention_node import AttentionNode
from mha_deploy.lowering.graph_edit import Emitter
from mha_deploy.lowering.heads import Operands, lengths_of, merge_heads, to_rank_4
from mha_deploy.lowering.mask import Columns, columns_of, fitted_mask, joined, masking_of
from mha_deploy.lowering.steps import Step


@dataclass(slots=True)
class KeptAttention:
    """Emits one node anew. Each rule that applies notes itself; a node that no rule touches stays."""

    node: NodeProto
    a: AttentionNode
    e: Emitter
    _notes: list[Step] = field(default_factory=list)

    def steps(self) -> list[Step]:
        """Emit the node's new form and say what was changed; nothing where the old form is taken."""
        operands = self._operands()
        mask = self._mask(operands)
        q, k, v = self._equal_heads(operands)
        self._single_output()
        q, k, v, mask, wide = self._softmax_precision(q, k, v, mask)
        if self._notes:
            self._emit([q, k, v, mask] if mask else [q, k, v], wide=wide)
        return self._notes

    def _note(self, rule: str, why: str) -> None:
        self._notes.append(Step(self.e.prefix, rule, why))

    @property
    def _has_cache(self) -> bool:
        return bool(self.a.past_key or self.a.present_key or self.a.present_value)

    @property
    def _pads_heads(self) -> bool:
        return bool(self.a.head_size and self.a.value_size) and self.a.head_size != self.a.value_size

    @property
    def _splits_heads(self) -> bool:
        return self._has_cache or self._pads_heads

    @property
    def _folds_positions(self) -> bool:
        """Causal alone, with no cache, is the one form that TensorRT has a flag for."""
        a = self.a
        return a.has_window or bool(a.lengths) or (a.causal and bool(a.mask or a.past_key))

    def _operands(self) -> Operands:
        a = self.a
        if self._has_cache:
            self._note("cache-by-concat", "TensorRT's attention has no past or present key and value")
        if a.value_dtype != a.dtype:
            self._note("cast-value", "TensorRT wants query, key and value in one type")
        if self._splits_heads:
            return to_rank_4(self.e, a)
        return Operands(a.q, a.k, self.e.cast(a.v, a.value_dtype, a.dtype), *lengths_of(self.e, a))

    def _mask(self, operands: Operands) -> str:
        """The one mask that the new node takes, "" for none."""
        a, e = self.a, self.e
        before = len(self._notes)
        self._note_positions()
        if a.mask and not a.mask_is_bool and a.mask_info.dtype != a.dtype:
            self._note("cast-mask", "TensorRT wants an additive mask in the query's type")
        columns = columns_of(e, a, operands.kv_length) if a.mask else Columns.EQUAL
        short_rows = self._lacks_an_axis(operands)
        changes = short_rows or len(self._notes) > before
        if columns is Columns.FEWER or (columns is Columns.UNKNOWN and changes):
            self._note("pad-mask", "TensorRT does not pad a mask that has fewer columns than there are keys")
        if short_rows:
            self._note("expand-mask", "ONNX Runtime, which checks the lowering, wants the full query axis")
        if len(self._notes) == before:
            return a.mask
        if self._folds_positions:
            mask = joined(e, a, masking_of(e, a, operands))
        else:
            mask = fitted_mask(e, a, operands.kv_length)
        if short_rows:
            mask = e.op("Expand", mask, e.shape(operands.q_length, operands.kv_length))
        return mask

    def _note_positions(self) -> None:
        a = self.a
        if a.causal and self._folds_positions:
            self._note("fold-causal-into-mask", "TensorRT takes is_causal with no mask and no cache")
        if a.has_window:
            self._note("fold-window-into-mask", "TensorRT's parser drops the window sizes")
        if a.lengths:
            self._note("fold-lengths-into-mask", "TensorRT's parser drops nonpad_kv_seqlen")

    def _lacks_an_axis(self, operands: Operands) -> bool:
        """Whether the new mask has no axis for the queries, or length 1 for several queries or keys."""
        a = self.a
        if (a.causal and self._folds_positions) or a.has_window:
            return False
        if not (a.mask or a.lengths):
            return False
        dims = (1, 1, *(a.mask_info.dims if a.mask else ()))
        rows, columns = dims[-2:]
        broadcast_columns = bool(a.mask) and not a.lengths and a.opset < 24 and columns == 1
        no_rows = len(a.mask_info.dims) == 1 and not a.lengths
        short_rows = rows == 1 and operands.q_length != 1
        return no_rows or short_rows or (broadcast_columns and operands.kv_length != 1)

    def _equal_heads(self, operands: Operands) -> tuple[str, str, str]:
        """Zeros behind the smaller heads: they add nothing to a score, and are cut off the result."""
        missing = self.a.head_size - self.a.value_size
        if not self._pads_heads:
            return operands.q, operands.k, operands.v
        why = f"query and key heads have size {self.a.head_size}, value heads {self.a.value_size}"
        if missing > 0:
            self._note("pad-value-heads", f"TensorRT wants one head size; {why}")
            return operands.q, operands.k, self._zero_padded(operands.v, missing)
        self._note("pad-query-key-heads", f"TensorRT wants one head size; {why}")
        q, k = (self._zero_padded(tensor, -missing) for tensor in (operands.q, operands.k))
        return q, k, operands.v

    def _zero_padded(self, tensor: str, missing: int) -> str:
        e = self.e
        return e.op("Pad", tensor, e.ints(0, missing), e.scalar(0.0, self.a.dtype), e.ints(-1))

    def _single_output(self) -> None:
        if len(self.node.output) > 1 and not self._has_cache:
            self._note("drop-unused-outputs", "TensorRT's attention has one output")

    def _softmax_precision(self, q: str, k: str, v: str, mask: str) -> tuple[str, str, str, str, bool]:
        """A wider softmax by a wider attention: half precision between casts to and from float32."""
        a, e = self.a, self.e
        asked = a.softmax_precision
        if not asked:
            return q, k, v, mask, False
        if asked not in (TensorProto.FLOAT, TensorProto.DOUBLE) or a.dtype == TensorProto.FLOAT:
            self._note("drop-softmax-precision", "TensorRT's softmax runs in the query's type")
            return q, k, v, mask, False
        self._note("attention-in-float32", "TensorRT's attention has no softmax_precision")
        q, k, v = (e.cast(tensor, a.dtype, TensorProto.FLOAT) for tensor in (q, k, v))
        if mask and not a.mask_is_bool and a.mask:
            mask = e.cast(mask, a.dtype, TensorProto.FLOAT)
        return q, k, v, mask, True

    def _emit(self, inputs: list[str], *, wide: bool) -> None:
        a, e = self.a, self.e
        node = NodeProto()
        node.CopyFrom(self.node)
        node.name = self.node.name or e.fresh("Attention")
        result = e.fresh("Y")
        del node.input[:], node.output[:], node.attribute[:]
        node.input.extend(inputs)
        node.output.append(result)
        node.attribute.extend(helper.make_attribute(*item) for item in self._attributes().items())
        e.nodes.append(node)
        if wide:
            result = e.op("Cast", result, to=a.dtype)
        if self._pads_heads and a.head_size > a.value_size:
            result = e.op("Slice", result, e.ints(0), e.ints(a.value_size), e.ints(-1))
        if a.rank == 3 and self._splits_heads:
            result = merge_heads(e, result)
        e.deliver(result, a.y)

    def _attributes(self) -> dict[str, int | float]:
        a = self.a
        attributes: dict[str, int | float] = {}
        if a.causal and not self._folds_positions:
            attributes["is_causal"] = 1
        if a.explicit_scale is not None:
            attributes["scale"] = a.explicit_scale
        elif self._pads_heads:
            attributes["scale"] = a.head_size**-0.5
        if a.rank == 3 and not self._splits_heads:
            attributes["q_num_heads"], attributes["kv_num_heads"] = a.q_heads, a.kv_heads
        return attributes
