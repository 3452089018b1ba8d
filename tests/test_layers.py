"""Imports point downward only, and heavy packages are loaded by the modules that say so."""

import ast
from pathlib import Path

import pytest

import mha_deploy

PACKAGE = Path(mha_deploy.__file__).parent
# A folder's name stands for every module in it. The package itself is the facade over all.
LAYERS = (
    ("errors",),
    ("json_part", "targets"),
    ("precision", "signature", "machine", "staging"),
    ("spec", "spec_file", "masks", "ragged", "packed", "latency", "tensor_files"),
    ("file_record", "artifact_details", "maker"),
    ("manifest",),
    ("onnx_files",),
    ("attention", "packed_attention", "weights", "stored_weights"),
    ("graph", "typed", "twin", "islands", "lowering", "tensorrt"),
    ("sessions",),
    ("bundle", "variant_files", "cases"),
    ("runner",),
    (
        "verification",
        "benchmark",
        "inference",
        "doctor",
        "axes",
        "proof",
        "proof_inputs",
        "proof_runners",
    ),
    ("serving",),
    ("load",),
    ("pipeline", "variants", "foreign"),
    ("quantization",),
    ("locating",),
    ("engine_job",),
    ("engines",),
    ("search",),
    ("render",),
    (
        "render_bench",
        "render_engine",
        "render_load",
        "render_locate",
        "render_quantization",
        "render_search",
        "render_verify",
    ),
    ("cli",),
    ("__main__",),
    ("",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
# Who may load what when it is imported: names of modules, or of folders.
HEAVY = {
    "torch": (
        "attention",
        "packed_attention",
        "graph",
        "typed",
        "weights",
        "sessions.reference",
        "sessions.torch_module",
        "pipeline",
        "foreign.module",
        "quantization",
    ),
    "onnx": (
        "onnx_files",
        "graph",
        "typed",
        "twin",
        "islands",
        "axes",
        "foreign",
        "benchmark.ceilings_cpu",
        "lowering",
        "tensorrt",
        "variants",
        "search.rewritten",
        "quantization",
        "locating",
        "engine_job",
    ),
    "onnxruntime": (),
    "tensorrt": (),
}
LOADS = {"safetensors.torch": "torch", "onnxscript": "onnx", "onnx_ir": "onnx", "tensorrt_rtx": "tensorrt"}


def module_of(path):
    """`pkg/sessions/base.py` is "sessions.base", an `__init__.py` is its folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
}


def layer(module):
    return LAYER_OF[module.split(".")[0]]


def imported(node):
    """Full names that an import statement brings; `from a import b` brings "a.b", be b a module or not."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import; name the module in full"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def own(name):
    """The module of this package that a full name is or lies in; nothing for another package's."""
    package, *rest = name.split(".")
    if package != PACKAGE.name:
        return []
    while rest and ".".join(rest) not in MODULES:
        rest.pop()
    return [".".join(rest)]


def own_imports(tree):
    """Modules of this package that a module imports anywhere: in functions and for types too."""
    return {module for node in ast.walk(tree) for name in imported(node) for module in own(name)}


def is_for_types_only(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def run_on_import(node):
    """The statements of a module that run when it is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if is_for_types_only(child):
            for other in child.orelse:
                yield from run_on_import(ast.Module([other], []))
            continue
        yield child
        yield from run_on_import(child)


def heavy_imports(tree):
    names = [name for node in run_on_import(tree) for name in imported(node)]
    loaded = {
        LOADS.get(".".join(name.split(".")[:2]), LOADS.get(name.split(".")[0], name.split(".")[0]))
        for name in names
    }
    return loaded & set(HEAVY)


def cycle(edges):
    """One round trip along `edges`, or nothing."""
    done = set()

    def visit(module, trail):
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        found = next((c for to in sorted(edges[module]) if (c := visit(to, [*trail, module]))), [])
        done.add(module)
        return found

    return next((c for module in sorted(edges) if (c := visit(module, []))), [])


def test_every_module_has_a_layer():
    assert [module for module in MODULES if module.split(".")[0] not in LAYER_OF] == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward_only(module):
    upward = [to for to in own_imports(MODULES[module]) if layer(to) > layer(module)]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    edges = {module: own_imports(tree) - {module} for module, tree in MODULES.items()}
    assert cycle(edges) == []


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_loaded_on_import_only_where_allowed(module):
    places = {module, module.split(".")[0]}
    refused = [name for name in heavy_imports(MODULES[module]) if not places & set(HEAVY[name])]
    assert refused == []


def test_the_reading_of_imports_sees_functions_types_and_submodules():
    source = """
from typing import TYPE_CHECKING
from mha_deploy import machine
import mha_deploy.sessions.base
if TYPE_CHECKING:
    import torch
    from mha_deploy.attention import MultiHeadAttention
else:
    import onnxscript.values
try:
    from safetensors.torch import load_file
except ImportError:
    pass
def f():
    import onnxruntime
    from mha_deploy.sessions import Placement
class C:
    import tensorrt_rtx
"""
    tree = ast.parse(source)
    assert own_imports(tree) == {"machine", "sessions.base", "attention", "sessions"}
    assert heavy_imports(tree) == {"onnx", "torch", "tensorrt"}


def test_a_circle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
