"""Backends, targets and options: told apart by what the module can do."""

from types import SimpleNamespace

import pytest

from mha_deploy.errors import InputError, MissingError
from mha_deploy.signature import Dim
from mha_deploy.tensorrt import backend as backends
from mha_deploy.tensorrt.backend import Backend, as_backend, load_backend
from mha_deploy.tensorrt.options import BuildOptions
from mha_deploy.tensorrt.profiles import Profile
from mha_deploy.tensorrt.targets import parse_targets, resolve_targets

pytest.importorskip("tensorrt_rtx")


@pytest.fixture
def rtx() -> Backend:
    return load_backend("tensorrt-rtx")


def full_tensorrt() -> Backend:
    """A module with the attributes that full TensorRT 11 has, as far as features are read."""
    config = SimpleNamespace(create_timing_cache=0, builder_optimization_level=0)
    return as_backend(
        "tensorrt",
        SimpleNamespace(
            __version__="11.4.0",
            IAttention=object,
            IBuilderConfig=config,
            HardwareCompatibilityLevel=object,
            BuilderFlag=SimpleNamespace(REFIT=1, VERSION_COMPATIBLE=2),
            NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
        ),
    )


def test_rtx_is_known_by_its_targets_and_lacks_what_needs_measuring(rtx):
    has = (rtx.has_targets, rtx.has_refit, rtx.has_optimization_level)
    lacks = (rtx.has_timing_cache, rtx.has_hardware_compatibility, rtx.has_version_compatibility)
    assert (has, lacks) == ((True,) * 3, (False,) * 3)


def test_full_tensorrt_is_known_by_having_no_targets():
    full = full_tensorrt()
    has = (full.has_timing_cache, full.has_hardware_compatibility, full.has_version_compatibility)
    assert (full.has_targets, has) == (False, (True,) * 3)


def test_networks_are_strongly_typed_by_flag_where_the_flag_exists(rtx):
    without = Backend("tensorrt", "x", SimpleNamespace(NetworkDefinitionCreationFlag=object))
    assert (full_tensorrt().network_flags(), rtx.network_flags(), without.network_flags()) == (2, 1, 0)


def test_the_parser_is_asked_by_the_method_that_it_has(rtx):
    new = SimpleNamespace(supports_model_v2=lambda *_: True)
    old = SimpleNamespace(supports_model=lambda *_: (False, []))
    assert (rtx.supports_model(new, b"", ""), rtx.supports_model(old, b"", "")) == (True, False)


def test_a_module_without_attention_is_too_old():
    with pytest.raises(
        MissingError, match=r"tensorrt 10\.3 does not know attention .*10\.14 or newer"
    ) as error:
        as_backend("tensorrt", SimpleNamespace(__version__="10.3"))
    assert error.value.exit_code == 3


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(InputError, match="--backend trt: expected one of auto, tensorrt, tensorrt-rtx"):
        load_backend("trt")


def test_full_tensorrt_without_a_driver_says_what_builds_without_one(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_driver", lambda: False)
    with pytest.raises(MissingError, match=r"no usable NVIDIA driver.*--backend tensorrt-rtx") as error:
        load_backend("tensorrt")
    assert error.value.exit_code == 3


def test_auto_without_a_driver_is_rtx(monkeypatch):
    monkeypatch.setattr(backends, "has_cuda_driver", lambda: False)
    assert load_backend("auto").name == "tensorrt-rtx"


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(backends._MODULES, "tensorrt-rtx", "tensorrt_rtx_absent")
    backends._load.cache_clear()
    with pytest.raises(MissingError, match=r"tensorrt_rtx_absent cannot be imported.*'mha-deploy\[rtx\]'"):
        load_backend("tensorrt-rtx")


def test_auto_with_no_tensorrt_at_all_names_both(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match=r"mha-deploy\[rtx\].*mha-deploy\[gpu\]"):
        load_backend("auto")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sm80,sm89,sm120", ("sm80", "sm89", "sm120")),
        ("SM_89", ("sm89",)),
        ("8.9, 12.0", ("sm89", "sm120")),
        ("86,86", ("sm86",)),
        ("current", ("current",)),
    ],
)
def test_targets_are_read_in_the_usual_spellings(text, names):
    assert parse_targets(text) == names


@pytest.mark.parametrize("text", ["ada", "", "sm80,", "none", "sm8"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(InputError, match="is no GPU architecture; expected a list such as sm80,sm89,sm120"):
        parse_targets(text)


def test_targets_become_the_modules_own_members(rtx):
    members = rtx.module.ComputeCapability
    assert resolve_targets(rtx, ("sm75", "sm121")) == (members.SM75, members.SM121)


@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_a_data_centre_target_points_to_full_tensorrt(rtx, name):
    with pytest.raises(InputError, match=rf"has no {name} .*full TensorRT.*--backend tensorrt\b"):
        resolve_targets(rtx, (name,))


def test_an_unknown_target_lists_what_the_module_has(rtx):
    with pytest.raises(InputError, match="has no sm70; it has sm75, sm80, sm86, sm89, sm120, sm121"):
        resolve_targets(rtx, ("sm70",))


def test_targets_on_a_backend_without_them_are_refused():
    with pytest.raises(InputError, match="builds for the GPU that it runs on and takes no targets") as error:
        BuildOptions(targets=("sm89",)).check(full_tensorrt())
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (BuildOptions(version_compatible=True), "version-compatible plans"),
        (BuildOptions(hardware_compatible=True), "hardware compatibility levels"),
        (BuildOptions(timing_cache="cache.bin"), "timing cache"),
    ],
)
def test_what_only_full_tensorrt_has_is_refused_elsewhere_and_taken_there(rtx, options, what):
    options.check(full_tensorrt())
    with pytest.raises(InputError, match=rf"has no {what}.*--backend tensorrt\.") as error:
        options.check(rtx)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("attention", "flash", "--attention flash: expected one of auto, fused, decompose"),
        ("workspace_bytes", -1, "--workspace -1"),
        ("optimization_level", 6, "optimization level 6: expected 0 to 5"),
    ],
)
def test_a_value_that_no_tensorrt_takes_is_refused(field, value, said):
    with pytest.raises(InputError, match=said):
        BuildOptions(**{field: value})


def test_options_as_plain_data_tell_two_profiles_apart():
    one, two = (BuildOptions(profiles=(Profile((Dim("seq", 1, 2, top),)),)) for top in (4, 8))
    assert one.to_json() != two.to_json()
    assert one.to_json()["profiles"] == [{"seq": [1, 2, 4]}]
