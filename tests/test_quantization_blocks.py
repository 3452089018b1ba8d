"""int8 graphs of every kind of block: near the reference, and right where it is easy to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
import torch
from conftest import SMALL_DIMS, small_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from mha_deploy.attention import MultiHeadAttention
from mha_deploy.cases.masks import fully_masked, garbage
from mha_deploy.graph import write_graph
from mha_deploy.onnx_files import check_graph
from mha_deploy.precision import Precision
from mha_deploy.quantization.calibration import observe
from mha_deploy.quantization.candidate import candidates, predicted_cost
from mha_deploy.quantization.evidence import batches, drift, errors_on, gather
from mha_deploy.quantization.plan import Plan, Source
from mha_deploy.quantization.products import find_products, split_gemms
from mha_deploy.quantization.rewrite import rewritten
from mha_deploy.quantization.smoothing import factors
from mha_deploy.ragged import Request
from mha_deploy.sessions import DEFAULT_PLACEMENT
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession, open_inference_session
from mha_deploy.signature import Dim

CROSS_DIMS = (SMALL_DIMS[0], Dim("q_len", 1, 8, 64), Dim("kv_len", 1, 8, 64))
SPECS = {
    "self": small_spec(),
    "causal, grouped, no biases": small_spec(num_kv_heads=2, causal=True, bias=()),
    "pre-norm": small_spec(norm="pre"),
    "post-norm, no mask": small_spec(norm="post", mask="none"),
    "cross": small_spec(kind="cross", kdim=24, vdim=40, value_dim=12, num_kv_heads=2, dims=CROSS_DIMS),
    "cross, pre-norm": small_spec(kind="cross", norm="pre", dims=CROSS_DIMS),
}
SCHEMES = ("static", "dynamic", "per-token")


@dataclass
class Block:
    """A small block whose inputs and context have outlier channels, as real activations have."""

    module: MultiHeadAttention
    source: Source
    folder: object

    def __post_init__(self):
        self.spec = self.module.spec
        self.evidence = gather(self.module, requests(self.spec, 8))
        names = [product.activation for product in self.source.products]
        feeds = [sample.case.feeds for sample in self.evidence.calibration]
        self.ranges = observe(self.source.model, names, feeds, DEFAULT_PLACEMENT)

    def session(self, scheme, alpha=0.0, taken=None):
        taken = self.source.products if taken is None else taken
        alphas = {product.activation: alpha for product in taken} if alpha else {}
        path = self.folder / "int8.onnx"
        onnx.save(rewritten(self.source, Plan(scheme, taken, self.ranges, alphas)), path)
        check_graph(path, self.spec.signature)
        return OnnxRuntimeSession(path, self.spec.signature, precision=Precision.INT8)


def requests(spec, count, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        q_len, kv_len = 4 + number % 3, (4 + number % 3 if spec.kind == "self" else 7 + number % 2)
        tensors = {}
        for tensor in spec.signature.inputs:
            if tensor.is_float:
                length = q_len if tensor.shape[1] == spec.query_axis else kv_len
                array = random.standard_normal((length, tensor.shape[-1])).astype(np.float32)
                array[:, [3, 17]] *= 30
                tensors[tensor.name] = array
        made.append(Request(tensors, q_len, kv_len))
    return made


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            module = MultiHeadAttention(SPECS[name]).eval()
            with torch.no_grad():  # weights that leave room for the outliers, as trained ones do
                for projection in (module.query, module.key, module.value):
                    projection.weight[:, [3, 17]] /= 15
                module.value.weight[2] *= 20
                module.output.weight[:, 2] /= 20
                if SPECS[name].norm == "pre":
                    module.norm.weight[3] *= 20
            folder = tmp_path_factory.mktemp("block")
            write_graph(module, SPECS[name].signature, folder / "model.onnx")
            source = Source.of(onnx.load(folder / "model.onnx"), SPECS[name])
            made[name] = Block(module, source, folder)
        return made[name]

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", SPECS)
def test_every_product_goes_to_int8_and_smoothing_brings_it_nearer(block, name, scheme):
    own = block(name)
    assert sorted(product.role for product in own.source.products) == ["key", "output", "query", "value"]
    with own.session(scheme) as session:
        plain = errors_on(session, own.evidence.held_out).relative
    with own.session(scheme, alpha=0.5) as session:
        smoothed = errors_on(session, own.evidence.held_out).relative
    # A static range from a few short requests clips some of the others.
    assert smoothed < (0.15 if scheme == "static" else 0.03)
    assert smoothed < 0.7 * plain


@pytest.mark.parametrize("name", SPECS)
def test_smoothing_is_folded_where_something_before_can_take_it(block, name):
    own = block(name)
    operators = [node.op_type for node in own.source.model.graph.node]
    alphas = {product.activation: 0.5 for product in own.source.products}
    model = rewritten(own.source, Plan("static", own.source.products, own.ranges, alphas))
    added = [node.op_type for node in model.graph.node].count("Mul") - operators.count("Mul")
    inputs = {product.activation for product in own.source.products if product.role != "output"}
    assert added == len(inputs) - (own.spec.norm == "pre")


@pytest.mark.parametrize("keep", [("value",), ("output",), ("value", "output"), ("query", "key")])
@pytest.mark.parametrize("name", ["pre-norm", "causal, grouped, no biases", "cross"])
def test_what_stays_in_fp32_takes_its_share_of_the_smoothing(block, name, keep):
    own = block(name)
    taken = [product for product in own.source.products if product.role not in keep]
    # The residual of a pre-norm block is exact and far larger than what attention adds.
    allowed = 5e-4 if own.spec.norm == "pre" else 0.03
    with own.session("per-token", alpha=0.5, taken=taken) as session:
        assert errors_on(session, own.evidence.held_out).relative < allowed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_garbage_in_the_padding_changes_no_bit(block, scheme):
    own = block("self")
    case = garbage(own.spec, batches(own.spec, "real", own.evidence.requests[:6])[0])
    with own.session(scheme) as session:
        dirty, clean = (session.run(feeds)["y"] for feeds in (case.feeds, case.clean))
    assert not np.isfinite(case.feeds["x"]).all()
    assert np.array_equal(dirty[case.compared], clean[case.compared])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_query_with_nothing_to_look_at_gets_the_output_bias_alone(block, scheme):
    own = block("self")
    case = fully_masked(own.spec, batches(own.spec, "real", own.evidence.requests[:6])[0])
    with own.session(scheme) as session:
        y = session.run(case.feeds)["y"]
    bias = own.module.output.bias.detach().numpy()
    assert np.abs(y[0] - bias).max() <= 1e-6


def test_a_token_of_zeros_is_no_division_by_zero(block):
    own = block("self")
    feeds = {"x": np.zeros((2, 5, 32), np.float32), "mask": np.ones((2, 5), bool)}
    source = own.source.products[0].activation
    model = rewritten(own.source, Plan("per-token", own.source.products, own.ranges))
    made = observe(model, [f"{source}/normal"], [feeds], DEFAULT_PLACEMENT)[f"{source}/normal"]
    assert (made.low == 0).all()
    assert (made.high == 0).all()


def test_only_one_scale_for_the_whole_batch_moves_with_a_louder_mate(block):
    own = block("self")
    moved = {}
    for scheme in SCHEMES:
        with own.session(scheme) as session:
            moved[scheme] = drift(session, own.evidence.alone_and_with_mate)
    assert moved["dynamic"] > 0.05
    assert moved["static"] < 1e-5
    assert moved["per-token"] < 1e-5


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 6), seq=st.integers(1, 64), scheme=st.sampled_from(SCHEMES))
def test_axes_stay_dynamic(block, batch, seq, scheme):
    own = block("self")
    random = np.random.default_rng(batch * 100 + seq)
    feeds = {
        "x": random.standard_normal((batch, seq, 32)).astype(np.float32),
        "mask": np.ones((batch, seq), bool),
    }
    with own.session(scheme) as session:
        assert session.run(feeds)["y"].shape == (batch, seq, 32)


def product_graph(weight, bias=None, *, gemm=False, transposed=False):
    """y = x W (+ b), as MatMul or as Gemm."""
    constants = [numpy_helper.from_array(weight.T.copy() if transposed else weight, "w")]
    names = ["x", "w"]
    if bias is not None:
        constants.append(numpy_helper.from_array(bias, "b"))
        names.append("b")
    options = {"transB": 1} if transposed else {}
    node = helper.make_node("Gemm" if gemm else "MatMul", names, ["y"], name="product", **options)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])
        for name, width in (("x", weight.shape[0]), ("y", weight.shape[1]))
    ]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def run(model, x, folder):
    onnx.save(model, folder / "product.onnx")
    return open_inference_session(folder / "product.onnx", DEFAULT_PLACEMENT).run(None, {"x": x})[0]


def test_a_neighbour_of_100_takes_a_value_of_0_3_to_0_where_the_batch_shares_one_scale(tmp_path):
    """Beside values in +-1 it is 0.298 (a step of 0.00784); beside +-100 a step is 0.784."""
    model = product_graph(np.eye(3, dtype=np.float32))
    source = Source.of(model, small_spec())
    found = {}
    for scheme in ("dynamic", "per-token"):
        changed = rewritten(source, Plan(scheme, source.products, {}))
        alone = np.array([[0.3, 1.0, -1.0]], np.float32)
        joined = np.concatenate([alone, [[100.0, -100.0, 0.0]]]).astype(np.float32)
        found[scheme] = [float(run(changed, x, tmp_path)[0, 0]) for x in (alone, joined)]
    assert found["dynamic"] == pytest.approx([0.298, 0.0], abs=5e-4)
    assert found["per-token"][0] == found["per-token"][1] == pytest.approx(0.3, abs=4e-3)


@pytest.mark.parametrize(
    ("features", "exact"), [((), True), (("avx2",), True), (("avx2", "avx_vnni"), False)]
)
def test_without_vnni_the_kernel_that_does_not_saturate_is_chosen(monkeypatch, tmp_path, features, exact):
    monkeypatch.setattr("mha_deploy.sessions.onnx_runtime.cpu_features", lambda: features)
    onnx.save(product_graph(np.eye(3, dtype=np.float32)), tmp_path / "product.onnx")
    chosen = open_inference_session(tmp_path / "product.onnx", DEFAULT_PLACEMENT).get_session_options()
    if exact:
        assert chosen.get_session_config_entry("session.x64quantprecision") == "1"
    else:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            chosen.get_session_config_entry("session.x64quantprecision")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gemm_is_taken_apart_and_means_the_same(random, tmp_path, transposed, biased):
    weight = random.standard_normal((4, 5)).astype(np.float32)
    bias = random.standard_normal(5).astype(np.float32) if biased else None
    model = product_graph(weight, bias, gemm=True, transposed=transposed)
    x = random.standard_normal((3, 4)).astype(np.float32)
    before = run(model, x, tmp_path)
    split_gemms(model)
    onnx.checker.check_model(model, full_check=True)
    assert [product.node for product in find_products(model)] == ["product"]
    assert np.abs(run(model, x, tmp_path) - before).max() < 1e-5


def test_factors_share_the_range_between_activations_and_weights():
    """SmoothQuant's equation 4: at alpha 0.5 both have the same largest value in every feature."""
    largest, weights = np.array([16.0, 1.0, 0.25]), np.array([1.0, 4.0, 1.0])
    f = factors(largest, weights, 0.5)
    balance = (largest / f) / (weights * f)
    assert balance == pytest.approx(np.full(3, balance[0]))
    assert np.log(f).mean() == pytest.approx(0.0, abs=1e-6)


def test_a_feature_that_is_always_0_keeps_its_factor_finite():
    assert factors(np.array([0.0, 2.0]), np.array([1.0, 2.0]), 0.5).tolist() == [1.0, 1.0]


def test_the_search_goes_from_cheap_to_dear(block):
    source = block("self").source
    ordered = candidates("auto", source.graph, source.products)
    costs = [predicted_cost(each, source.graph, source.products) for each in ordered]
    assert costs == sorted(costs)
    assert ordered[0] == replace(ordered[0], scheme="static", smooth=False, keep=())
    assert {each.scheme for each in candidates("dynamic", source.graph, source.products)} == {
        "dynamic",
        "per-token",
    }
