"""A peer's process: one peer in its own environment, spoken to in JSON lines over stdin and stdout.

    python worker.py peers/NAME.py
    -> {"do": "prepare", "d_model": ..., "num_heads": ..., "weights": FILE, "threads": ..., "folder": ...,
        "shared": ..., "options": {...}}
                                            <- {"versions": {...}, "notes": [...]}
    -> {"do": "load", "case": NAME, "inputs": FILE, "answer": FILE}
                                            <- {"first_ms": ...}, and the answer in the file
    -> {"do": "turn", "case": NAME, "seconds": ..., "unrecorded": ..., "warm_s": ...}
                                            <- {"ms": [...]}
    -> {"do": "cpu"}                        <- {"cpu_s": ...}, of all threads since the process began
    end of stdin: the process ends

Whatever goes wrong is answered with {"error": ...}, and the next line is awaited. Only the standard
library and numpy are used here, for every environment runs this file. What libraries print goes to
stderr: stdout carries answers only. While others run, this process waits for a line and computes nothing,
once its libraries' threads have stopped to wait at full speed for more work.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from peers.task import Model, Task  # the path has to be set first


class Worker:
    """One peer, its model of the current size, and the cases that it has loaded."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._model: Model
        self._cases: dict[str, Callable[[], object]] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        did = {"prepare": self._prepare, "load": self._load, "turn": self._turn, "cpu": self._cpu}
        return did[request["do"]](request)

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._cases.clear()
        task = Task(
            d_model=request["d_model"],
            num_heads=request["num_heads"],
            weights=Path(request["weights"]),
            threads=request["threads"],
            folder=Path(request["folder"]),
            shared=Path(request["shared"]),
            options=request["options"],
        )
        task.folder.mkdir(parents=True, exist_ok=True)
        self._model = self._peer.build(task)
        versions = {name: metadata.version(name) for name in self._peer.PACKAGES}
        return {
            "versions": {"python": platform.python_version(), **versions},
            "notes": list(self._model.notes),
        }

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        with np.load(request["inputs"]) as archive:
            x, mask = archive["x"], archive["mask"]
        run = self._model.bind(x, mask)
        start = time.perf_counter()
        answer = run()
        took_ms = (time.perf_counter() - start) * 1e3
        np.save(request["answer"], self._model.padded(np.asarray(answer), mask))
        self._cases[request["case"]] = run
        return {"first_ms": took_ms}

    def _turn(self, request: Mapping[str, Any]) -> dict[str, Any]:
        run, clock = self._cases[request["case"]], time.perf_counter
        warm = clock() + request["warm_s"]
        for _ in range(request["unrecorded"]):
            run()
            if clock() > warm:
                break
        taken_ms: list[float] = []
        end = clock() + request["seconds"]
        while not taken_ms or clock() < end:
            start = clock()
            run()
            taken_ms.append((clock() - start) * 1e3)
        return {"ms": [round(each, 5) for each in taken_ms]}

    def _cpu(self, _request: Mapping[str, Any]) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}


def load_peer(path: Path) -> Any:
    """The module at `path`, under its own name: `peers/` has names of packages in it."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        worker = Worker(load_peer(Path(sys.argv[1])))
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": one_line(error)}), file=answers, flush=True)
        raise SystemExit(1) from error
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:  # a peer may raise whatever it likes; the parent says what came of it
            traceback.print_exc()
            reply = {"error": one_line(error)}
        print(json.dumps(reply), file=answers, flush=True)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
    main()
