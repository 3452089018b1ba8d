"""One virtual environment for each requirements file, made when first needed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = "-e ."
ENVIRONMENTS = ROOT / "benchmarks" / ".envs"


class InstallError(Exception):
    """An environment cannot be made; the message is pip's own reason."""


def python_of(requirements: Path, folder: Path = ENVIRONMENTS) -> Path:
    """The interpreter of the environment that holds `requirements`; made, or made anew where they changed.

    Raises:
        InstallError: with what venv or pip said.
    """
    home = folder / f"attention-{requirements.stem}"
    python, stamp = home / "bin" / "python", home / "installed.sha256"
    wanted = digest_of(requirements)
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        return python
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)])
    _run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "-r", str(requirements)]
    )
    stamp.write_text(wanted, encoding="ascii")
    return python


def digest_of(requirements: Path) -> str:
    """Of what decides what is installed; for an environment of this project its own requirements too."""
    digest = hashlib.sha256(requirements.read_bytes())
    if OWN in requirements.read_text(encoding="utf-8"):
        digest.update(str(ROOT).encode())
        for name in ("pyproject.toml", "constraints.txt"):
            digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _run(command: list[str]) -> None:
    # At the top, where the requirement "-e ." is this project.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        raise InstallError(" ".join(reasons)[:300])
