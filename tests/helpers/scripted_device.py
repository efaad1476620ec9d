"""A device by which a person who is a script corrects a policy: in the first five of every ten steps."""

from pathlib import Path

import numpy as np


class Device:
    def __init__(self, action_dim, control_dir):
        self.action_dim = action_dim
        self.control_dir = Path(control_dir)
        self.control_dir.mkdir(exist_ok=True)
        self.steps = 0

    def read(self):
        self.steps += 1
        return np.full(self.action_dim, 0.5, np.float32) if self.steps % 10 in range(1, 6) else None

    def close(self):
        (self.control_dir / "closed").write_text(str(self.steps))


def no_device(action_dim, control_dir):
    return None
