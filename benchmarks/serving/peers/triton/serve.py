"""Triton's CPU server out of the nvidia-pytriton wheel, with its Python backend: so many instances of
one thread each. "batched" adds the dynamic batcher, which groups requests of equal shape."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytriton
from arguments import arguments

CONFIG = """
name: "block"
backend: "python"
max_batch_size: 8
input [
  {{ name: "x" data_type: TYPE_FP32 dims: [ -1, {width} ] }},
  {{ name: "mask" data_type: TYPE_BOOL dims: [ -1 ] }}
]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1, {width} ] }} ]
instance_group [ {{ kind: KIND_CPU count: {workers} }} ]
{batching}
"""


def main() -> None:
    """Lay out a model repository and the backend, then become the server."""
    options = arguments()
    root = Path(tempfile.mkdtemp(prefix="triton-"))
    server = Path(pytriton.__file__).parent / "tritonserver"
    shutil.copytree(server / "backends", root / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, root / "backends" / "python")
    shutil.copytree(Path(__file__).parent / "repository", root / "models" / "block")
    from block import Block

    width = Block(options.model, 1).width
    batching = "dynamic_batching { }" if options.variant == "batched" else ""
    config = CONFIG.format(width=width, workers=options.workers, batching=batching)
    (root / "models" / "block" / "config.pbtxt").write_text(config)
    binary = str(server / "bin" / "tritonserver")
    site = Path(pytriton.__file__).parents[1]
    # The stub looks for these beside itself, and it was copied.
    libraries = f"{site / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}"
    environment = {
        **os.environ,
        "BLOCK_MODEL": options.model,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # The backend's interpreter does not read PYTHONPATH.
        "BLOCK_PATH": f"{Path(__file__).parents[1]}:{site}",
        "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    flags = {
        "model-repository": root / "models",
        "backend-directory": root / "backends",
        "http-address": "127.0.0.1",
        "http-port": options.port,
        "allow-grpc": "false",
        "allow-metrics": "false",
    }
    os.execve(binary, [binary, *(f"--{name}={value}" for name, value in flags.items())], environment)


main()
