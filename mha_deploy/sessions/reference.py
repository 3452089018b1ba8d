"""The PyTorch reference as a session, in any precision: the truth and the yardstick of verification."""

from __future__ import annotations

from dataclasses import replace

import torch

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.precision import Precision
from mha_deploy.sessions.base import Session
from mha_deploy.signature import Array, Feeds, Sizes

# Attention scores held at once; larger batches go through in parts, which changes no answer.
SCORES_AT_ONCE = 2**26
MOVED = "moved-"  # the path of a module whose weights are moved; a seed follows


class ReferenceSession(Session):
    """Takes fp32 inputs, computes in `precision`, answers in fp64, which holds every precision exactly."""

    def __init__(self, module: MultiHeadAttention, precision: Precision) -> None:
        spec = module.spec
        outputs = tuple(replace(tensor, dtype="float64") for tensor in spec.signature.outputs)
        name = f"torch {precision.value} {module.path}"
        super().__init__(name, replace(spec.signature, outputs=outputs), precision, "torch cpu")
        self._dtype: torch.dtype = getattr(torch, precision.dtype_name)
        self._module = MultiHeadAttention(spec, module.path)
        self._module.load_state_dict(module.state_dict())
        self._module.to(self._dtype).eval()
        if module.path.startswith(MOVED):
            move_weights(self._module, precision, int(module.path.removeprefix(MOVED)))

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        spec = self._module.spec
        tensors = [self._tensor(feeds[tensor.name]) for tensor in spec.signature.inputs]
        queries, keys = tensors[0].shape[1], tensors[min(1, len(tensors) - 1)].shape[1]
        rows = max(1, SCORES_AT_ONCE // (spec.num_heads * queries * max(queries, keys)))
        with torch.inference_mode():
            parts = [
                self._module(*(tensor[start : start + rows] for tensor in tensors))
                for start in range(0, tensors[0].shape[0], rows)
            ]
        return {"y": torch.cat(parts).to(torch.float64).numpy()}

    def _tensor(self, array: Array) -> torch.Tensor:
        # A copy: torch warns about read-only arrays, and callers may hand in views of files.
        tensor = torch.from_numpy(array.copy())
        return tensor if tensor.dtype == torch.bool else tensor.to(self._dtype)


class ContextSession(ReferenceSession):
    """As ReferenceSession, but `y` is the context before the output projection [B, S, heads x value_dim]."""

    def _execute(self, feeds: Feeds) -> dict[str, Array]:
        seen: list[torch.Tensor] = []

        def see(_module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            seen.append(given[0].to(torch.float64))

        hook = self._module.output.register_forward_pre_hook(see)
        try:
            super()._execute(feeds)
        finally:
            hook.remove()
        return {"y": torch.cat(seen).numpy()}

    def _check_outputs(self, outputs: dict[str, Array], sizes: Sizes) -> None:
        """The signature is that of the block's answer."""


def move_weights(module: torch.nn.Module, precision: Precision, seed: int) -> None:
    """Every weight by up to one eps of itself."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                step = 2 * torch.rand(weight.shape, generator=random, dtype=torch.float64) - 1
                weight.copy_(weight.to(torch.float64) * (1 + precision.eps * step))
