"""MLServer: one process, a session for each worker. "batched" is its adaptive batching; it waits for the
whole window whenever fewer requests are there than it may take."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from arguments import arguments


def main() -> None:
    """Write the settings, then become `mlserver start`."""
    options = arguments(__file__)
    folder = Path(tempfile.mkdtemp(prefix="mlserver-"))
    server = {
        "host": "127.0.0.1",
        "http_port": options.port,
        "grpc_port": options.port + 1,
        "metrics_port": options.port + 2,
        "parallel_workers": 0,
        "debug": False,
    }
    model = {"name": "block", "implementation": "runtime.Attention"}
    if options.variant == "batched":
        model |= {"max_batch_size": options.largest_batch, "max_batch_time": options.window_ms / 1e3}
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(model))
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "BLOCK_MODEL": options.model,
        "BLOCK_WORKERS": str(options.workers),
        "BLOCK_THREADS": str(options.threads),
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{here}",
    }
    command = str(Path(sys.executable).with_name("mlserver"))
    os.execve(command, [command, "start", str(folder)], environment)


main()
