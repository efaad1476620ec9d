"""Images of simulators."""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import NDArray


def resized(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize an image to ``uint8[H,W,3]``; every new pixel is the mean of the area it covers."""
    if picture.shape[:2] == (height, width):
        return picture
    image = import_module("PIL.Image")
    smaller = height <= picture.shape[0] and width <= picture.shape[1]
    how = image.Resampling.BOX if smaller else image.Resampling.BILINEAR
    return np.asarray(image.fromarray(np.ascontiguousarray(picture)).resize((width, height), how))
