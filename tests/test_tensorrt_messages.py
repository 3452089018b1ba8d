"""The library's own errors, provoked for real and without our checks, and what they turn into."""

from __future__ import annotations

import onnx
import pytest
from graphs import Mha, mha_model
from tensorrt_builds import bare_errors, build, written

from mha_deploy.errors import GraphError, InputError, MissingError
from mha_deploy.tensorrt.backend import load_backend
from mha_deploy.tensorrt.build import build_plan
from mha_deploy.tensorrt.graph import read_graph
from mha_deploy.tensorrt.log import Log, recording
from mha_deploy.tensorrt.messages import (
    BuildError,
    CompilerCrash,
    NoAttentionKernel,
    ProfileError,
    RefusedError,
    TargetError,
    explain,
    misuse,
)
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import ShapeRange, profiles_for_graph

X = {"x": ShapeRange((1, 1, 256), (8, 128, 256), (8, 512, 256))}
PLAIN, MASKED = Mha(), Mha(mask="bool")


def targets(*names):
    def configure(module, config):
        config.num_compute_capabilities = len(names)
        for i, name in enumerate(names):
            config.set_compute_capability(getattr(module.ComputeCapability, name), i)

    return configure


def flag(name):
    return lambda module, config: config.set_flag(getattr(module.BuilderFlag, name))


def workspace(module, config):
    config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, 1 << 20)


def windows(module, config):
    config.runtime_platform = module.RuntimePlatform.WINDOWS_AMD64


def edited(change, form=PLAIN):
    made = mha_model(form)
    change(made)
    return made


def on_attention(**attributes):
    def change(made):
        node = next(n for n in made.graph.node if n.op_type == "Attention")
        node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())

    return change


def short_weight(made):
    made.graph.initializer[1].raw_data = made.graph.initializer[1].raw_data[:-6]


def two_types(made):
    zeros = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(made.graph.initializer[0]).astype("f4"))
    zeros.name = made.graph.initializer[0].name
    made.graph.initializer[0].CopyFrom(zeros)


def shapes(**ranges):
    return ({name: ShapeRange(*range_) for name, range_ in ranges.items()},)


