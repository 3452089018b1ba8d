"""Profiles by symbol: what is taken, what is refused, and what TensorRT gets."""

import numpy as np
import pytest
from graphs import Mha, mha_model, save
from hypothesis import given
from hypothesis import strategies as st

from mha_deploy.errors import FeedError
from mha_deploy.signature import Dim, Signature, TensorSpec
from mha_deploy.spec import AttentionSpec
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.messages import ProfileError
from mha_deploy.tensorrt.profiles import Profile, ShapeRange, profiles_for, profiles_for_graph

SELF = AttentionSpec(d_model=64, num_heads=4).signature
X = (TensorSpec("x", "float32", ("batch", "seq", 64)),)


def refused(texts: list[str], signature: Signature = SELF) -> str:
    with pytest.raises(ProfileError) as error:
        profiles_for(signature, texts)
    assert error.value.exit_code == 2
    return str(error.value)


def test_without_a_profile_the_signature_gives_its_own_ranges():
    assert profiles_for(SELF) == (Profile((Dim("batch", 1, 8, 32), Dim("seq", 1, 128, 512))),)


def test_an_axis_left_out_takes_the_signatures_range():
    (profile,) = profiles_for(SELF, ["seq=16:32:64"])
    assert str(profile) == "batch=1:8:32,seq=16:32:64"


def test_a_repeated_option_gives_several_profiles():
    short, long = profiles_for(SELF, ["seq=1:32:64", "seq=65:128:512"])
    assert (short.to_json()["seq"], long.to_json()["seq"]) == ([1, 32, 64], [65, 128, 512])


def test_one_size_means_that_size_only():
    (profile,) = profiles_for(SELF, ["batch=4"])
    assert profile.to_json()["batch"] == [4, 4, 4]


def test_every_input_that_carries_an_axis_gets_the_same_range_for_it():
    (profile,) = profiles_for(SELF, ["batch=1:2:4,seq=8:16:32"])
    assert profile.shapes(SELF.inputs) == {
        "x": ShapeRange((1, 8, 64), (2, 16, 64), (4, 32, 64)),
        "mask": ShapeRange((1, 8), (2, 16), (4, 32)),
    }


def test_an_input_of_fixed_size_needs_no_range():
    profile = Profile((Dim("batch", 1, 2, 4),))
    inputs = (TensorSpec("x", "float32", ("batch", 8)), TensorSpec("table", "float32", (3, 3)))
    assert list(profile.shapes(inputs)) == ["x"]


@pytest.mark.parametrize(
    ("sizes", "opt"), [("1000:1200", range(1000, 1201)), ("100:1200", range(100, 1201)), ("7:7", [7])]
)
def test_an_automatic_opt_lies_inside_the_range(sizes, opt):
    """pytorch/TensorRT#4610: opt was min + max/2, 1600 for 1000..1200."""
    (profile,) = profiles_for_graph(X, [f"batch=1:8,seq={sizes}"])
    assert profile.dims[1].opt in opt


@given(low=st.integers(1, 10_000), extra=st.integers(0, 10_000))
def test_an_automatic_opt_lies_inside_any_range(low, extra):
    (profile,) = profiles_for_graph(X, [f"batch=1,seq={low}:{low + extra}"])
    assert low <= profile.dims[1].opt <= low + extra


def test_an_automatic_opt_is_the_declared_one_as_far_as_the_range_allows():
    inside, below = profiles_for(SELF, ["seq=1:512", "seq=1:64"])
    assert (inside.dims[1].opt, below.dims[1].opt) == (128, 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seq=0:512", "axis 'seq' has min 0, opt 128, max 512; expected 1 <= min <= opt <= max"),
        ("seq=64:32:128", "axis 'seq' has min 64, opt 32, max 128"),
        ("seq=128:64", "axis 'seq' has min 128"),
        ("seq=1:64:32", "axis 'seq' has min 1, opt 64, max 32"),
        ("seq=1:", "axis 'seq': 'seq=1:' is no range of whole sizes"),
        ("seq=:512", "axis 'seq': 'seq=:512' is no range"),
        ("seq=1:*", "axis 'seq': 'seq=1:*' is no range"),
        ("seq=1:2:3:4", "axis 'seq': 'seq=1:2:3:4' is no range"),
        ("seq=-1:4", "axis 'seq': 'seq=-1:4' is no range"),
        ("seq", "'seq' is no range"),
        ("", "'' is no range"),
        ("sequence=1:8", "no axis 'sequence'; dynamic axes here: batch, seq"),
        ("seq=1:8,seq=1:9", "axis 'seq' is given twice"),
        ("seq=1:1024", "axis 'seq' asks for 1..1024, but the graph was exported and checked for seq 1..512"),
    ],
)
def test_a_wrong_profile_is_refused_by_axis(text, said):
    assert said in refused([text])


def test_a_range_below_the_exported_one_is_refused():
    signature = Signature(X, (), (Dim("batch", 4, 8, 16), Dim("seq", 1, 2, 3)))
    assert "axis 'batch' asks for 1..8" in refused(["batch=1:8"], signature)


def test_a_request_outside_the_range_names_axis_value_and_range():
    signature = Signature(X, (), (Dim("batch", 1, 8, 8), Dim("seq", 1, 64, 128)))
    with pytest.raises(FeedError, match=r"seq = 129; this block takes seq 1\.\.128"):
        signature.check({"x": np.zeros((1, 129, 64), np.float32)})


def test_a_graph_that_declares_no_ranges_needs_a_profile():
    with pytest.raises(ProfileError, match=r"axes batch, seq .*--profile batch=MIN:OPT:MAX,seq=MIN:OPT:MAX"):
        profiles_for_graph(X, [])


def test_a_graph_that_declares_no_ranges_needs_every_axis():
    with pytest.raises(ProfileError, match="axis 'seq' has no range and the graph declares none"):
        profiles_for_graph(X, ["batch=1:8"])


def test_a_graph_of_fixed_size_takes_no_profile():
    fixed = (TensorSpec("x", "float32", (1, 8)),)
    assert profiles_for_graph(fixed, []) == ()
    with pytest.raises(ProfileError, match="this graph has no dynamic axis"):
        profiles_for_graph(fixed, ["batch=1:8"])


def test_a_profile_that_lacks_an_axis_of_an_input_is_refused():
    with pytest.raises(ProfileError, match="no range for axis 'seq' of input x"):
        Profile((Dim("batch", 1, 1, 1),)).shapes(X)


def test_a_profile_made_for_another_graph_is_refused():
    with pytest.raises(ProfileError, match="range for axis 'kv_len', which no input has"):
        Profile((Dim("batch", 1, 1, 1), Dim("seq", 1, 1, 1), Dim("kv_len", 1, 1, 1))).shapes(X)


def test_the_axes_of_a_foreign_file_are_its_own_names(tmp_path):
    graph = read_graph(save(mha_model(Mha(cross=True, mask="bool")), tmp_path / "foreign.onnx"))
    assert [str(tensor) for tensor in graph.inputs] == [
        "query [batch, q_len, 256] float16",
        "key [batch, kv_len, 256] float16",
        "value [batch, kv_len, 256] float16",
        "mask [batch, kv_len] bool",
    ]


def test_a_dynamic_axis_without_a_name_is_refused(tmp_path):
    model = mha_model(Mha())
    model.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_param")
    with pytest.raises(ProfileError, match="axis 1 of input 'x' is dynamic and has no name") as error:
        read_graph(save(model, tmp_path / "unnamed.onnx"))
    assert error.value.exit_code == 2
