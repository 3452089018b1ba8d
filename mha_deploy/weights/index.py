"""Indexes of sharded checkpoints: which shard to give instead."""

from __future__ import annotations

import json
from pathlib import Path

from mha_deploy.errors import WeightsError
from mha_deploy.weights.checkpoint import first_bytes, is_safetensors
from mha_deploy.weights.fit import suggestion, under


def refuse_index(path: Path, prefix: str) -> None:
    """Say which shard holds the layer, where `path` is an index and not a checkpoint.

    Format: Hugging Face's `*.index.json`, an object whose `weight_map` maps a tensor to its shard.

    Raises:
        WeightsError: the file is such an index, or another JSON file.
    """
    start = first_bytes(path)
    if is_safetensors(start) or not start.lstrip().startswith(b"{"):
        return
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsError(f"checkpoint {path} looks like JSON and is not valid: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise WeightsError(
            f"checkpoint {path} is a JSON file without a weight_map; give a safetensors file or a state dict"
        )
    what = f"checkpoint {path} is the index of a sharded checkpoint and holds no weights"
    shards = sorted({str(weight_map[name]) for name in under(weight_map, prefix)})
    if not prefix:
        raise WeightsError(f"{what}; pick one layer by its prefix first{suggestion(weight_map, prefix)}")
    if not shards:
        raise WeightsError(f"{what}; no tensor has prefix {prefix!r}{suggestion(weight_map, prefix)}")
    if len(shards) > 1:
        raise WeightsError(
            f"{what}; prefix {prefix!r} is spread over {' and '.join(shards)}: "
            "copy its tensors into one safetensors file and give that"
        )
    raise WeightsError(f"{what}; prefix {prefix!r} is in {shards[0]}: give {path.parent / shards[0]}")
