"""Language instructions and perturbations of the toy's tasks. Imports nothing heavy."""

from __future__ import annotations

from embodrl.envs.axes import COMMON
from embodrl.specs import Axis

INSTRUCTIONS = {
    "reach-red": "move the white dot to the red square",
    "reach-green": "move the white dot to the green square",
}
AXES = {
    "light": Axis("vision", "the image at 30 to 70 % of its brightness"),
    "texture": Axis("vision", "a chequered board of a random colour"),
    **COMMON,
    "colours": Axis("semantics", "red, green and blue swapped on the squares and in the instruction"),
    "distractors": Axis("semantics", "three small squares of other colours"),
    "objects": Axis("execution", "the dot begins at the left or right edge"),
    "goal": Axis("execution", "both squares move, by up to 0.02 of the board's half width per step"),
}