PROFILES = {
    "no profile": (PLAIN, (), "has dynamic axes and no profile gives their ranges; add --profile"),
    "missing input": (MASKED, (X,), "profile 0 has no range for input 'mask'"),
    "min above max": (
        PLAIN,
        shapes(x=((8, 1, 256), (8, 8, 256), (4, 8, 256))),
        "not in order: every axis needs 1 <= MIN <= OPT <= MAX",
    ),
    "wrong rank": (
        PLAIN,
        shapes(x=((1, 1), (8, 128), (8, 512))),
        "profile 0 gives input 'x' 2 axes, but it has 3",
    ),
    "fixed axis": (
        PLAIN,
        shapes(x=((1, 1, 255), (8, 128, 255), (8, 512, 255))),
        "axis 2 of input 'x' is fixed at 256, but profile 0 gives it min=255, opt=255, max=255",
    ),
    "two opts of one axis": (
        MASKED,
        shapes(x=((1, 1, 256), (8, 64, 256), (8, 512, 256)), mask=((1, 1), (8, 65), (8, 512))),
        "axis 'seq' stands in several inputs and a profile gives it two OPT sizes, 64 and 65",
    ),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_profile_that_tensorrt_refuses_is_explained_by_axis_or_input(case):
    form, ranges, said = PROFILES[case]
    error = explain(bare_errors(written(form), ranges))
    assert (type(error), error.exit_code) == (ProfileError, 2)
    assert said in str(error)


def test_a_negative_size_is_explained_as_a_profile_out_of_order():
    backend = load_backend("tensorrt-rtx")
    profile = backend.module.Builder(backend.logger).create_optimization_profile()
    with pytest.raises(RuntimeError) as raised:
        profile.set_shape("x", (1, 1), (-1, 1), (1, 1))
    assert type(explain([str(raised.value)])) is ProfileError


CONFIGS = {
    "workspace": (
        PLAIN,
        workspace,
        BuildError,
        2,
        "no kernel fits into the workspace; give --workspace more",
    ),
    "refit": (
        PLAIN,
        flag("REFIT"),
        MissingError,
        3,
        "no CUDA driver; build where one is, or without --refit",
    ),
    "strip": (
        PLAIN,
        flag("STRIP_PLAN"),
        MissingError,
        3,
        "refittable or stripped plan is compiled on the GPU",
    ),
    "current": (PLAIN, targets("CURRENT"), MissingError, 3, "needs an NVIDIA GPU with its driver"),
    "no target": (PLAIN, targets("NONE"), TargetError, 2, "no target architecture was given; name one with"),
    "bf16 on turing": (Mha(dtype="bf16"), targets("SM75"), TargetError, 2, "sm75 cannot run bf16"),
    "fp32 on turing": (Mha(opset=20, dtype="fp32"), targets("SM75"), TargetError, 2, "cannot run fp32"),
    "version compatible": (PLAIN, flag("VERSION_COMPATIBLE"), MissingError, 3, "libnvinfer_lean.so.1 is not"),
    "lean runtime": (
        PLAIN,
        flag("EXCLUDE_LEAN_RUNTIME"),
        BuildError,
        2,
        "only be left out of a version-comp",
    ),
    "platform": (PLAIN, windows, BuildError, 2, "builds for Linux x86_64 only; build on the platform that"),
    "no kernel": (
        Mha(dtype="fp32"),
        flag("TF32"),
        NoAttentionKernel,
        1,
        "--attention auto to let TensorRT dec",
    ),
    "crash": (
        Mha(heads=2, head_dim=100, mask="bool"),
        flag("TF32"),
        CompilerCrash,
        2,
        "tactics_tiled_layout",
    ),
    "mask type": (Mha(mask="additive", mask_dtype="fp32"), flag("TF32"), GraphError, 2, "half and float"),
}


def ranges_of(form):
    """What the form's own profile gives every input."""
    graph = read_graph(written(form))
    (profile,) = profiles_for_graph(graph.inputs, [form.profile])
    return (profile.shapes(graph.inputs),)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_setting_that_tensorrt_cannot_meet_is_explained_with_what_to_do(case):
    form, configure, kind, code, said = CONFIGS[case]
    error = explain(bare_errors(written(form), ranges_of(form), configure))
    assert (type(error), error.exit_code) == (kind, code)
    assert said in str(error)


@pytest.mark.parametrize("case", ["lean runtime", "platform"])
def test_a_setting_that_tensorrt_ignores_with_an_error_counts_as_refused(case):
    form, configure, *_ = CONFIGS[case]
    assert misuse(bare_errors(written(form), ranges_of(form), configure))


GRAPHS = {
    "empty": (b"", GraphError, "holds no graph with an output; it is empty or no ONNX model"),
    "garbage": (b"\0garbage" * 9, GraphError, "holds no graph with an output"),
    "cut short": (mha_model(PLAIN).SerializeToString()[:5000], GraphError, "it is cut short or another kind"),
    "dangling": (
        edited(lambda m: m.graph.node[0].input.__setitem__(0, "nowhere")),
        GraphError,
        "node matmul_0 (MatMul): a node reads a tensor that nothing produces",
    ),
    "unknown operator": (
        edited(lambda m: setattr(m.graph.node[0], "op_type", "Frobnicate")),
        RefusedError,
        "node matmul_0 (Frobnicate): TensorRT knows no such operator",
    ),
    "short weight": (edited(short_weight), GraphError, "the weights of 'weight_1' are missing or too short"),
    "two types": (
        edited(two_types),
        GraphError,
        "node matmul_0 (MatMul): a matrix product has operands of two types, Half and Float",
    ),
    "softcap": (edited(on_attention(softcap=9.0)), RefusedError, "Setting softcap is not supported"),
    "causal and mask": (
        edited(on_attention(is_causal=1), MASKED),
        RefusedError,
        "has is_causal and a mask, which TensorRT does not take together",
    ),
    "heads": (mha_model(Mha(kv_heads=3)), RefusedError, "heads of an Attention do not divide"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_a_file_that_tensorrt_cannot_parse_is_explained_at_its_node(case, tmp_path):
    made, kind, said = GRAPHS[case]
    path = tmp_path / "model.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    error = explain(bare_errors(path))
    assert (type(error), error.exit_code) == (kind, 2)
    assert said in str(error)


def test_a_missing_file_is_explained(tmp_path):
    error = explain(bare_errors(tmp_path / "nope.onnx"))
    assert (type(error), error.exit_code) == (GraphError, 2)
    assert "there is no file" in str(error)


def test_missing_external_weights_are_explained_by_name(tmp_path):
    path = tmp_path / "external.onnx"
    onnx.save(mha_model(PLAIN), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    error = explain(bare_errors(path))
    assert (type(error), error.exit_code) == (GraphError, 2)
    assert "the weights of 'weight_0' are missing or too short" in str(error)


def test_loading_a_plan_without_a_driver_is_explained():
    backend = load_backend("tensorrt-rtx")
    plan = build(PLAIN).plan
    with recording() as log:
        engine = backend.module.Runtime(backend.logger).deserialize_cuda_engine(plan)
    if engine is not None:
        pytest.skip("this machine has a GPU that takes the plan")
    error = explain(log.errors)
    assert (type(error), error.exit_code) == (MissingError, 3)
    assert "needs an NVIDIA GPU with its driver" in str(error)


def test_a_graph_with_dynamic_axes_and_no_profile_is_refused_before_the_build():
    with pytest.raises(ProfileError, match=r"axes batch, seq .*--profile batch=MIN:OPT:MAX") as error:
        build_plan(written(PLAIN), BuildOptions(backend="tensorrt-rtx"))
    assert error.value.exit_code == 2


def test_a_workspace_too_small_is_refused_by_the_option_to_change():
    with pytest.raises(BuildError, match="no kernel fits into the workspace; give --workspace") as error:
        build(PLAIN, workspace_bytes=1 << 20)
    assert error.value.exit_code == 2


def test_a_refittable_plan_without_a_driver_needs_another_machine():
    with pytest.raises(MissingError, match="build where one is, or without --refit") as error:
        build(PLAIN, refit=True)
    assert error.value.exit_code == 3


def test_a_version_compatible_plan_is_refused_where_there_is_none():
    with pytest.raises(InputError, match="has no version-compatible plans") as error:
        build(PLAIN, version_compatible=True)
    assert error.value.exit_code == 2


def test_an_unknown_text_is_passed_on_without_the_frame_around_it():
    error = explain(["While parsing node number 3", "--- Begin node ---", "Something   entirely new"])
    assert str(error) == "TensorRT could not build the plan. It said: Something entirely new"
    assert (type(error), error.exit_code) == (BuildError, 2)


def test_a_build_that_fails_in_silence_is_still_an_error():
    assert str(explain([])) == "TensorRT could not build the plan. It said: nothing"


def test_errors_about_the_missing_driver_are_no_errors_of_the_build():
    log = Log()
    log.add(1, "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (... cudaError 35 ...)")
    log.add(1, "a real one")
    assert log.errors == ("a real one",)
