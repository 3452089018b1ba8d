"""What every peer's serve.py is started with."""

from __future__ import annotations

import argparse


def arguments() -> argparse.Namespace:
    """--model FILE --port N --variant plain|batched."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--variant", choices=["plain", "batched"], required=True)
    return parser.parse_args()
