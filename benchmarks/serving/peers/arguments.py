"""What every peer's serve.py is started with."""

from __future__ import annotations

import argparse


def arguments() -> argparse.Namespace:
    """--model FILE --port N --variant plain|batched [--workers N]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--variant", choices=["plain", "batched"], required=True)
    parser.add_argument("--workers", type=int, default=2, help="sessions of one thread, at once")
    return parser.parse_args()
