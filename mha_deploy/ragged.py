"""Requests of different lengths: packed end to end in a file, padded side by side for a graph.

Packed means one array [sum(lengths), width] per input and one array of lengths: `lengths` for self
attention, `q_lengths` and `kv_lengths` for cross attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mha_deploy.errors import FeedError
from mha_deploy.precision import numpy_dtype
from mha_deploy.signature import Array, Feeds, Signature, Sizes, TensorSpec
from mha_deploy.spec import MASK_CONVENTION, AttentionSpec

EVERYTHING_VISIBLE: Array = np.zeros(0, bool)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence (or pair of them), without a batch axis: arrays [length, width] by input name.

    `mask` is the request's own, boolean, True = keep: [kv_len] for a block with a padding mask,
    [q_len, kv_len] for one with a full mask; empty where everything is visible.
    """

    tensors: Mapping[str, Array]
    q_len: int
    kv_len: int
    mask: Array = field(default_factory=lambda: EVERYTHING_VISIBLE)

    def tokens(self, spec: AttentionSpec) -> int:
        """Query positions, plus key positions in cross attention."""
        return self.q_len if spec.kind == "self" else self.q_len + self.kv_len

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())


def length_names(spec: AttentionSpec) -> tuple[str, ...]:
    return ("lengths",) if spec.kind == "self" else ("q_lengths", "kv_lengths")


def is_packed(tensors: Feeds) -> bool:
    """Whether these arrays are packed requests rather than padded inputs."""
    return any(name in tensors for name in ("lengths", "q_lengths", "kv_lengths"))


def unpack(spec: AttentionSpec, tensors: Feeds) -> list[Request]:
    """The requests that packed arrays hold, in their order.

    Raises:
        FeedError: arrays are missing, or lengths do not add up to the rows there are.
    """
    names, data = length_names(spec), [t for t in spec.signature.inputs if t.is_float]
    expected = sorted((*names, *(tensor.name for tensor in data)))
    if sorted(tensors) != expected:
        raise FeedError(
            f"packed requests hold {', '.join(sorted(tensors))}; expected {', '.join(expected)}"
            + (" (a full mask needs padded arrays)" if spec.mask == "full" else "")
        )
    if spec.mask == "full":
        raise FeedError("packed requests carry no mask, but this block needs a full one; give padded arrays")
    lengths = {name: _lengths(name, tensors[name]) for name in names}
    if len({len(each) for each in lengths.values()}) != 1:
        raise FeedError(f"q_lengths and kv_lengths differ in number: {[len(v) for v in lengths.values()]}")
    pieces = {}
    for tensor in data:
        array, own = tensors[tensor.name], lengths[_length_of(spec, tensor.name)]
        if array.ndim != 2 or array.shape != (sum(own), tensor.shape[-1]):
            raise FeedError(
                f"packed {tensor.name!r} has shape {list(array.shape)}; expected "
                f"[{sum(own)}, {tensor.shape[-1]}], the lengths' sum by the width"
            )
        pieces[tensor.name] = np.split(array, np.cumsum(own)[:-1])
    q, kv = lengths[names[0]], lengths[names[-1]]
    return [Request({name: pieces[name][i] for name in pieces}, q[i], kv[i]) for i in range(len(q))]


def join(spec: AttentionSpec, requests: Sequence[Request]) -> dict[str, Array]:
    """Packed arrays of these requests and their lengths: the inverse of `unpack`."""
    names = [tensor.name for tensor in spec.signature.inputs if tensor.is_float]
    feeds = {name: np.concatenate([request.tensors[name] for request in requests]) for name in names}
    lengths = np.array([(request.q_len, request.kv_len) for request in requests], np.int64)
    return feeds | {name: lengths[:, i] for i, name in enumerate(length_names(spec))}


def pad(spec: AttentionSpec, requests: Sequence[Request], sizes: Sizes) -> dict[str, Array]:
    """Inputs of the graph for these requests, right-padded with zeros to `sizes`, and their mask.

    Rows beyond the requests (where `sizes` asks for a larger batch) hold no valid position.
    """
    feeds: dict[str, Array] = {}
    for tensor in spec.signature.inputs:
        if tensor.is_float:
            _check_rows(spec, tensor, requests)
        dtype = requests[0].tensors[tensor.name].dtype if tensor.is_float else np.dtype(bool)
        feeds[tensor.name] = np.zeros(spec.signature.shape(tensor, sizes), dtype)
    for row, request in enumerate(requests):
        for name, array in request.tensors.items():
            feeds[name][row, : len(array)] = array
        keep = request.mask if request.mask.size else True
        if spec.mask == "padding":
            feeds["mask"][row, : request.kv_len] = keep
        elif spec.mask == "full":
            feeds["attn_mask"][row, : request.q_len, : request.kv_len] = keep
    return feeds


