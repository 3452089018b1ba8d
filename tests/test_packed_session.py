"""A packed graph answers what the padded one does, for every kind of block, and leaks nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from conftest import small_spec
from fake_tensorrt import FakePlan
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import shape_inference

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.cases import standard_cases
from mha_deploy.errors import FeedError, SessionError
from mha_deploy.graph import write_graph
from mha_deploy.packed import RunCost, graph_signature
from mha_deploy.precision import Precision
from mha_deploy.ragged import Request, join, pad
from mha_deploy.sessions.fake import FakeSession
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.sessions.packed import PackedSession, PaddedView
from mha_deploy.signature import Dim
from mha_deploy.typed import Variant, write_typed

CROSS_DIMS = (Dim("batch", 1, 2, 6), Dim("q_len", 1, 8, 40), Dim("kv_len", 1, 8, 64))
BLOCKS = {
    "plain": {},
    "causal-gqa-prenorm": {"causal": True, "num_kv_heads": 2, "norm": "pre", "bias": ("query",)},
    "no-mask-postnorm": {"mask": "none", "norm": "post", "value_dim": 5},
    "cross": {"kind": "cross", "kdim": 20, "vdim": 24, "value_dim": 12, "dims": CROSS_DIMS},
    "cross-causal": {"kind": "cross", "causal": True, "norm": "post", "dims": CROSS_DIMS},
}
PACKED = Variant(Precision.FP32, layout="packed")
DEAR_RUNS = RunCost(1e9, 0.0, 0.0)


class Opened:
    """One block, padded and packed, over the same weights."""

    def __init__(self, spec, folder):
        torch.manual_seed(0)
        self.spec, self.path = spec, folder / "packed.onnx"
        self.module = MultiHeadAttention(spec).eval()
        for parameter in self.module.parameters():  # biases and norms that show
            torch.nn.init.normal_(parameter, std=0.3)
        write_graph(self.module, spec.signature, folder / "padded.onnx")
        write_typed(self.module, PACKED, self.path)
        self.padded = OnnxRuntimeSession(folder / "padded.onnx", spec.signature)
        self.packed = PackedSession(self.graph(), spec)

    def graph(self):
        return OnnxRuntimeSession(self.path, graph_signature(self.spec))

    def alone(self, request):
        """The padded graph's answer to one request by itself."""
        sizes = (1, request.q_len, request.kv_len)
        dims = (self.spec.dims[0].name, self.spec.query_axis, self.spec.key_axis)
        return self.padded.run(pad(self.spec, [request], dict(zip(dims, sizes, strict=True))))["y"][0]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Each block when it is first asked for."""
    made = {}

    def get(name) -> Opened:
        if name not in made:
            made[name] = Opened(small_spec(**BLOCKS[name]), tmp_path_factory.mktemp(name))
        return made[name]

    return get


def drawn(spec, lengths, seed=0):
    random = np.random.default_rng(seed)

    def tokens(name, q, kv):
        tensor = spec.signature.input(name)
        length = q if tensor.shape[1] == spec.query_axis else kv
        return random.standard_normal((length, tensor.shape[-1]), dtype=np.float32)

    data = [tensor.name for tensor in spec.signature.inputs if tensor.is_float]
    return [Request({name: tokens(name, q, kv) for name in data}, q, kv) for q, kv in lengths]


def close(answer, expected):
    np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 64)), min_size=1, max_size=14), st.integers(0, 99)
)
def test_packed_answers_are_those_of_the_padded_graph(blocks, name, lengths, seed):
    block = blocks(name)
    if block.spec.kind == "self":
        lengths = [(q, q) for q, _ in lengths]
    requests = drawn(block.spec, lengths, seed)
    y = block.packed.run(join(block.spec, requests))["y"]
    close(y, np.concatenate([block.alone(request) for request in requests]))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_padded_view_answers_every_standard_case_as_the_padded_graph_does(blocks, name):
    """Masks with padding left, right and in holes, a fully masked sample, NaN where nobody may look."""
    block = blocks(name)
    view = PaddedView(block.packed)
    cases = standard_cases(block.spec)
    assert {"fully-masked-row", "padding-garbage"} <= {c.name for c in cases} or block.spec.mask == "none"
    for case in cases:
        expected = block.padded.run(case.feeds)["y"][case.compared]
        close(view.run(case.feeds)["y"][case.compared], expected)


@pytest.mark.parametrize("name", ["plain", "causal-gqa-prenorm", "cross"])
def test_where_a_sample_has_nothing_to_look_at_each_row_is_the_reference_s(blocks, name, random):
    block = blocks(name)
    sizes = {dim.name: 3 for dim in block.spec.dims}
    feeds = {}
    for tensor in block.spec.signature.inputs:
        shape = block.spec.signature.shape(tensor, sizes)
        feeds[tensor.name] = random.standard_normal(shape, dtype=np.float32)
    feeds["mask"] = np.zeros((3, 3), bool)
    with torch.no_grad():
        expected = block.module(*map(torch.from_numpy, feeds.values())).numpy()
    close(PaddedView(block.packed).run(feeds)["y"], expected)
    if block.spec.norm == "none":
        bias = block.module.output.bias.detach().numpy()
        np.testing.assert_array_equal(expected, np.broadcast_to(bias, expected.shape))


def test_the_view_leaves_padded_query_rows_at_zero(blocks, random):
    x, mask = random.standard_normal((1, 4, 32), dtype=np.float32), np.array([[False, True, False, True]])
    y = PaddedView(blocks("plain").packed).run({"x": x, "mask": mask})["y"]
    assert np.abs(y).max(axis=2).astype(bool).tolist() == mask.tolist()


@pytest.mark.parametrize("name", ["plain", "cross"])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_nan_in_one_request_reaches_no_other_of_the_same_run(blocks, name, poisoned):
    block = blocks(name)
    requests = drawn(block.spec, [(5, 5), (3, 3), (9, 9)])
    together = PackedSession(block.graph(), block.spec, cost=DEAR_RUNS)
    assert together.runs([(5, 5), (3, 3), (9, 9)]) == [(1, 0, 2)]
    clean = np.split(together.run(join(block.spec, requests))["y"], [5, 8])
    for array in requests[poisoned].tensors.values():
        array[:] = np.nan
    dirty = np.split(together.run(join(block.spec, requests))["y"], [5, 8])
    for index in range(3):
        if index == poisoned:
            assert np.isnan(dirty[index]).all()
        else:
            np.testing.assert_array_equal(dirty[index], clean[index])


@pytest.mark.parametrize("name", BLOCKS)
def test_the_graph_finds_nothing_by_its_data_and_keeps_its_one_attention(blocks, name):
    kinds = [node.op_type for node in onnx.load(blocks(name).path).graph.node]
    assert not {"NonZero", "Compress", "Unique", "Loop", "If", "Where", "GatherND"} & set(kinds)
    assert kinds.count("Attention") == 1
    assert kinds.count("Gather") == 4  # query, key and value into rows, the answers back


@pytest.mark.parametrize("name", BLOCKS)
def test_every_projection_runs_over_tokens_and_none_over_rows(blocks, name):
    graph = shape_inference.infer_shapes(onnx.load(blocks(name).path)).graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.value_info, *graph.output)}
    first = {shapes[node.output[0]][0].dim_param for node in graph.node if node.op_type in ("Gemm", "MatMul")}
    assert first == ({"tokens"} if blocks(name).spec.kind == "self" else {"q_tokens", "kv_tokens"})


def test_more_requests_than_the_graph_has_rows_are_answered_in_their_order(blocks):
    block = blocks("plain")
    requests = drawn(block.spec, [(n, n) for n in [7, 7, 7, 7, 7, 7, 7, 7, 1, 64]])
    runs = block.packed.runs([(r.q_len, r.kv_len) for r in requests])
    assert max(map(len, runs)) <= 6
    y = block.packed.run(join(block.spec, requests))["y"]
    close(y, np.concatenate([block.alone(request) for request in requests]))


def counted(spec):
    """A packed session over a function, and the shapes of the indices that it was run with."""
    seen = []

    def compute(feeds):
        seen.append(feeds["index"].shape)
        return {"y": feeds["x"]}

    return PackedSession(FakeSession(graph_signature(spec), compute), spec), seen


def test_requests_of_one_length_share_a_run_and_nothing_is_measured(random):
    session, seen = counted(small_spec())
    x = random.standard_normal((15, 32), dtype=np.float32)
    np.testing.assert_array_equal(session.run({"x": x, "lengths": np.array([5, 5, 5])})["y"], x)
    assert seen == [(3, 5)]


def test_costs_are_measured_once_at_the_lengths_to_tune_for(random):
    session, seen = counted(small_spec())
    feeds = {"x": random.standard_normal((9, 32), dtype=np.float32), "lengths": np.array([2, 4, 3])}
    np.testing.assert_array_equal(session.run(feeds)["y"], feeds["x"])
    measured = seen[:15]
    assert measured == [(1, 1)] * 5 + [(1, 8)] * 5 + [(1, 4)] * 5
    once = len(seen)
    session.run(feeds)
    assert len(seen) == once + (once - 15)


def test_an_answer_is_the_caller_s_and_closing_closes_the_graph_s_session(blocks, random):
    block = blocks("plain")
    inner = block.graph()
    session = PackedSession(inner, block.spec)
    feeds = {"x": random.standard_normal((5, 32), dtype=np.float32), "lengths": np.array([5])}
    first = session.run(feeds)["y"]
    kept = first.copy()
    session.run({**feeds, "x": np.zeros_like(feeds["x"])})
    np.testing.assert_array_equal(first, kept)
    PaddedView(session).close()
    with pytest.raises(SessionError, match="is closed"):
        session.run(feeds)
    with pytest.raises(SessionError, match="is closed"):
        inner.run({})


REFUSED = {
    "too few tokens": ({"lengths": np.array([2, 4])}, r"packed 'x' has shape \[5, 32\]; expected \[6, 32\]"),
    "empty": ({"lengths": np.array([5, 0])}, r"'lengths' holds 0; expected .* at least 1"),
    "int32": ({"lengths": np.array([5], np.int32)}, r"dtype int32; expected lengths \[requests\] int64"),
    "too long": (
        {"x": np.zeros((70, 32), np.float32), "lengths": np.array([5, 65])},
        r"request 1 has seq = 65; this block takes seq 1\.\.64",
    ),
    "a mask": ({"mask": np.ones((1, 5), bool)}, "got inputs lengths, mask, x; expected lengths, x"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(blocks, change, said):
    feeds = {"x": np.zeros((5, 32), np.float32), "lengths": np.array([5])}
    with pytest.raises(FeedError, match=said):
        blocks("plain").packed.run({**feeds, **change})


def test_an_engine_of_the_packed_graph_runs_behind_the_same_session(blocks, opened, random):
    """TensorRT's session over a stand-in for the plan: indices cross to the device as int64."""
    block = blocks("plain")
    signature, inner = graph_signature(block.spec), block.graph()
    ranges = {dim.name: (dim.min, dim.max) for dim in signature.dims}
    engine, _ = opened(FakePlan(signature, (ranges,), inner.run), poison=True, precision=Precision.FP32)
    requests = drawn(block.spec, [(n, n) for n in (3, 1, 9)])
    y = PackedSession(engine, block.spec).run(join(block.spec, requests))["y"]
    close(y, np.concatenate([block.alone(request) for request in requests]))
