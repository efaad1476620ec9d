"""Perturbation axes of `embodrl eval axes=...` and their code shared by all simulators.

Draws depend only on the name of the axis and the seed of the episode, so that two policies meet the same perturbed
episodes. Vision, semantics and execution are the groups of Liu et al. 2025 (arXiv 2505.19789).
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from embodrl.specs import Axis

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOISE_STD = 25.0
"""Of 255, per pixel."""
COMMON = {
    "noise": Axis("vision", f"Gaussian noise with a standard deviation of {NOISE_STD:g} of 255 on every pixel"),
    "instruction": Axis("semantics", "the same instruction in other words"),
}
"""Axes implemented by the shared stepping (``SteppingEnv``)."""
COLOURS = ("red", "green", "blue")

_PREFIXES = ("please ", "could you ", "your task is to ")
_OTHER_WORDS = {
    **{"pick up": ("grasp", "grab"), "push": ("shove", "slide"), "pull": ("drag", "draw"), "lift": ("raise",)},
    **{"put": ("place", "set"), "place": ("put", "set"), "move": ("bring", "shift"), "stack": ("put",)},
    **{"insert": ("stick", "push"), "hold": ("keep",), "roll": ("send",), "open": ("pull open",), "close": ("shut",)},
    **{"turn on": ("switch on",), "cube": ("block", "box"), "ball": ("sphere",), "peg": ("rod", "stick")},
    **{"tool": ("hook",), "bin": ("container",), "bowl": ("dish",), "square": ("box",), "target": ("marked place",)},
}
_WORDS = re.compile(rf"\b({'|'.join(sorted(_OTHER_WORDS, key=len, reverse=True))})\b")


def generator(axis: str, *numbers: int) -> np.random.Generator:
    """Return the random generator of an axis for an episode: equal for equal seed and extra numbers."""
    import numpy as np

    return np.random.default_rng([zlib.crc32(axis.encode()), *numbers])


def noisy(images: NDArray[np.uint8], seed: int, elapsed: int) -> NDArray[np.uint8]:
    """Add noise to images ``uint8[...]``, different at each step of the episode."""
    import numpy as np

    noise = generator("noise", seed, elapsed).normal(0.0, NOISE_STD, images.shape)
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


def reworded(instruction: str, seed: int) -> str:
    """Rephrase an instruction; always returns a different text."""
    random = generator("instruction", seed)
    text = _WORDS.sub(lambda found: str(random.choice(_OTHER_WORDS[found[0]])), instruction)
    return str(random.choice(_PREFIXES)) + text


def colour_shift(seed: int) -> int:
    """Return by how many channels the colours of an episode are rotated, 1 or 2: red becomes green or blue."""
    return int(generator("colours", seed).integers(1, len(COLOURS)))


def recoloured(instruction: str, seed: int) -> str:
    """Rotate the colours in an instruction like those of the objects."""
    shift = colour_shift(seed)
    other = {name: COLOURS[(index + shift) % len(COLOURS)] for index, name in enumerate(COLOURS)}
    return re.sub(rf"\b({'|'.join(COLOURS)})\b", lambda found: other[found[0]], instruction)
