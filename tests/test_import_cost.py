"""What `mha-deploy --help` loads: nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

import mha_deploy
from mha_deploy.cli import main

HEAVY = (
    "torch",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "numpy",
    "safetensors",
    "rich",
)
REPORT = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"


def loaded_by(code):
    """Which of `HEAVY` a fresh Python has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
        cwd=Path(mha_deploy.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.split()


def test_importing_the_command_line_loads_nothing_heavy():
    assert loaded_by("import mha_deploy.cli") == []


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import mha_deploy") == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in main.commands)]
)
def test_help_loads_nothing_heavy(arguments):
    code = f"from mha_deploy.cli import main\nmain({arguments!r}, standalone_mode=False)"
    assert loaded_by(code) == []


def test_the_report_sees_what_is_loaded():
    assert loaded_by("import numpy") == ["numpy"]


def test_every_public_name_is_there_when_it_is_first_used():
    for name in mha_deploy.__all__:
        assert getattr(mha_deploy, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'mha_deploy' has no attribute 'train'"):
        _ = mha_deploy.train
