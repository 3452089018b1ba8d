"""Rewrites attention in an ONNX graph into forms that a runtime takes, with the same meaning.

Two targets: `lower_for_tensorrt` touches only what TensorRT's parser refuses, drops or cannot
build, and keeps attention one `Attention` node wherever it can; `lower_to_portable` leaves an
opset 20 graph with no `Attention` in it. Five are for speed: `fuse_projections` makes one product of
those that read one tensor, `lean_attention` leaves less around it (the operator splits heads, there are
fewer biases, padding is looked up), `whole_attention` has ONNX Runtime's own operator do all but the last
product, `flash_attention` has another of them go by blocks of keys, and `fusible_attention` spells it out so
that OpenVINO makes one kernel of it. All name every rewrite.
What has no lowering is refused with a `GraphError` that names the node.
"""

from mha_deploy.lowering.flash_attention import flash_attention
from mha_deploy.lowering.for_tensorrt import lower_for_tensorrt
from mha_deploy.lowering.fused_projections import fuse_projections
from mha_deploy.lowering.fusible_attention import fusible_attention
from mha_deploy.lowering.lean_attention import lean_attention
from mha_deploy.lowering.portable import lower_to_portable
from mha_deploy.lowering.steps import Lowered, Step
from mha_deploy.lowering.whole_attention import whole_attention

__all__ = [
    "Lowered",
    "Step",
    "flash_attention",
    "fuse_projections",
    "fusible_attention",
    "lean_attention",
    "lower_for_tensorrt",
    "lower_to_portable",
    "whole_attention",
]
