"""Plays a chunk where /dev/shm is full: ``python full_shm.py CASE``, in a mount namespace of its own."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from env_cases import CASES, started
from test_fault_matrix import SEEDS, TASKS, actions, make_pool

free = shutil.disk_usage("/dev/shm").free
with started(make_pool(CASES[sys.argv[1]], Path(tempfile.mkdtemp()))) as pool:
    pool.reset(SEEDS, TASKS)
    step = pool.step(actions(pool))
    assert step.valid.all() and np.isfinite(step.reward).all() and step.observation.images.any()
print(f"{free} bytes free, played {int(step.valid.sum())} steps")
