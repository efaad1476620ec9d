"""Comparison of a family's network with outputs recorded from its public reference implementation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from embodrl.errors import CheckpointError

LOGITS_TOLERANCE = 1e-5
CHAIN_TOLERANCE = 5e-5
ACTION_TOLERANCE = 1e-6
INPUTS_FILE = "io.safetensors"


@dataclass(frozen=True)
class Comparison:
    """One output beside the reference's.

    Attributes:
        name: of the output.
        max_error: largest absolute difference; infinite where shapes differ or a value is not finite.
        tolerance: allowed; 0 for token ids.
    """

    name: str
    max_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance


def compare(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> Comparison:
    """Compare an output with the reference's."""
    if found.shape != wanted.shape:
        return Comparison(name, float("inf"), tolerance)
    error = (found.detach().double().cpu() - wanted.double()).abs().max()
    return Comparison(name, float(error) if bool(error.isfinite()) else float("inf"), tolerance)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: no such file, or a corrupt one.
    """
    try:
        with safe_open(path, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "give the folder of a parity fixture") from error
