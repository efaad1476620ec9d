"""What the toy's tasks are called in words. Imports nothing, so that a configuration can be checked in no time."""

INSTRUCTIONS = {
    "reach-red": "move the white dot to the red square",
    "reach-green": "move the white dot to the green square",
}
