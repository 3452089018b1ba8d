"""The layouts in which attention weights are stored. A new one is one entry in `LAYOUTS`.

Names are those of the implementations: torch.nn.MultiheadAttention, Hugging Face transformers
(BERT, ViT, BART, DistilBERT, GPT-2, Llama), timm's `Attention`, nanoGPT's `CausalSelfAttention`, and
the two modules of tutorials (`W_q` ... `fc_out` and `fc_q` ... `fc_o`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mha_deploy.spec import PROJECTIONS

QKV = PROJECTIONS[:3]


@dataclass(frozen=True, slots=True)
class Source:
    """One stored tensor and what it becomes.

    `targets` are names of the reference module; several are stacked along the output axis, in this
    order. `transposed` says that the file holds [in, out].
    """

    name: str
    targets: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A set of names under one prefix.

    `norm` is the name of the LayerNorm below the prefix and `norm_kinds` the places it can have there.
    `buffers` maps a tensor that carries no weight to its number of axes. `refused` maps a name to the
    reason why a layer that has it computes something else than the reference module.
    """

    title: str
    sources: tuple[Source, ...]
    norm: str = "norm"
    norm_kinds: tuple[str, ...] = ("pre", "post")
    buffers: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[Source, ...]:
        """The sources of the four projection matrices: what a layout is recognised by."""
        return tuple(source for source in self.sources if source.targets[0].endswith(".weight"))

    @property
    def biases(self) -> tuple[Source, ...]:
        return tuple(source for source in self.sources if source.targets[0].endswith(".bias"))

    def norm_sources(self, kind: str) -> tuple[Source, ...]:
        """The LayerNorm of a spec with `norm = kind`: under our name where the layout has none so placed."""
        return linear(self.norm if kind in self.norm_kinds else "norm", "norm")


def linear(stem: str, *projections: str, transposed: bool = False) -> tuple[Source, ...]:
    """A Linear (or LayerNorm) of one name: its weight and its bias."""
    weights = tuple(f"{projection}.weight" for projection in projections)
    biases = tuple(f"{projection}.bias" for projection in projections)
    return (Source(f"{stem}.weight", weights, transposed), Source(f"{stem}.bias", biases))


def separate(query: str, key: str, value: str, output: str) -> tuple[Source, ...]:
    """Four Linear layers."""
    stems = (query, key, value, output)
    return tuple(
        source
        for stem, projection in zip(stems, PROJECTIONS, strict=True)
        for source in linear(stem, projection)
    )


# PyTorch keeps one bias for the three input projections, packed or not.
IN_PROJ_BIAS = Source("in_proj_bias", tuple(f"{projection}.bias" for projection in QKV))

ADD_BIAS_KV = (
    "a learned key and value appended to every sequence (add_bias_kv=True), which is not supported; "
    "make and train the module with add_bias_kv=False"
)
ROTARY = (
    "the output projection of a Llama-style layer, which turns queries and keys by rotary position "
    "embedding; that is not supported yet, so the block would compute something else"
)
# GPT-2 and nanoGPT register the causal mask and the number it fills in beside the weights.
CAUSAL_BUFFERS = {"bias": 4, "masked_bias": 0}

LAYOUTS = (
    Layout("mha-deploy (query, key, value, output)", separate("query", "key", "value", "output")),
    Layout(
        "torch.nn.MultiheadAttention (in_proj_weight, out_proj)",
        (
            Source("in_proj_weight", tuple(f"{projection}.weight" for projection in QKV)),
            IN_PROJ_BIAS,
            *linear("out_proj", "output"),
        ),
        refused={"bias_k": ADD_BIAS_KV, "bias_v": ADD_BIAS_KV},
    ),
    Layout(
        "torch.nn.MultiheadAttention with kdim, vdim (q_proj_weight, out_proj)",
        (
            Source("q_proj_weight", ("query.weight",)),
            Source("k_proj_weight", ("key.weight",)),
            Source("v_proj_weight", ("value.weight",)),
            IN_PROJ_BIAS,
            *linear("out_proj", "output"),
        ),
        refused={"bias_k": ADD_BIAS_KV, "bias_v": ADD_BIAS_KV},
    ),
    Layout(
        "BERT (self.query, output.dense)",
        separate("self.query", "self.key", "self.value", "output.dense"),
        norm="output.LayerNorm",
        norm_kinds=("post",),
    ),
    Layout(
        "ViT (attention.query, output.dense)",
        separate("attention.query", "attention.key", "attention.value", "output.dense"),
    ),
    Layout("timm ViT (qkv, proj)", (*linear("qkv", *QKV), *linear("proj", "output"))),
    Layout(
        "GPT-2 (c_attn, c_proj, stored [in, out])",
        (*linear("c_attn", *QKV, transposed=True), *linear("c_proj", "output", transposed=True)),
        buffers=CAUSAL_BUFFERS,
    ),
    Layout(
        "nanoGPT (c_attn, c_proj, stored [out, in])",
        (*linear("c_attn", *QKV), *linear("c_proj", "output")),
        buffers=CAUSAL_BUFFERS,
    ),
    Layout("BART (q_proj, out_proj)", separate("q_proj", "k_proj", "v_proj", "out_proj")),
    Layout(
        "Llama (q_proj, o_proj)",
        separate("q_proj", "k_proj", "v_proj", "o_proj"),
        refused={"o_proj.weight": ROTARY},
    ),
    Layout("DistilBERT (q_lin, out_lin)", separate("q_lin", "k_lin", "v_lin", "out_lin")),
    Layout("W_q, W_k, W_v, fc_out", separate("W_q", "W_k", "W_v", "fc_out"), norm="layer_norm"),
    Layout("fc_q, fc_k, fc_v, fc_o", separate("fc_q", "fc_k", "fc_v", "fc_o"), norm="layer_norm"),
    Layout(
        "attention.fc_q ... fc_o, layer_norm",
        separate("attention.fc_q", "attention.fc_k", "attention.fc_v", "attention.fc_o"),
        norm="layer_norm",
    ),
)
