"""Query the Vulkan driver without a simulator.

Standard library only and runnable as a file (``python vulkan.py --json``), so that the set-up can use it before
anything is installed. A driver that crashes takes its process with it, so use :func:`probe_in_subprocess` in a
long-lived program.

Structure layouts: Vulkan 1.3 specification, VkPhysicalDeviceProperties2, VkPhysicalDeviceDriverProperties and
VkPhysicalDeviceDescriptorIndexingFeatures.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOADER = "libvulkan.so.1"
DEVICE_KINDS = ("other", "integrated", "discrete", "virtual", "cpu")

# Exit statuses of this file as a program.
USABLE = 0
NO_LOADER = 3
NO_DEVICE = 4
NO_FEATURE = 5

_PROPERTIES2 = 1000059001
_DRIVER_PROPERTIES = 1000196000
_FEATURES2 = 1000059000
_DESCRIPTOR_INDEXING = 1000161001
_PARTIALLY_BOUND = 17  # position among the 20 booleans
_API_VERSION_1_2 = (1 << 22) | (2 << 12)
_INCOMPATIBLE_DRIVER = -9


class _ApplicationInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    ]


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _DriverProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("driver_id", ctypes.c_uint32),
        ("driver_name", ctypes.c_char * 256),
        ("driver_info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    ]


class _Properties2(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("api_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("vendor_id", ctypes.c_uint32),
        ("device_id", ctypes.c_uint32),
        ("device_type", ctypes.c_uint32),
        ("device_name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint8 * 1024),  # cache id, limits and sparse properties: 540 bytes, none of them read here
    ]


class _DescriptorIndexing(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint32), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32 * 20)]


class _Features2(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint32), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32 * 55)]


@dataclass(frozen=True)
class VulkanDevice:
    """A physical device.

    Attributes:
        name: driver's name of the device, e.g. ``llvmpipe (LLVM 15.0.6, 256 bits)``.
        kind: one of ``DEVICE_KINDS``; ``cpu`` is a software renderer.
        driver: driver name and version, e.g. ``llvmpipe Mesa 25.0.7``.
        partially_bound: the device offers descriptorBindingPartiallyBound, which SAPIEN's renderer needs.
    """

    name: str
    kind: str
    driver: str
    api_version: str
    partially_bound: bool


@dataclass(frozen=True)
class VulkanReport:
    """Result of the probe.

    Attributes:
        status: ``USABLE``, ``NO_LOADER``, ``NO_DEVICE`` or ``NO_FEATURE``.
        detail: description of the problem; empty if there is none.
    """

    status: int
    devices: list[VulkanDevice] = field(default_factory=list[VulkanDevice])
    detail: str = ""

    @property
    def usable(self) -> bool:
        return self.status == USABLE


def classify(devices: list[VulkanDevice], detail: str = "") -> VulkanReport:
    """Return the report on the devices."""
    if not devices:
        return VulkanReport(NO_DEVICE, [], detail or "the Vulkan loader found no driver and no device")
    if not any(device.partially_bound for device in devices):
        names = ", ".join(f"{device.name} ({device.driver})" for device in devices)
        return VulkanReport(NO_FEATURE, devices, f"no Vulkan device offers descriptorBindingPartiallyBound: {names}")
    return VulkanReport(USABLE, devices)


def _describe(vulkan: Any, handle: ctypes.c_void_p) -> VulkanDevice:
    driver = _DriverProperties(type=_DRIVER_PROPERTIES)
    properties = _Properties2(type=_PROPERTIES2, next=ctypes.addressof(driver))
    vulkan.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(properties))
    indexing = _DescriptorIndexing(type=_DESCRIPTOR_INDEXING)
    features = _Features2(type=_FEATURES2, next=ctypes.addressof(indexing))
    vulkan.vkGetPhysicalDeviceFeatures2(handle, ctypes.byref(features))
    version = int(properties.api_version)
    device_type = int(properties.device_type)
    return VulkanDevice(
        name=properties.device_name.decode(errors="replace"),
        kind=DEVICE_KINDS[device_type] if device_type < len(DEVICE_KINDS) else "other",
        driver=f"{driver.driver_name.decode(errors='replace')} {driver.driver_info.decode(errors='replace')}".strip(),
        api_version=f"{(version >> 22) & 0x7F}.{(version >> 12) & 0x3FF}.{version & 0xFFF}",
        partially_bound=bool(indexing.flags[_PARTIALLY_BOUND]),
    )


def probe() -> VulkanReport:
    """Load the Vulkan loader into this process and list the devices."""
    try:
        vulkan = ctypes.CDLL(LOADER)
    except OSError as error:
        return VulkanReport(NO_LOADER, [], f"the Vulkan loader {LOADER} can't be loaded: {error}")
    application = _ApplicationInfo(type=0, api_version=_API_VERSION_1_2)
    info = _InstanceCreateInfo(type=1, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    result = vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance))
    if result != 0:
        detail = "" if result == _INCOMPATIBLE_DRIVER else f"vkCreateInstance failed with VkResult {result}"
        return classify([], detail)
    try:
        count = ctypes.c_uint32()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        return classify([_describe(vulkan, ctypes.c_void_p(handle)) for handle in handles[: count.value]])
    finally:
        vulkan.vkDestroyInstance(instance, None)


def probe_in_subprocess(timeout_s: float = 30.0) -> VulkanReport:
    """Probe in a separate process, so that a driver that hangs or crashes is only a finding."""
    command = [sys.executable, "-I", str(Path(__file__)), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return VulkanReport(NO_DEVICE, [], f"the Vulkan driver did not answer within {timeout_s:g} s")
    last_words = done.stderr.strip()[-500:]
    if done.returncode not in (USABLE, NO_LOADER, NO_DEVICE, NO_FEATURE):
        return VulkanReport(NO_DEVICE, [], f"the Vulkan probe ended with status {done.returncode}: {last_words}")
    fields = json.loads(done.stdout.splitlines()[-1])
    return VulkanReport(fields["status"], [VulkanDevice(**device) for device in fields["devices"]], fields["detail"])


def main(arguments: list[str]) -> int:
    """Print the devices (as JSON with ``--json``); the exit status tells whether one is usable."""
    report = probe()
    if "--json" in arguments:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    else:
        for device in report.devices:
            verdict = "usable" if device.partially_bound else "lacks descriptorBindingPartiallyBound"
            sys.stdout.write(
                f"{device.name} [{device.kind}], {device.driver}, Vulkan {device.api_version}: {verdict}\n"
            )
        if report.detail:
            sys.stdout.write(report.detail + "\n")
    return report.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
