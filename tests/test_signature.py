"""Dims, tensors and signatures: what they refuse, and the words they refuse it in."""

import re

import numpy as np
import pytest

from mha_deploy.errors import FeedError, SpecError
from mha_deploy.precision import Precision, numpy_dtype
from mha_deploy.signature import Dim, Signature, TensorSpec

BATCH, SEQ = Dim("batch", 1, 4, 8), Dim("seq", 2, 16, 128)
SIGNATURE = Signature(
    (
        TensorSpec("x", "float32", ("batch", "seq", 6)),
        TensorSpec("mask", "bool", ("batch", "seq"), "boolean, True = keep"),
    ),
    (TensorSpec("y", "float32", ("batch", "seq", 6)),),
    (BATCH, SEQ),
)


def feeds(batch=2, seq=5, **changed):
    return {"x": np.zeros((batch, seq, 6), np.float32), "mask": np.ones((batch, seq), bool), **changed}


def refusal(given):
    with pytest.raises(FeedError) as caught:
        SIGNATURE.check(given)
    return str(caught.value)


@pytest.mark.parametrize("bounds", [(0, 1, 2), (2, 1, 3), (1, 5, 4), (3, 3, 2), (-1, 1, 1)])
def test_a_dim_is_refused_unless_its_bounds_are_in_order_and_above_zero(bounds):
    low, opt, high = bounds
    said = f"dim 'seq': min={low} opt={opt} max={high}; expected 1 <= min <= opt <= max"
    with pytest.raises(SpecError, match=re.escape(said)):
        Dim("seq", *bounds)


@pytest.mark.parametrize("bounds", [(1, 2.0, 3), ("1", 2, 3), (True, 2, 3), (1, 2, None)])
def test_a_dim_takes_whole_numbers_only(bounds):
    with pytest.raises(SpecError, match="dim 'seq': min, opt and max are whole numbers, got"):
        Dim("seq", *bounds)


def test_a_dim_of_one_size_is_a_dim():
    assert str(Dim("seq", 7, 7, 7)) == "seq 7..7..7"


def test_a_tensor_says_its_axes_dtype_and_meaning():
    assert str(SIGNATURE.input("x")) == "x [batch, seq, 6] float32"
    assert str(SIGNATURE.input("mask")) == "mask [batch, seq] bool (boolean, True = keep)"


def test_a_tensor_over_an_unknown_dim_is_refused():
    with pytest.raises(SpecError, match="tensor 'y' uses dim 'length'; known dims: batch, seq"):
        Signature((), (TensorSpec("y", "float32", ("length",)),), (BATCH, SEQ))


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(SpecError, match="no dim 'len'; this block has batch, seq"):
        SIGNATURE.dim("len")
    with pytest.raises(SpecError, match="no input 'z'; this block takes x, mask"):
        SIGNATURE.input("z")


def test_inputs_that_fit_give_the_size_of_every_dim():
    assert SIGNATURE.check(feeds(batch=3, seq=7)) == {"batch": 3, "seq": 7}


@pytest.mark.parametrize(("batch", "seq"), [(1, 2), (8, 128)])
def test_both_ends_of_a_range_belong_to_it(batch, seq):
    assert SIGNATURE.check(feeds(batch, seq)) == {"batch": batch, "seq": seq}


@pytest.mark.parametrize(
    ("batch", "seq", "said"),
    [
        (2, 129, "input 'x' has seq = 129; this block takes seq 2..128"),
        (2, 1, "input 'x' has seq = 1; this block takes seq 2..128"),
        (9, 5, "input 'x' has batch = 9; this block takes batch 1..8"),
        (0, 5, "input 'x' has batch = 0; this block takes batch 1..8"),
    ],
)
def test_a_size_out_of_range_is_refused_with_its_axis_and_the_range(batch, seq, said):
    assert refusal(feeds(batch, seq)) == said


def test_a_missing_and_an_unknown_input_are_named():
    given = feeds()
    assert refusal({"x": given["x"]}) == "got inputs x; expected mask, x"
    assert refusal({}) == "got inputs none; expected mask, x"
    assert refusal({**given, "bias": given["x"]}) == "got inputs bias, mask, x; expected mask, x"


def test_a_wrong_dtype_is_refused_with_the_one_expected():
    said = refusal(feeds(x=np.zeros((2, 5, 6), np.float64)))
    assert said == "input 'x' has dtype float64; expected x [batch, seq, 6] float32"
    assert "True = keep" in refusal(feeds(mask=np.ones((2, 5), np.int64)))


def test_a_list_is_not_an_array():
    assert refusal(feeds(mask=[[True]])) == "input 'mask' is a list; expected a numpy array"


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 6, 1), (2, 5, 7), (2, 5, 1), ()])
def test_a_wrong_rank_or_fixed_size_is_refused_with_both_shapes(shape):
    said = refusal(feeds(x=np.zeros(shape, np.float32)))
    assert said == f"input 'x' has shape {list(shape)}; expected x [batch, seq, 6] float32"


def test_inputs_that_disagree_on_a_dim_are_refused():
    said = refusal(feeds(mask=np.ones((2, 4), bool)))
    assert said == "input 'mask' has shape [2, 4], so seq = 4, but an earlier input has seq = 5"


def test_numbers_in_the_other_byte_order_are_refused():
    swapped = np.zeros((2, 5, 6), np.dtype(np.float32).newbyteorder())
    assert "byte order" in refusal(feeds(x=swapped))


def test_at_a_precision_only_the_floating_point_tensors_change():
    half = SIGNATURE.at(Precision.BF16)
    assert [t.dtype for t in (*half.inputs, *half.outputs)] == ["bfloat16", "bool", "bfloat16"]
    assert half.at(Precision.FP32) == SIGNATURE


def test_a_bfloat16_signature_takes_bfloat16_arrays():
    given = feeds(x=np.zeros((2, 5, 6), Precision.BF16.numpy))
    assert SIGNATURE.at(Precision.BF16).check(given) == {"batch": 2, "seq": 5}


def test_a_signature_comes_back_from_json_as_it_was():
    assert Signature.from_json(SIGNATURE.to_json()) == SIGNATURE


def test_a_shape_is_concrete_at_given_sizes():
    assert SIGNATURE.shape(SIGNATURE.input("x"), {"batch": 3, "seq": 9}) == (3, 9, 6)


@pytest.mark.parametrize("precision", list(Precision))
def test_eps_is_the_gap_between_one_and_the_next_number(precision):
    one = np.ones(1, precision.numpy)
    eps, half = np.array([precision.eps, precision.eps / 2]).astype(precision.numpy)
    assert (one + eps).astype(np.float64) == 1 + precision.eps
    assert (one + half).astype(np.float64) == 1


def test_an_unknown_dtype_name_is_refused():
    with pytest.raises(SpecError, match="unknown dtype 'float33'; expected a numpy name such as float32"):
        numpy_dtype("float33")
