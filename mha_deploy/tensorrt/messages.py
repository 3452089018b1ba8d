"""TensorRT's own texts turned into what is wrong and what to do.

TensorRT answers with nothing and a line in its log. The table below was read off TensorRT for RTX
1.7; the texts are the library's and may change, so an unknown one is passed on as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mha_deploy.errors import CheckError, GraphError, InputError, MhaDeployError, MissingError


class ProfileError(InputError):
    """An optimisation profile is missing, impossible or outside what the graph was made for."""


class BuildError(InputError):
    """TensorRT cannot build this with these options."""


class TargetError(BuildError):
    """A target architecture cannot run the graph's precision."""


class RefusedError(GraphError):
    """TensorRT's parser refuses a node or drops an input."""


class CompilerCrash(GraphError):  # noqa: N818 - named for what happened
    """The compiler inside TensorRT failed on a valid graph; another form of it may pass."""


class NoAttentionKernel(CheckError):  # noqa: N818 - named for what was found
    """An attention has no fused kernel and may not be decomposed."""


@dataclass(frozen=True, slots=True)
class Row:
    """When `pattern` stands in the log: the error to raise, with the pattern's groups filled in."""

    pattern: re.Pattern[str]
    kind: type[MhaDeployError]
    text: str


def _row(pattern: str, kind: type[MhaDeployError], text: str) -> Row:
    return Row(re.compile(pattern, re.DOTALL), kind, text)


