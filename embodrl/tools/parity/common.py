"""Comparison of a family's network with recorded outputs of its public reference implementation.

Dimensions of a recorded network follow from the shapes of its tensors. Values that shapes leave open (heads, denoising
steps, the dataset whose statistics were used) are in the section ``embodrl`` of the fixture's config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hybrid_engines.training.precision import Precision, autocast
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.flow.flow import Times, Velocity, denoising_times, integrate
from embodrl.processor import processor
from embodrl.storage.tensor_files import open_tensors

LOGITS_TOLERANCE = 1e-5
CHAIN_TOLERANCE = 1e-5
ACTION_TOLERANCE = 1e-6
CUDA_FACTOR = 10.0
"""Factor on tolerances in float32 on a GPU, which sums in another order."""
BF16_RELATIVE = 0.05
"""Tolerance under bfloat16 autocast, relative to the largest value of the reference's output."""
INPUTS_FILE = "io.safetensors"
CPU = torch.device("cpu")

Setting = TypeVar("Setting", int, str, bool)


@dataclass(frozen=True)
class Comparison:
    """One output compared with the reference's.

    Attributes:
        max_error: largest absolute difference; infinite if shapes differ or a value is not finite.
        tolerance: allowed difference; 0 for token ids, infinite if the precision allows anything.
        scale: largest absolute value of the reference's output.
        chosen: the output is token ids chosen by the network, or follows from them; rounding can flip such a choice.
    """

    name: str
    max_error: float
    tolerance: float
    scale: float = 0.0
    chosen: bool = False

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance


def compare(name: str, found: Tensor, wanted: Tensor, tolerance: float, chosen: bool = False) -> Comparison:
    """Compare an output with the reference's; see ``Comparison``."""
    wanted = wanted.double().cpu()
    scale = float(wanted.abs().max())
    if found.shape != wanted.shape:
        return Comparison(name, float("inf"), tolerance, scale, chosen)
    error = (found.detach().double().cpu() - wanted).abs().max()
    return Comparison(name, float(error) if bool(error.isfinite()) else float("inf"), tolerance, scale, chosen)


@dataclass(frozen=True)
class Arithmetic:
    """Device and precision of the networks, and the resulting tolerances.

    Attributes:
        device: device of the networks.
        precision: precision of the forward pass; ``bf16`` is autocast, as in training.
    """

    device: torch.device = CPU
    precision: Precision = "fp32"

    @property
    def name(self) -> str:
        """Vendor's name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(processor())

    def run(self, compare_family: Callable[..., list[Comparison]], directory: Path) -> list[Comparison]:
        """Return the comparisons of a fixture, with the tolerances of this arithmetic.

        ``compare_family`` takes the fixture's directory and, unless it is the CPU, the device.

        Raises:
            CheckpointError: see the family's function.
        """
        where = {} if self.device == CPU else {"device": self.device}
        with autocast(self.precision, self.device):
            found = compare_family(directory, **where)
        return [replace(comparison, tolerance=self._tolerance(comparison)) for comparison in found]

    def _tolerance(self, comparison: Comparison) -> float:
        if self.precision == "bf16":
            return math.inf if comparison.chosen else max(comparison.tolerance, BF16_RELATIVE * comparison.scale)
        return comparison.tolerance * (CUDA_FACTOR if self.device.type == "cuda" else 1.0)


def arithmetic(device: str, precision: Precision) -> Arithmetic:
    """Return the arithmetic of a kind of device; on a GPU, this process then uses real float32 instead of TF32.

    Raises:
        EmbodrlError: torch sees no GPU.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise EmbodrlError("--device is cuda, and torch sees no GPU", "leave it out", code="gpu-missing")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return Arithmetic(torch.device(device), precision)


@torch.no_grad()
def compare_flow(
    velocity: Velocity,
    noise: Tensor,
    actions: Tensor,
    tau: Tensor,
    num_steps: int,
    sampled: Tensor,
    losses: Tensor,
    times: Times = denoising_times,
) -> list[Comparison]:
    """Compare denoised actions and the elementwise loss of a flow network with a recording.

    ``sampled`` was denoised from ``noise [B,H,D]`` in ``num_steps``; ``losses`` belong to ``actions [B,H,D]`` at the
    noise levels ``tau [B]``. See ``integrate`` for ``times``.
    """
    level = tau[:, None, None]
    x = level * noise + (1.0 - level) * actions
    return [
        compare("actions", integrate(velocity, noise, num_steps, times), sampled, CHAIN_TOLERANCE),
        compare("loss", (velocity(x, tau)[0] - (noise - actions)).square(), losses, LOGITS_TOLERANCE),
    ]


def read_tensors(path: Path, device: torch.device = CPU) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on a device.

    Raises:
        CheckpointError: the file is missing or corrupt.
    """
    try:
        with open_tensors(path) as reader:
            return {name: reader.get_tensor(name).to(device) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: {error}", "give the folder of a parity fixture", code="parity-recording"
        ) from error


def read_settings(directory: Path, defaults: Mapping[str, Setting], others: Collection[str] = ()) -> dict[str, Setting]:
    """Return the section ``embodrl`` of a fixture's config.json, completed by defaults.

    Args:
        directory: fixture; config.json may be missing.
        defaults: known settings with their defaults.
        others: keys of that section that are read elsewhere.

    Raises:
        CheckpointError: an unknown setting, or a value of another type than the default's or below 1.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        return dict(defaults)
    section = read_file(path).fields(OWN_SECTION, {})
    found = dict(defaults)
    for name, value in section.content.items():
        if name in others:
            continue
        if name not in defaults:
            section.refuse(f"unknown setting '{name}'; known: {', '.join(defaults)}")
        wanted = type(defaults[name])
        if (
            not isinstance(value, wanted)
            or isinstance(value, bool) != (wanted is bool)
            or (isinstance(value, int) and wanted is int and value < 1)
        ):
            section.refuse(f"'{name}' is {value!r}, not a valid {wanted.__name__}")
        found[name] = value
    return found


def count_layers(names: Collection[str], prefix: str) -> int:
    """Return the number of layers, from tensor names ``PREFIX0...``, ``PREFIX1...``."""
    return 1 + max((int(name[len(prefix) :].split(".")[0]) for name in names if name.startswith(prefix)), default=-1)


def head_dimension(width: int, num_heads: int, setting: str) -> int:
    """Return the width of one attention head.

    Raises:
        CheckpointError: the heads do not divide the width; names the setting.
    """
    if width % num_heads:
        raise CheckpointError(
            f"{num_heads} attention heads do not divide the width {width}",
            f"set {OWN_SECTION}.{setting} in the fixture's {CONFIG_FILE}",
            code="parity-recording",
        )
    return width // num_heads
