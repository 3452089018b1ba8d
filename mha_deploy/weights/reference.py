"""Names and shapes of the reference module's tensors, and weights made from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mha_deploy.spec import PROJECTIONS, AttentionSpec

if TYPE_CHECKING:
    import torch


def possible_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a block of these sizes can have, whatever `bias` and `norm` say."""
    inner = spec.num_heads * spec.head_dim
    context = spec.num_heads * spec.value_dim
    matrices = {
        "query": (inner, spec.d_model),
        "key": (spec.num_kv_heads * spec.head_dim, spec.kdim),
        "value": (spec.num_kv_heads * spec.value_dim, spec.vdim),
        "output": (spec.d_model, context),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes | {"norm.weight": (spec.d_model,), "norm.bias": (spec.d_model,)}


def expected_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """The reference module's tensors, in nn.Linear's convention [out, in]: matrices, biases, norm."""
    names = [f"{projection}.weight" for projection in PROJECTIONS]
    names += [f"{projection}.bias" for projection in spec.bias]
    names += ["norm.weight", "norm.bias"] if spec.norm != "none" else []
    shapes = possible_shapes(spec)
    return {name: shapes[name] for name in names}


def seeded_tensors(spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """float32 weights from `spec.weights.seed`; the global random state is neither read nor moved.

    Matrices are Xavier uniform (Glorot and Bengio, 2010). Biases are 0.1 N(0, 1) and not the usual
    zero, and the norm's scale lies around 1: a stage that loses one of them then shows.
    """
    import torch

    generator = torch.Generator().manual_seed(spec.weights.seed)
    tensors = {}
    for name, shape in expected_shapes(spec).items():
        if len(shape) == 2:
            tensors[name] = torch.nn.init.xavier_uniform_(torch.empty(shape), generator=generator)
        else:
            middle = 1.0 if name == "norm.weight" else 0.0
            tensors[name] = middle + 0.1 * torch.randn(shape, generator=generator)
    return tensors