TABLE = (
    # Profiles; one that is refused leaves none behind, so its row comes first.
    _row(
        r"satisfy MIN<=OPT<=MAX|is inconsistent with other shapes",
        ProfileError,
        "a profile is not in order: every axis needs 1 <= MIN <= OPT <= MAX.",
    ),
    _row(
        r"no optimization profile has been defined",
        ProfileError,
        "the graph has dynamic axes and no profile gives their ranges; add --profile AXIS=MIN:OPT:MAX,...",
    ),
    _row(
        r"Dynamic input tensor (?P<name>\S+) is missing dimensions in profile (?P<profile>\d+)",
        ProfileError,
        "profile {profile} has no range for input {name!r}; name all of its dynamic axes in --profile.",
    ),
    _row(
        r"input tensor (?P<name>\S+) has (?P<rank>\d+) dimensions but profile (?P<profile>\d+) has "
        r"(?P<got>\d+)",
        ProfileError,
        "profile {profile} gives input {name!r} {got} axes, but it has {rank}; give one size for each axis.",
    ),
    _row(
        r"Dimension mismatch for tensor (?P<name>\S+) and profile (?P<profile>\d+)\. At dimension axis "
        r"(?P<axis>\d+), profile has (?P<got>.*?) but tensor has (?P<size>\d+)",
        ProfileError,
        "axis {axis} of input {name!r} is fixed at {size}, but profile {profile} gives it {got}; "
        "leave fixed axes out of --profile.",
    ),
    _row(
        r"Profile k(?P<end>OPT|MIN|MAX) values are not self-consistent\. Dimensions with name (?P<axis>\S+) "
        r"must be equal.*?violated: (?P<one>\d+) != (?P<two>\d+)",
        ProfileError,
        "axis {axis!r} stands in several inputs and a profile gives it two {end} sizes, {one} and {two}; "
        "give it one.",
    ),
    # Attention and the compiler
    _row(
        r"Attention operation was not supported by a dedicated kernel",
        NoAttentionKernel,
        "an attention of this precision or head size has no fused kernel (fp16 and bf16 with heads of 16 to "
        "256 have one); build with --attention auto to let TensorRT decompose it.",
    ),
    _row(
        r"for Turing \(SM75\): FP32 GEMM is not supported",
        TargetError,
        "sm75 (Turing) cannot run fp32 matrix products here; build with --fp16, or leave sm75 out of "
        "--target-sm.",
    ),
    _row(
        r"Cannot compile for target\(s\) (?P<target>[^,]+?), because .*?HW-specific datatypes: b16\b",
        TargetError,
        "{target} cannot run bf16, which the graph uses; build with --fp16, or leave {target} out of "
        "--target-sm.",
    ),
    _row(
        r"Cannot compile for target\(s\) (?P<target>[^,]+?), because .*?datatypes: (?P<dtype>\w+)",
        TargetError,
        "{target} cannot run {dtype}, which the graph uses (fp8 needs sm89 or newer); build from the graph "
        "before quantisation, or leave {target} out of --target-sm.",
    ),
    _row(
        r"within workspace limit|insufficient workspace",
        BuildError,
        "no kernel fits into the workspace; give --workspace more bytes, or leave it out to allow "
        "all memory.",
    ),
    _row(
        r"element type \((?P<a>\w+)\) differs from input 1's element type \((?P<b>\w+)\)",
        GraphError,
        "two operands of one operation have different types, {a} and {b} (an attention mask must be "
        "bool or of "
        "the type of query, key and value); insert a Cast, or export the graph in one precision.",
    ),
    _row(
        r"graph_jit\.cpp:\d+: CHECK\(status == CUDA_SUCCESS\)",
        MissingError,
        "a refittable or stripped plan is compiled on the GPU and this machine has no CUDA driver; "
        "build where "
        "one is, or without --refit.",
    ),
    _row(
        r"Compute capability cannot be kNONE",
        TargetError,
        "no target architecture was given; name one with --target-sm, for instance sm89.",
    ),
    _row(
        r"Unable to load library: (?P<library>libnvinfer_lean\S*?):",
        MissingError,
        "a version-compatible plan carries the lean runtime, and {library} is not installed with "
        "this TensorRT; "
        "build with full TensorRT or without version compatibility.",
    ),
    _row(
        r"kEXCLUDE_LEAN_RUNTIME can only be set if",
        BuildError,
        "the lean runtime can only be left out of a version-compatible plan; ask for that too.",
    ),
    _row(
        r"does not support building engines on platforms other than (?P<here>.*?) when",
        BuildError,
        "this TensorRT builds for {here} only; build on the platform that the plan is for.",
    ),
    _row(
        r"BuildCanceled|Build canceled by user",
        BuildError,
        "the build was cancelled; nothing was written.",
    ),
    # The ONNX file
    _row(
        r"Input file cannot be found, or is not a regular file: (?P<path>\S+)",
        GraphError,
        "there is no file {path}; give the path of an ONNX model.",
    ),
    _row(
        r"Failed to parse the ONNX model",
        GraphError,
        "the file does not parse as ONNX: it is cut short or another kind of file. Write or copy it again.",
    ),
    _row(
        r"Network must have at least one output",
        GraphError,
        "the file holds no graph with an output; it is empty or no ONNX model. Write or copy it again.",
    ),
    _row(
        r"tensors\(\)\.count\(inputName\)\): Node input was not registered",
        GraphError,
        "a node reads a tensor that nothing produces; check the model with onnx.checker and export it again.",
    ),
    _row(
        r"Failed to import initializer: (?P<name>[^\s:]+)\s*(?:$|\n)",
        GraphError,
        "the weights of {name!r} are missing or too short; keep external data files beside the "
        "model, or export "
        "it again.",
    ),
    _row(
        r"Option mask cannot be used together with CausalMaskKind",
        RefusedError,
        "an Attention has is_causal and a mask, which TensorRT does not take together; fold the "
        "causal rule into "
        "the mask.",
    ),
    _row(
        r"Plugin not found, are the plugin name, version, and namespace correct",
        RefusedError,
        "TensorRT knows no such operator and has no plugin of its name; export without it (do not run "
        "onnxruntime.transformers.optimizer before TensorRT).",
    ),
    _row(
        r"must have same input types\. `?A`? is of type (?P<a>\w+) and `?B`? is of type (?P<b>\w+)",
        GraphError,
        "a matrix product has operands of two types, {a} and {b}; TensorRT inserts no casts. Export "
        "the graph in "
        "one precision.",
    ),
    _row(
        r"query number of heads must be divisible by key/value number of heads",
        RefusedError,
        "the query heads of an Attention do not divide by its key/value heads.",
    ),
    _row(
        r"Query, Key, Value tensors must have the same head dimension",
        RefusedError,
        "an Attention has value heads of another size than its query and key heads; pad the value heads.",
    ),
    _row(
        r"only supports Attention nodes with one output",
        RefusedError,
        "an Attention has a cache or second output; TensorRT takes one output. Concatenate caches "
        "outside of it.",
    ),
    _row(
        r'"(?P<what>Setting [^"]*is not supported[^"]*)"',
        RefusedError,
        "TensorRT's Attention refuses an attribute: {what}",
    ),
    # The parser's own words for a node that has no row above.
    _row(
        r"Assertion failed: [^\n]*?: (?P<what>[A-Z][^\n]+)",
        RefusedError,
        "TensorRT's parser refuses it: {what}",
    ),
    # Late, for the missing driver is mentioned by many errors that have another cause.
    _row(
        r"generateForCurrent|CUDA driver version is insufficient|no CUDA-capable device|CUDA GPU properties",
        MissingError,
        "this needs an NVIDIA GPU with its driver, and none answers here; name the GPUs to build for with "
        "--target-sm sm80,sm89,..., or run where the GPU is.",
    ),
    # Last: what is left of the compiler's own checks, on a graph that everything else took.
    _row(
        r"MyelinCheckException: (?P<where>\S+?): CHECK",
        CompilerCrash,
        "the compiler inside TensorRT failed on this graph ({where}); the decomposed form of the attention "
        "(mha-deploy optimize --portable) may pass.",
    ),
)

