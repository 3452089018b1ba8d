"""A disk that takes no more: one line, and nothing left behind. The limit of a file's size stands in."""

from __future__ import annotations

import resource

import numpy as np
import pytest


@pytest.fixture
def full_disk():
    """From when it is called no file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda largest: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_answers_that_the_disk_does_not_hold_are_one_line(cli, small_bundle, tmp_path, full_disk, suffix):
    inputs, out = tmp_path / "in.npz", tmp_path / f"y{suffix}"
    np.savez(inputs, x=np.zeros((6, 64, 32), np.float32), mask=np.ones((6, 64), bool))
    full_disk(8192)
    result = cli("infer", small_bundle.folder, inputs, "-o", out)
    assert (result.exit_code, result.stderr) == (2, f"error: cannot write {out}: File too large\n")
    assert list(tmp_path.iterdir()) == [inputs]


def test_a_bundle_that_the_disk_does_not_hold_is_one_line(cli, tmp_path, full_disk):
    spec, out = tmp_path / "spec.toml", tmp_path / "bundle"
    spec.write_text("[attention]\nd_model = 64\nnum_heads = 4\n")
    for largest in (8192, 70_000):  # not the weights, and not the graph
        full_disk(largest)
        result = cli("export", spec, "-o", out)
        assert (result.exit_code, result.stderr) == (2, f"error: cannot write {out}: File too large\n")
        assert list(tmp_path.iterdir()) == [spec]
