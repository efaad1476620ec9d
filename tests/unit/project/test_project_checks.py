"""The scripts behind `make lint` and the check of an installation."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import embodrl

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SCRIPTS / name))


def test_cuda_libraries_and_torchvision_are_unwanted_beside_a_cpu_torch() -> None:
    unwanted = load("check_install.py")["unwanted"]
    names = ["torch", "nvidia-cublas-cu12", "nvidia_cudnn_cu12", "nvidia-ml-py", "triton", "torchvision", "numpy"]
    assert set(unwanted(names, "cpu")) == {"nvidia-cublas-cu12", "nvidia-cudnn-cu12", "triton", "torchvision"}
    assert unwanted(names, "cuda") == {}


def test_version_to_cite_is_that_of_the_package() -> None:
    citation = (SCRIPTS.parent / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {embodrl.__version__}" in citation
