"""Image preparation of uint8 batches in torch, equal to Pillow's on any device.

Shapes: B images, H x W pixels.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

_PRECISION_BITS = 22
_BICUBIC_A = -0.5


def resize_bicubic(images: Tensor, height: int, width: int) -> Tensor:
    """Resize ``uint8[B,H,W,3]`` to ``uint8[B,height,width,3]`` like ``PIL.Image.resize(..., BICUBIC)``.

    Pillow filters along the width, rounds to 8 bits, then along the height, with fixed-point coefficients; here the
    same integers go through float64 matrix products, which are exact at that size. (Newer Pillow versions filter the
    height first if it shrinks more; such upright images may differ by rounding.) Images of the target size are returned
    as is.
    """
    return _resize(images, height, width, _BICUBIC)


def resize_bilinear(images: Tensor, height: int, width: int) -> Tensor:
    """Resize like ``resize_bicubic``, with Pillow's BILINEAR filter."""
    return _resize(images, height, width, _BILINEAR)


def resize_area(images: Tensor, height: int, width: int) -> Tensor:
    """Resize ``uint8[B,H,W,3]`` to ``uint8[B,height,width,3]`` like ``cv2.resize(..., INTER_AREA)``, within 1 level.

    Along a shrinking side a pixel is the mean of the area it covers; along a growing side OpenCV interpolates linearly,
    from positions that also depend on areas.
    """
    if tuple(images.shape[1:3]) == (height, width):
        return images
    shrinks = images.shape[1] >= height and images.shape[2] >= width
    rows, columns = (
        _area_matrix(size, target, shrinks).to(images.device)
        for size, target in ((images.shape[1], height), (images.shape[2], width))
    )
    total = torch.einsum("yh,bhwc,xw->byxc", rows, images.float(), columns)
    return total.round().clamp(0, 255).to(torch.uint8).contiguous()


