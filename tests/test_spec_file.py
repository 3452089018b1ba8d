"""Specs as TOML files, and the presets."""

import pytest

from mha_deploy.errors import SpecError
from mha_deploy.ragged import unpack
from mha_deploy.signature import Dim
from mha_deploy.spec import PROJECTIONS, AttentionSpec, WeightsSource
from mha_deploy.spec_file import load_spec, preset_dir, preset_names
from mha_deploy.tensor_files import read_tensors
from mha_deploy.weights import read_weights

# What each preset's comment says: d_model, heads, key/value heads, size of a head, longest sequences.
SIZES = {
    "bert-base": (768, 12, 12, 64, (512,)),
    "encoder-decoder": (1024, 16, 16, 64, (256, 1024)),
    "gpt2": (768, 12, 12, 64, (1024,)),
    "gqa": (2048, 32, 8, 64, (1024,)),
    "minilm-l6-v2": (384, 12, 12, 32, (512,)),
    "transformer-base": (512, 8, 8, 64, (512,)),
    "vit-base": (768, 12, 12, 64, (577,)),
}
MINIMAL = "[attention]\nd_model = 24\nnum_heads = 4\n"


def written(folder, text):
    path = folder / "block.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder, text):
    path = written(folder, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    said = str(caught.value)
    assert said.startswith(f"spec {path}")
    return said


def test_every_preset_has_its_sizes_written_down_here():
    assert preset_names() == sorted(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_sizes_that_its_comment_says(name):
    spec = load_spec(name)
    longest = tuple(dim.max for dim in spec.dims[1:])
    assert (spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_dim, longest) == SIZES[name]
    assert spec.name == name


def test_the_presets_differ_in_kind_mask_norm_and_bias_as_their_comments_say():
    assert [name for name in SIZES if load_spec(name).kind == "cross"] == ["encoder-decoder"]
    assert [name for name in SIZES if load_spec(name).causal] == ["gpt2", "gqa"]
    assert [name for name in SIZES if load_spec(name).mask == "none"] == ["vit-base"]
    assert [name for name in SIZES if not load_spec(name).bias] == ["gqa", "transformer-base"]
    assert [name for name in SIZES if load_spec(name).norm == "post"] == ["bert-base"]
    assert load_spec("bert-base").norm_eps == 1e-12
    assert load_spec("transformer-base").dropout == 0.1


def test_the_lengths_of_the_vision_preset_are_its_patches_and_the_class_token():
    seq = load_spec("vit-base").dims[1]
    assert (seq.opt, seq.max) == ((224 // 16) ** 2 + 1, (384 // 16) ** 2 + 1)


def test_the_real_checkpoint_and_its_twelve_sentences_lie_beside_their_preset():
    spec = load_spec("minilm-l6-v2")
    assert set(read_weights(spec).tensors) == {
        f"{p}.{kind}" for p in PROJECTIONS for kind in ("weight", "bias")
    }
    requests = unpack(spec, read_tensors(preset_dir() / "minilm-l6-v2-layer3.inputs.safetensors"))
    assert len(requests) == 12
    assert spec.inputs_file == str(preset_dir() / "minilm-l6-v2-layer3.inputs.safetensors")


def test_a_file_with_two_sizes_takes_defaults_and_its_own_name(tmp_path):
    assert load_spec(written(tmp_path, MINIMAL)) == AttentionSpec(24, 4, name="block")


def test_a_spec_is_returned_as_it_is():
    spec = AttentionSpec(24, 4)
    assert load_spec(spec) is spec


def test_a_file_may_have_any_suffix_and_be_named_by_text(tmp_path):
    path = tmp_path / "block.conf"
    path.write_text(MINIMAL)
    assert load_spec(str(path)).d_model == 24


def test_everything_that_a_file_can_say_arrives(tmp_path):
    spec = load_spec(
        written(
            tmp_path,
            """
            [attention]
            kind = "cross"
            d_model = 24
            num_heads = 4
            num_kv_heads = 2
            head_dim = 5
            value_dim = 7
            kdim = 10
            vdim = 11
            causal = true
            bias = ["value", "query"]
            mask = "full"
            norm = "pre"
            norm_eps = 1
            dropout = 0.5
            [dims]
            kv_len = { min = 2, opt = 3, max = 4 }
            [weights]
            file = "w/model.safetensors"
            prefix = "layer.1."
            [inputs]
            file = "/data/inputs.npz"
            """,
        )
    )
    assert spec == AttentionSpec(
        24, 4, name="block", kind="cross", num_kv_heads=2, head_dim=5, value_dim=7, kdim=10, vdim=11,
        causal=True, bias=("query", "value"), mask="full", norm="pre", norm_eps=1, dropout=0.5,
        dims=(Dim("kv_len", 2, 3, 4),),
        weights=WeightsSource(str(tmp_path / "w/model.safetensors"), "layer.1."),
        inputs_file="/data/inputs.npz",
    )  # fmt: skip


@pytest.mark.parametrize(("text", "bias"), [("true", PROJECTIONS), ("false", ()), ('["key"]', ("key",))])
def test_bias_is_true_false_or_a_list(tmp_path, text, bias):
    assert load_spec(written(tmp_path, MINIMAL + f"bias = {text}\n")).bias == bias


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("d_model = ", "is not valid TOML: "),
        ("", "[attention] lacks d_model, num_heads"),
        ("[attention]\nd_model = 8\n", "[attention] lacks num_heads"),
        ("attention = 5\n", "[attention] is a value; expected a table"),
        (MINIMAL + "[dim]\n", "unknown section: dim; known: attention, dims, weights, inputs"),
        (MINIMAL + "heads = 4\n", "unknown key in [attention]: heads; known: d_model, num_heads, kind"),
        (MINIMAL + 'name = "x"\n', "unknown key in [attention]: name"),
        (MINIMAL + "[weights]\nurl = 'x'\n", "unknown key in [weights]: url; known: file, prefix, seed"),
        (MINIMAL + 'causal = "yes"\n', "causal = 'yes'; expected a value of type bool"),
        (MINIMAL + "causal = 1\n", "causal = 1; expected a value of type bool"),
        (MINIMAL + "head_dim = 6.0\n", "head_dim = 6.0; expected a value of type int"),
        (MINIMAL + "head_dim = true\n", "head_dim = True; expected a value of type int"),
        (MINIMAL + 'dropout = "0"\n', "dropout = '0'; expected a value of type float"),
        (MINIMAL + "mask = 1\n", "mask = 1; expected a value of type str"),
        (MINIMAL + "bias = 1\n", "bias = 1; expected true, false or a list of 'query', 'key'"),
        (MINIMAL + "bias = [1]\n", "bias = [1]; expected true, false or a list"),
        (MINIMAL + 'bias = ["q"]\n', "bias names 'q'; expected true, false or a list"),
        (MINIMAL + "num_kv_heads = 3\n", "num_heads = 4 does not divide by num_kv_heads = 3"),
        (MINIMAL + "[dims]\nseq = 128\n", "dim 'seq' = 128; expected { min = 1, opt = 8, max = 32 }"),
        (MINIMAL + "[dims]\nseq = {min = 1}\n", "dim 'seq' lacks opt, max; give min, opt and max"),
        (
            MINIMAL + "[dims]\nseq = {min = 1, opt = 2, max = 4, step = 1}\n",
            "unknown bound of dim 'seq': step; known: min, opt, max",
        ),
        (
            MINIMAL + "[dims]\nseq = {min = 1, opt = 1.5, max = 4}\n",
            "dim 'seq': min, opt and max are whole numbers",
        ),
        (
            MINIMAL + "[dims]\nseq = {min = 0, opt = 2, max = 4}\n",
            "dim 'seq': min=0 opt=2 max=4; expected 1 <= min <= opt <= max",
        ),
        (
            MINIMAL + "[dims]\nq_len = {min = 1, opt = 2, max = 4}\n",
            "dims 'q_len'; kind = 'self' has batch, seq",
        ),
        (MINIMAL + "[weights]\nfile = 'a'\nseed = 1\n", "[weights] has both file and seed"),
        (MINIMAL + "[weights]\nprefix = 'a'\n", "[weights] has a prefix but no file to pick from"),
        (MINIMAL + "[weights]\nseed = -1\n", "seed = -1; expected a whole number of at least 0"),
        (MINIMAL + "[weights]\nseed = true\n", "seed = True; expected a whole number of at least 0"),
        (MINIMAL + "[weights]\nfile = 3\n", "file = 3; expected a file name"),
        (MINIMAL + "[weights]\nfile = 'a'\nprefix = 3\n", "prefix = 3; expected a text such as"),
        (MINIMAL + "[inputs]\nfile = 3\n", "file = 3; expected a file name"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_what_was_expected(tmp_path, text, said):
    assert said in refusal(tmp_path, text)


def test_a_dim_of_the_other_kind_that_lacks_bounds_is_refused_like_any_other(tmp_path):
    assert "q_len" in refusal(tmp_path, MINIMAL + "[dims]\nq_len = {min = 1}\n")


def test_an_empty_checkpoint_name_is_not_taken_for_random_weights(tmp_path):
    assert "file = ''" in refusal(tmp_path, MINIMAL + "[weights]\nfile = ''\n")


def test_a_name_that_is_neither_file_nor_preset_is_answered_with_the_presets():
    with pytest.raises(
        SpecError, match=f"no spec 'bert': neither a TOML file.*presets: {', '.join(sorted(SIZES))}"
    ):
        load_spec("bert")


def test_a_missing_file_and_a_folder_are_refused_with_the_reason(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read spec .*none\.toml: No such file or directory"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match=r"cannot read spec .*folder\.toml: Is a directory"):
        load_spec(tmp_path / "folder.toml")


def test_a_file_that_is_not_text_is_not_valid_toml(tmp_path):
    (tmp_path / "block.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not valid TOML"):
        load_spec(tmp_path / "block.toml")