_UNUSED = re.compile(r"Unused Input: (?P<name>\S+)")
# An error quoted inside another brings along that there is no CUDA driver to ask.
_NOISE = re.compile(r"^\[checkMacros\.cpp::catchCudaError.*$", re.MULTILINE)
# What the parser logs around the one line that says something.
_FRAME = re.compile(r"While parsing node number|--- (?:Begin|End) node|^\s*$")
_NODE = re.compile(
    r"While parsing node number \d+ \[(?P<op>\S+) -> \"[^\"]*\"\].*?Node name: (?P<name>[^\n]*)", re.DOTALL
)


def explain(errors: Sequence[str]) -> MhaDeployError:
    """The error that the library's error lines stand for, made but not raised.

    The first row of the table that matches any line wins; the failing node is named when the parser
    named it. An unknown text gives a BuildError with the first line that says something.
    """
    text = _NOISE.sub("", "\n".join(errors))
    node = _NODE.search(text)
    where = f"node {node['name'].strip() or '(unnamed)'} ({node['op']}): " if node else ""
    for row in TABLE:
        match = row.pattern.search(text)
        if match:
            return row.kind(where + row.text.format_map(_Quoting(match.groupdict())))
    said = next((line for line in errors if not _FRAME.search(line)), "nothing")
    return BuildError(f"{where}TensorRT could not build the plan. It said: {_shortened(said)}")


class _Quoting(dict[str, str]):
    """Groups of a match; one that did not take part reads as unknown."""

    def __missing__(self, key: str) -> str:
        return "unknown"


def unused_inputs(warnings: Sequence[str]) -> tuple[str, ...]:
    """Names of graph inputs that the parser says it does not use."""
    return tuple(dict.fromkeys(m["name"] for line in warnings if (m := _UNUSED.search(line))))


def misuse(errors: Sequence[str]) -> tuple[str, ...]:
    """Errors after which a build goes on, without what was asked for.

    A property that TensorRT refuses is logged as an API usage error and otherwise ignored; other
    errors of a build that succeeds are tactics that were tried and dropped.
    """
    return tuple(line for line in errors if "API Usage Error" in line or "Error Code 3" in line)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + " ..."