def check_request(
    spec: AttentionSpec, signature: Signature, request: Request, called: str = "a request"
) -> None:
    """Hold one request against the session's signature, before it meets others.

    A request shorter than the graph takes is padded where a mask can say so; a longer one is refused,
    never cut. `called` is what errors call it.

    Raises:
        FeedError: naming the tensor or the axis, what it has and what was expected.
    """
    data = [tensor for tensor in signature.inputs if tensor.is_float]
    if request.tensors.keys() != {tensor.name for tensor in data}:
        raise FeedError(
            f"{called} holds {', '.join(sorted(request.tensors)) or 'nothing'}; "
            f"expected {', '.join(tensor.name for tensor in data)}"
        )
    for axis, length in ((spec.query_axis, request.q_len), (spec.key_axis, request.kv_len)):
        dim = signature.dim(axis)
        if not (dim.min if spec.mask == "none" else 1) <= length <= dim.max:
            raise FeedError(f"{called} has {axis} = {length}; this block takes {axis} {dim.min}..{dim.max}")
    if spec.kind == "self" and request.q_len != request.kv_len:
        raise FeedError(
            f"{called} has q_len = {request.q_len} and kv_len = {request.kv_len}; "
            "in self attention they are one length"
        )
    for tensor in data:
        array = request.tensors[tensor.name]
        length = request.q_len if tensor.shape[1] == spec.query_axis else request.kv_len
        if not isinstance(array, np.ndarray) or array.shape != (length, tensor.shape[-1]):
            shape = list(array.shape) if isinstance(array, np.ndarray) else type(array).__name__
            raise FeedError(
                f"{called}'s {tensor.name!r} has shape {shape}; "
                f"expected [{length}, {tensor.shape[-1]}], its length by the width"
            )
        if array.dtype.name != tensor.dtype or not array.dtype.isnative:
            order = "" if array.dtype.isnative else " in the other byte order"
            raise FeedError(
                f"{called}'s {tensor.name!r} has dtype {array.dtype.name}{order}; expected {tensor.dtype}"
            )
    _check_mask(spec, request, called)


class RequestCheck:
    """`check_request` for one block, quick where nothing is wrong: every request comes through here."""

    def __init__(self, spec: AttentionSpec, signature: Signature) -> None:
        self._spec, self._signature = spec, signature
        self._self = spec.kind == "self"
        self._tensors = [
            (tensor.name, tensor.shape[1] == spec.query_axis, tensor.shape[-1], numpy_dtype(tensor.dtype))
            for tensor in signature.inputs
            if tensor.is_float
        ]
        dims = [signature.dim(axis) for axis in (spec.query_axis, spec.key_axis)]
        self._lengths = [(dim.min if spec.mask == "none" else 1, dim.max) for dim in dims]

    def __call__(self, request: Request, called: str = "a request") -> None:
        """Raises FeedError, as `check_request`."""
        if not self._fits(request):
            check_request(self._spec, self._signature, request, called)

    def _fits(self, request: Request) -> bool:
        """False also where only a longer look tells."""
        q_len, kv_len, tensors = request.q_len, request.kv_len, request.tensors
        (q_least, q_most), (kv_least, kv_most) = self._lengths
        if not (q_least <= q_len <= q_most and kv_least <= kv_len <= kv_most):
            return False
        if len(tensors) != len(self._tensors) or request.mask.size or (self._self and q_len != kv_len):
            return False
        for name, of_query, width, dtype in self._tensors:
            array = tensors.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype:
                return False
            if array.shape != (q_len if of_query else kv_len, width):
                return False
        return True


def _check_mask(spec: AttentionSpec, request: Request, called: str) -> None:
    mask, shapes = request.mask, {"padding": (request.kv_len,), "full": (request.q_len, request.kv_len)}
    if mask.size == 0:
        return
    if spec.mask not in shapes:
        raise FeedError(f"{called} brings a mask, but this block takes none")
    if mask.dtype != np.bool_ or mask.shape != shapes[spec.mask]:
        raise FeedError(
            f"{called}'s mask has shape {list(mask.shape)} and dtype {mask.dtype.name}; "
            f"expected {list(shapes[spec.mask])}, {MASK_CONVENTION}"
        )


def _check_rows(spec: AttentionSpec, tensor: TensorSpec, requests: Sequence[Request]) -> None:
    """numpy would cast or spread what does not fit."""
    dtypes = {request.tensors[tensor.name].dtype.name for request in requests}
    if len(dtypes) > 1:
        raise FeedError(f"requests hold {tensor.name!r} in {', '.join(sorted(dtypes))}; expected one dtype")
    for request in requests:
        length = request.q_len if tensor.shape[1] == spec.query_axis else request.kv_len
        shape = request.tensors[tensor.name].shape
        if shape != (length, tensor.shape[-1]):
            raise FeedError(
                f"a request's {tensor.name!r} has shape {list(shape)}; "
                f"expected [{length}, {tensor.shape[-1]}], its length by the width"
            )


def pack(answers: Sequence[Array]) -> Array:
    """Answers [length, d_model] end to end, [sum(lengths), d_model]."""
    return np.concatenate(answers) if answers else np.zeros((0, 0), np.float32)


def packed(spec: AttentionSpec, requests: Sequence[Request]) -> dict[str, Array]:
    """The inverse of `unpack`: the requests' arrays end to end, and their lengths."""
    lengths = ([r.q_len for r in requests], [r.kv_len for r in requests])
    names = length_names(spec)
    arrays = {name: pack([r.tensors[name] for r in requests]) for name in requests[0].tensors}
    return arrays | {name: np.array(each) for name, each in zip(names, lengths, strict=False)}


def _length_of(spec: AttentionSpec, name: str) -> str:
    if spec.kind == "self":
        return "lengths"
    return "q_lengths" if name == "query" else "kv_lengths"


def _lengths(name: str, array: Array) -> list[int]:
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) == 0:
        raise FeedError(
            f"{name!r} has shape {list(array.shape)}, dtype {array.dtype.name}; expected at least one "
            "length, whole numbers of at least 1"
        )
    if (array < 1).any():
        raise FeedError(
            f"{name!r} holds {array.min()}; expected at least one length, whole numbers of at least 1"
        )
    return [int(length) for length in array]
