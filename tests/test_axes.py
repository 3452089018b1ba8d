"""Axes that are declared dynamic and are not: graphs damaged by hand, as bad exports damage them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from conftest import small_spec
from onnx import helper, numpy_helper

from mha_deploy.axes import prove_axes
from mha_deploy.cases import lattice_cases
from mha_deploy.errors import CheckError, FrozenAxisError
from mha_deploy.graph import traced_sizes
from mha_deploy.sessions.onnx_runtime import OnnxRuntimeSession
from mha_deploy.verification import Judge


def prove(bundle, model: onnx.ModelProto, path):
    onnx.save(model, path)
    with OnnxRuntimeSession(path, bundle.signature, name="damaged") as session:
        return prove_axes(path, session, bundle.spec, Judge(bundle.reference()))


@pytest.fixture
def model(small_bundle) -> onnx.ModelProto:
    return onnx.load(small_bundle.artifact().path(small_bundle.folder))


def before_output(model: onnx.ModelProto, op: str, *constants: np.ndarray, **attributes) -> None:
    """Put a node between the graph and its output."""
    last = next(node for node in model.graph.node if "y" in node.output)
    last.output[list(last.output).index("y")] = "right"
    names = [f"constant_{i}" for i in range(len(constants))]
    model.graph.initializer.extend(map(numpy_helper.from_array, constants, names))
    model.graph.node.append(helper.make_node(op, ["right", *names], ["y"], name="the_damage", **attributes))


def test_a_sound_graph_is_proved_at_one_two_odd_and_the_maximum_of_every_axis(small_bundle, model, tmp_path):
    results = prove(small_bundle, model, tmp_path / "model.onnx")
    sizes = [tuple(result.sizes.values()) for result in results]
    assert {(1, 1), (1, 2), (2, 1), (2, 2), (6, 2), (2, 64)} <= set(sizes)
    assert tuple(traced_sizes(small_bundle.signature).values()) not in {(1, 1), (2, 2)}
    assert all(result.passed for result in results)


def test_a_batch_stored_in_a_reshape_is_named_with_its_node(small_bundle, model, tmp_path):
    traced = traced_sizes(small_bundle.signature)["batch"]
    before_output(model, "Reshape", np.array([traced, -1, 32]))
    with pytest.raises(FrozenAxisError, match=r"axis 'batch' is frozen at node 'the_damage' \(R") as caught:
        prove(small_bundle, model, tmp_path / "model.onnx")
    assert caught.value.exit_code == 1


def test_a_length_stored_in_a_slice_is_named_with_its_node(small_bundle, model, tmp_path):
    traced = traced_sizes(small_bundle.signature)["seq"]
    before_output(model, "Slice", np.array([0]), np.array([traced]), np.array([1]))
    with pytest.raises(FrozenAxisError, match=r"axis 'seq' is frozen.*the_damage"):
        prove(small_bundle, model, tmp_path / "model.onnx")


def test_a_graph_that_is_wrong_at_every_size_is_not_called_frozen(small_bundle, model, tmp_path):
    before_output(model, "Mul", np.array(1.001, np.float32))
    with pytest.raises(
        CheckError, match=r"the exported graph is wrong at batch=1, seq=1: error .* allowed"
    ) as caught:
        prove(small_bundle, model, tmp_path / "model.onnx")
    assert not isinstance(caught.value, FrozenAxisError)


def test_the_lattice_moves_every_axis_of_cross_attention():
    spec = small_spec(kind="cross", dims=())
    for dim in spec.dims:
        assert {1, 2, dim.max} <= {case.sizes[dim.name] for case in lattice_cases(spec)}
