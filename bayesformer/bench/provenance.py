"""Where a result comes from: the commit, the versions of packages, and the machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Commit (None outside a checkout), whether files differ from it, versions and machine, for a result's record."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("bayesformer", "numpy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    commit = _git("rev-parse", "--short=10", "HEAD")
    return {
        "commit": commit,
        "dirty": bool(commit and _git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions,
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }


def _git(*arguments: str) -> str | None:
    """What git says of this package's own checkout, if it is one."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists() or shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None
