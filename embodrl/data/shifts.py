"""Random image shifts, redrawn for every batch.

Kostrikov et al. 2020, "Image Augmentation Is All You Need", arXiv 2004.13649.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from embodrl.errors import EmbodrlError


def shifted_inputs(inputs: dict[str, Tensor], most: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return inputs of a policy with their pictures, ``uint8[B,V,H,W,C]``, shifted; EmbodrlError if there are none."""
    pictures = [name for name, column in inputs.items() if column.dtype == torch.uint8 and column.ndim == 5]
    if not pictures:
        raise EmbodrlError(
            f"algorithm.off_policy.shift_pixels={most}, but the policy's inputs have no pictures: {', '.join(inputs)}",
            "set it to 0",
            code="no-pictures-to-shift",
        )
    return inputs | {name: shifted(inputs[name], most, generator) for name in pictures}


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Shift each picture of each camera on its own; its border is repeated where nothing was seen.

    Args:
        images: ``uint8[B,V,H,W,C]`` on the CPU.
        most: largest shift in pixels, from 1 to below W; every shift within it is equally likely in both directions.
        generator: source of the shifts, on the CPU.
    """
    rows, cameras, height, width, channels = images.shape
    down, right = torch.randint(-most, most + 1, (2, rows, cameras), generator=generator).numpy()
    wide = np.empty((rows, cameras, height, width + 2 * most, channels), np.uint8)
    wide[..., most:-most, :] = images.numpy()
    line = (np.arange(height) + down[..., None]).clip(0, height - 1)
    line += height * np.arange(rows * cameras).reshape(rows, cameras, 1)
    # Whole lines are copied: indexing single pixels takes ten times as long.
    size = width * channels
    starts = (line * (width + 2 * most) + most + right[..., None]) * channels
    lines = np.ndarray((wide.size - size + 1,), f"V{size}", wide, strides=(1,))
    result = lines[starts].view(np.uint8).reshape(images.shape)
    pixels = result.view(f"V{channels}")[..., 0]
    for shift in range(1, most + 1):
        pixels[right == -shift, :, :shift] = pixels[right == -shift, :, shift : shift + 1]
        pixels[right == shift, :, -shift:] = pixels[right == shift, :, -shift - 1 : -shift]
    return torch.from_numpy(result)
