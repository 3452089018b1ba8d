"""Triton's CPU server out of the nvidia-pytriton wheel, with its Python backend. "batched" adds the dynamic
batcher, which groups requests of equal shape."""

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
max_batch_size: {largest_batch}
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
    options = arguments(__file__)
    root = Path(tempfile.mkdtemp(prefix="triton-"))
    server = Path(pytriton.__file__).parent / "tritonserver"
    shutil.copytree(server / "backends", root / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, root / "backends" / "python")
    shutil.copytree(Path(__file__).parent / "repository", root / "models" / "block")
    from block import Block

    window_us = round(options.window_ms * 1e3)
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {window_us} }}"
    config = CONFIG.format(
        width=Block(options.model, options.threads).width,
        workers=options.workers,
        largest_batch=options.largest_batch,
        batching=batching if options.variant == "batched" else "",
    )
    (root / "models" / "block" / "config.pbtxt").write_text(config)
    binary = str(server / "bin" / "tritonserver")
    site = Path(pytriton.__file__).parents[1]
    # The stub looks for these beside itself, and it was copied.
    libraries = f"{site / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}"
    environment = {
        **os.environ,
        "BLOCK_MODEL": options.model,
        "BLOCK_THREADS": str(options.threads),
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