def center_crop(images: Tensor, side: int, rounds_down: bool) -> Tensor:
    """Cut the central ``uint8[B,side,side,3]``; an odd margin rounds down, or to the nearest even offset."""
    spare = images.shape[1] - side, images.shape[2] - side
    top, left = (size // 2 if rounds_down else round(size / 2.0) for size in spare)
    return images[:, top : top + side, left : left + side]


def pad_to_square(images: Tensor) -> Tensor:
    """Pad ``uint8[B,H,W,3]`` to a centred black square, with the thinner bar above or left."""
    height, width = images.shape[1:3]
    side = max(height, width)
    padded = images.new_zeros(len(images), side, side, 3)
    top = (side - height) // 2
    left = (side - width) // 2
    padded[:, top : top + height, left : left + width] = images
    return padded


def resize_lanczos(images: Tensor, height: int, width: int) -> Tensor:
    """Resize like ``resize_bicubic``, with Pillow's LANCZOS filter (three lobes)."""
    return _resize(images, height, width, _LANCZOS)


def jpeg_round_trip(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``uint8[N,H,W,3]`` after JPEG compression at quality 95 with halved chroma resolution.

    These are tf.io.encode_jpeg's defaults, but Pillow decodes with a more exact cosine transform than TensorFlow:
    single values differ by a few levels.
    """
    from PIL import Image

    decoded: list[NDArray[np.uint8]] = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
        decoded.append(np.asarray(Image.open(file), dtype=np.uint8))
    return np.stack(decoded)


def crop_side_and_resize(images: Tensor, height: int, width: int, side: float) -> Tensor:
    """Cut the central ``side`` fraction of each side of ``uint8[B,H,W,3]`` and resize to ``uint8[B,height,width,3]``.

    Like GR00T N1.5's data configurations with torchvision: CenterCrop to whole pixels rounded down, antialiased
    bilinear filter in float32, fractions of a grey level truncated.
    """
    rows, columns = (int(size * side) for size in images.shape[1:3])
    top = round((images.shape[1] - rows) / 2.0)
    left = round((images.shape[2] - columns) / 2.0)
    cut = images[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2).float() / 255.0
    resized = F.interpolate(cut, (height, width), mode="bilinear", antialias=True, align_corners=False)
    return (resized * 255.0).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def resize_with_pad(images: Tensor, height: int, width: int, antialias: bool = True) -> Tensor:
    """Resize ``uint8[B,H,W,3]`` to ``uint8[B,height,width,3]``, keeping the aspect ratio, with black bars.

    Like openpi: Pillow's bilinear filter, sides rounded down, image centred and, where bars can't be equal, the thinner
    one above or left. Without ``antialias`` like lerobot: torch's bilinear interpolation of the nearest pixels, here
    rounded to whole levels.
    """
    top, left, bottom, right = picture_box(images.shape[1], images.shape[2], height, width)
    resized = (_resize if antialias else _interpolate)(images, bottom - top, right - left, _BILINEAR)
    if resized.shape[1:3] == (height, width):
        return resized
    padded = images.new_zeros(len(images), height, width, 3)
    padded[:, top:bottom, left:right] = resized
    return padded


def picture_box(rows: int, columns: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of a ``rows x columns`` image after ``resize_with_pad``."""
    ratio = max(columns / width, rows / height)
    inner_height = int(rows / ratio)
    inner_width = int(columns / ratio)
    top = (height - inner_height) // 2
    left = (width - inner_width) // 2
    return top, left, top + inner_height, left + inner_width


def center_crop_area(images: Tensor, area: float = 0.9) -> Tensor:
    """Cut the central ``area`` of ``uint8[B,H,W,3]`` and enlarge it bilinearly to the original size.

    This is the inference counterpart of training with random crops of that area. Crop corners map to image corners, as
    in ``tf.image.crop_and_resize``.
    """
    batch, height, width, _ = images.shape
    scale = math.sqrt(area)
    pixels = images.permute(0, 3, 1, 2).float() / 255.0
    theta = torch.tensor([[scale, 0.0, 0.0], [0.0, scale, 0.0]], device=images.device).expand(batch, 2, 3)
    grid = F.affine_grid(theta, [batch, 3, height, width], align_corners=True)
    cropped = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=True)
    return (cropped * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return ``(images / 255 - mean) / std`` as ``float32[B,3,H,W]``; images ``uint8[B,H,W,3]``, the others ``[3]``."""
    return ((images.float() / 255.0 - mean) / std).permute(0, 3, 1, 2).contiguous()


def _resize(images: Tensor, height: int, width: int, kernel: Kernel) -> Tensor:
    if images.dtype != torch.uint8:
        raise TypeError(f"images are {images.dtype}, not uint8")
    if images.shape[2] != width:
        images = _filter(images.transpose(2, 3), _matrix(images.shape[2], width, kernel)).transpose(2, 3)
    if images.shape[1] != height:
        images = _filter(images.permute(0, 2, 3, 1), _matrix(images.shape[1], height, kernel)).permute(0, 3, 1, 2)
    return images.contiguous()


def _interpolate(images: Tensor, height: int, width: int, _: Kernel) -> Tensor:
    pixels = images.permute(0, 3, 1, 2).float()
    pixels = F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _filter(images: Tensor, matrix: Tensor) -> Tensor:
    """Apply an integer matrix to the last axis, in fixed point."""
    total = images.to(torch.float64) @ matrix.to(images.device).T
    half = float(1 << (_PRECISION_BITS - 1))
    return ((total + half) / float(1 << _PRECISION_BITS)).floor().clamp(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=16)
def _matrix(size: int, target: int, kernel: Kernel) -> Tensor:
    """Return the integer-valued filter ``float64[target,size]``, in units of 2**-22."""
    scale = size / target
    stretch = max(scale, 1.0)
    support = kernel.support * stretch
    matrix = np.zeros((target, size))
    for row in range(target):
        center = (row + 0.5) * scale
        first = max(int(center - support + 0.5), 0)
        last = min(int(center + support + 0.5), size)
        weights = kernel.weight((np.arange(first, last, dtype=np.float64) - center + 0.5) / stretch)
        scaled = weights / weights.sum() * (1 << _PRECISION_BITS)
        matrix[row, first:last] = np.trunc(scaled + np.copysign(0.5, scaled))
    return torch.from_numpy(matrix)


@functools.lru_cache(maxsize=16)
def _area_matrix(size: int, target: int, shrinks: bool) -> Tensor:
    """Return OpenCV's INTER_AREA filter ``float32[target,size]``."""
    scale = size / target
    matrix = np.zeros((target, size))
    for row in range(target):
        if shrinks:
            edges = np.clip(np.arange(size + 1), row * scale, (row + 1) * scale)
            matrix[row] = np.diff(edges) / scale
            continue
        first = math.floor(row * scale)
        part = (row + 1) - (first + 1) / scale
        part = 0.0 if part <= 0.0 else part - math.floor(part)
        matrix[row, first] += 1.0 - part
        matrix[row, min(first + 1, size - 1)] += part
    return torch.from_numpy(matrix).float()


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic convolution kernel with a = -1/2 (Keys, 1981)."""
    x = np.abs(x)
    a = _BICUBIC_A
    inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    outer = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, inner, np.where(x < 2.0, outer, 0.0))


def _bilinear(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Triangle of unit half-width."""
    return np.maximum(1.0 - np.abs(x), 0.0)


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sinc windowed by the central lobe of a sinc three times as wide."""
    return np.where(np.abs(x) < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


@dataclass(frozen=True)
class Kernel:
    """A resampling filter: weight by distance, and support, in input pixels."""

    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    support: float


_BICUBIC = Kernel(_bicubic, 2.0)
_BILINEAR = Kernel(_bilinear, 1.0)
_LANCZOS = Kernel(_lanczos, 3.0)
