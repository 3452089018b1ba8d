"""What every peer's serve.py is started with, and what its peer.toml declares."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path


def arguments(serve: str) -> argparse.Namespace:
    """--model FILE --port N --variant plain|batched [--workers N] of the file `serve`.

    From the peer.toml beside it: `threads` of a worker's session, `largest_batch` and `window_ms`.
    """
    declared = tomllib.loads(Path(serve).with_name("peer.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--variant", choices=["plain", "batched"], required=True)
    parser.add_argument("--workers", type=int, default=2, help="sessions at once")
    parser.set_defaults(**{name: declared[name] for name in ("threads", "largest_batch", "window_ms")})
    return parser.parse_args()
