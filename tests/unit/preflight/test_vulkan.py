from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodrl.preflight import vulkan
from embodrl.preflight.vulkan import VulkanDevice, classify


def device(name: str, partially_bound: bool) -> VulkanDevice:
    return VulkanDevice(name, "cpu", f"{name} driver 1.0", "1.3.0", partially_bound)


def run_probe(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # -S leaves out site-packages: the set-up runs the file before anything is installed.
    command = [sys.executable, "-I", "-S", vulkan.__file__, "--json"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_one_sufficient_device_is_enough() -> None:
    report = classify([device("old", False), device("new", True)])
    assert report.usable and report.detail == ""


def test_devices_without_the_feature_are_named() -> None:
    report = classify([device("old", False)])
    assert report.status == vulkan.NO_FEATURE
    assert "descriptorBindingPartiallyBound" in report.detail and "old driver 1.0" in report.detail


def test_no_device() -> None:
    assert classify([]).status == vulkan.NO_DEVICE


def test_missing_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "LOADER", "libno-such-loader.so.1")
    report = vulkan.probe()
    assert report.status == vulkan.NO_LOADER and "libno-such-loader.so.1" in report.detail


def test_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = tmp_path / "vulkan.py"
    crashing.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(vulkan, "__file__", str(crashing))
    report = vulkan.probe_in_subprocess()
    assert report.status == vulkan.NO_DEVICE and "-9" in report.detail


def test_probe_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "vulkan.py"
    hanging.write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(vulkan, "__file__", str(hanging))
    report = vulkan.probe_in_subprocess(timeout_s=0.5)
    assert report.status == vulkan.NO_DEVICE and "0.5 s" in report.detail


@pytest.mark.sim
def test_this_machine_renders() -> None:
    done = run_probe({})
    report = json.loads(done.stdout)
    assert done.returncode == report["status"] == vulkan.USABLE
    assert any(found["partially_bound"] and found["name"] and found["driver"] for found in report["devices"])
    assert vulkan.probe_in_subprocess().usable


@pytest.mark.sim
def test_loader_without_drivers(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none.json")
    done = run_probe({"VK_ICD_FILENAMES": nowhere, "VK_DRIVER_FILES": nowhere})
    assert done.returncode == vulkan.NO_DEVICE
    assert json.loads(done.stdout)["devices"] == []
