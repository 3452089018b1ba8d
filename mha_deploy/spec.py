"""What an attention block computes, in one frozen description.

Notation: Vaswani et al., "Attention Is All You Need" (2017), section 3.2. Grouped key/value heads:
Ainslie et al., "GQA" (2023).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mha_deploy.errors import SpecError
from mha_deploy.json_part import JsonPart
from mha_deploy.signature import LARGEST, Dim, Signature, Sizes, TensorSpec

PROJECTIONS = ("query", "key", "value", "output")
KINDS = ("self", "cross")
MASKS = ("none", "padding", "full")
NORMS = ("none", "pre", "post")

MASK_CONVENTION = "boolean, True = keep, False = ignore"

BATCH = Dim("batch", 1, 8, 32)
DEFAULT_DIMS = {
    "self": (BATCH, Dim("seq", 1, 128, 512)),
    "cross": (BATCH, Dim("q_len", 1, 128, 512), Dim("kv_len", 1, 128, 512)),
}


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where the weights come from: a checkpoint file and a prefix within it, or a seed."""

    file: str = ""
    prefix: str = ""
    seed: int = 0

    def __str__(self) -> str:
        if not self.file:
            return f"random, seed {self.seed}"
        return self.file + (f" (prefix {self.prefix})" if self.prefix else "")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention block.

    Sizes left at 0 take their usual value: `num_kv_heads` = `num_heads`, `head_dim` = d_model /
    num_heads, `value_dim` (per head) = `head_dim`, `kdim` = `vdim` = d_model.

    `norm` adds LayerNorm with a residual: "pre" is x + attention(norm(x)), "post" is
    norm(x + attention(x)). In cross attention the residual and a pre-norm act on the query.
    `causal` lets query i see keys 0..i, counted from the first (top-left alignment, as PyTorch's
    `is_causal`), also where the two lengths differ. `dropout` acts in training only.

    Raises:
        SpecError: naming the field, its value and what was expected.
    """

    d_model: int
    num_heads: int
    name: str = "attention"
    kind: str = "self"
    num_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    kdim: int = 0
    vdim: int = 0
    causal: bool = False
    bias: tuple[str, ...] = PROJECTIONS
    mask: str = "padding"
    norm: str = "none"
    norm_eps: float = 1e-5
    dropout: float = 0.0
    dims: tuple[Dim, ...] = ()
    weights: WeightsSource = WeightsSource()
    inputs_file: str = ""

    def __post_init__(self) -> None:
        self._check_choices()
        for field in ("d_model", "num_heads"):
            _positive(field, getattr(self, field))
        if self.head_dim == 0 and self.d_model % self.num_heads:
            raise SpecError(
                f"d_model = {self.d_model} does not divide by num_heads = {self.num_heads}; "
                "change one of them or set head_dim"
            )
        defaults = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.d_model // self.num_heads,
            "value_dim": self.head_dim or self.d_model // self.num_heads,
            "kdim": self.d_model,
            "vdim": self.d_model,
        }
        for field, default in defaults.items():
            value = getattr(self, field) or default
            _positive(field, value)
            object.__setattr__(self, field, value)
        self._check_sizes()
        self._check_dims()

    def _check_choices(self) -> None:
        for field, value, known in (
            ("kind", self.kind, KINDS),
            ("mask", self.mask, MASKS),
            ("norm", self.norm, NORMS),
        ):
            if value not in known:
                raise SpecError(f"{field} = {value!r}; expected one of {', '.join(map(repr, known))}")
        if not isinstance(self.causal, bool):
            raise SpecError(f"causal = {self.causal!r}; expected true or false")
        if not isinstance(self.bias, tuple | list):
            raise SpecError(f"bias = {self.bias!r}; expected names among {', '.join(map(repr, PROJECTIONS))}")
        unknown = [name for name in self.bias if name not in PROJECTIONS]
        if unknown:
            raise SpecError(
                f"bias names {', '.join(map(repr, unknown))}; "
                f"expected true, false or a list of {', '.join(map(repr, PROJECTIONS))}"
            )
        # One spelling for one meaning: two specs that compute the same compare equal.
        object.__setattr__(self, "bias", tuple(name for name in PROJECTIONS if name in self.bias))
        if not (_is_number(self.dropout) and 0.0 <= self.dropout < 1.0):
            raise SpecError(f"dropout = {self.dropout!r}; expected 0 <= dropout < 1")
        if not (_is_number(self.norm_eps) and 0.0 < self.norm_eps < math.inf):
            raise SpecError(f"norm_eps = {self.norm_eps!r}; expected a number above 0")

    def _check_sizes(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_heads = {self.num_heads} does not divide by num_kv_heads = {self.num_kv_heads}; "
                "every key/value head serves the same number of query heads"
            )
        if self.kind == "self" and (self.kdim, self.vdim) != (self.d_model, self.d_model):
            raise SpecError(
                f"kdim = {self.kdim}, vdim = {self.vdim} with kind = 'self', where key and value are the "
                f"input itself (d_model = {self.d_model}); set kind = 'cross' or leave kdim and vdim out"
            )

    def _check_dims(self) -> None:
        names = tuple(dim.name for dim in DEFAULT_DIMS[self.kind])
        given = {dim.name: dim for dim in self.dims}
        unknown = [name for name in given if name not in names]
        if unknown:
            raise SpecError(
                f"dims {', '.join(map(repr, unknown))}; kind = {self.kind!r} has {', '.join(names)}"
            )
        dims = tuple(given.get(dim.name, dim) for dim in DEFAULT_DIMS[self.kind])
        object.__setattr__(self, "dims", dims)

    @property
    def signature(self) -> Signature:
        """The graph's inputs and outputs, in order, in fp32."""
        outputs = (TensorSpec("y", "float32", (self.dims[0].name, self.query_axis, self.d_model)),)
        return Signature((*self._data_inputs(), *self._mask_inputs()), outputs, self.dims)

    @property
    def query_axis(self) -> str:
        return self.dims[1].name

    @property
    def key_axis(self) -> str:
        return self.dims[-1].name

    def _data_inputs(self) -> tuple[TensorSpec, ...]:
        batch = self.dims[0].name
        if self.kind == "self":
            return (TensorSpec("x", "float32", (batch, self.query_axis, self.d_model)),)
        return (
            TensorSpec("query", "float32", (batch, self.query_axis, self.d_model)),
            TensorSpec("key", "float32", (batch, self.key_axis, self.kdim)),
            TensorSpec("value", "float32", (batch, self.key_axis, self.vdim)),
        )

    def _mask_inputs(self) -> tuple[TensorSpec, ...]:
        batch = self.dims[0].name
        if self.mask == "padding":
            return (TensorSpec("mask", "bool", (batch, self.key_axis), MASK_CONVENTION),)
        if self.mask == "full":
            return (
                TensorSpec("attn_mask", "bool", (batch, self.query_axis, self.key_axis), MASK_CONVENTION),
            )
        return ()

    def flops(self, sizes: Sizes) -> int:
        """Floating-point operations of one run: 2 per multiply-add of the six matrix products.

        Padding and masked pairs count, since the padded graph computes them; softmax does not.
        """
        b, q, k = sizes[self.dims[0].name], sizes[self.query_axis], sizes[self.key_axis]
        wide, narrow = self.num_heads, self.num_kv_heads
        projections = q * self.d_model * wide * (self.head_dim + self.value_dim)
        projections += k * narrow * (self.kdim * self.head_dim + self.vdim * self.value_dim)
        core = q * k * wide * (self.head_dim + self.value_dim)
        return 2 * b * (projections + core)

    def with_weights(self, file: str | Path, prefix: str = "") -> AttentionSpec:
        """The same block with the weights of another checkpoint."""
        return replace(self, weights=WeightsSource(file=str(file), prefix=prefix))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> AttentionSpec:
        """Inverse of `to_json`.

        Raises:
            SpecError: a field is missing, unknown or wrong.
        """
        part = JsonPart.of(data)
        try:
            plain = part.fields(cls)
            dims = tuple(Dim(**dim.fields(Dim)) for dim in part["dims"].parts(least=1))
            weights = WeightsSource(**part["weights"].fields(WeightsSource))
        except ValueError as error:
            raise SpecError(f"the stored spec is incomplete or malformed: {error}") from error
        return cls(**plain, dims=dims, weights=weights)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise SpecError(f"{field} = {value!r}; expected a whole number from 1 to {LARGEST}")
