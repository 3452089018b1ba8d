"""MLServer: one process, so many sessions of one thread each. "batched" is its adaptive batching, up to 8
requests within 1 ms; it waits for that long whenever fewer are there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from arguments import arguments


def main() -> None:
    """Write the settings, then become `mlserver start`."""
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="mlserver-"))
    server = {
        "host": "127.0.0.1",
        "http_port": options.port,
        "grpc_port": options.port + 1,
        "metrics_port": options.port + 2,
        "parallel_workers": 0,
        "debug": False,
    }
    batching = {"max_batch_size": 8, "max_batch_time": 0.001} if options.variant == "batched" else {}
    model = {"name": "block", "implementation": "runtime.Attention", **batching}
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(model))
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "BLOCK_MODEL": options.model,
        "BLOCK_WORKERS": str(options.workers),
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{here}",
    }
    command = str(Path(sys.executable).with_name("mlserver"))
    os.execve(command, [command, "start", str(folder)], environment)


main()
