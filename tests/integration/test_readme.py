"""The Python of README.md runs as it is written, at the smallest size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import script

README = Path(__file__).parents[2] / "README.md"
SMALL = """
import embodrl

train = embodrl.train
small = [
    "env.max_episode_steps=4", "env.cameras=[{height: 16, width: 16}]", "env.pin_cpus=false", "env.num_processes=1",
    "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=4", "env.eval.num_episodes=4",
    "model.num_action_chunks=1", "actor.global_batch_size=4", "actor.micro_batch_size=4",
    "runner.output_dir=DIRECTORY",
]
embodrl.train = lambda arguments: train([*arguments, *small])
"""


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = (SMALL.replace("DIRECTORY", str(tmp_path / "run")) + block).splitlines()
    path = tmp_path / "readme.py"
    # Simulators start by importing the main module, so that its work stands behind a condition.
    path.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in lines))
    outcome = script(path)
    assert re.search(r"\d+%, report: .*\.html$", outcome.stdout.strip()), outcome.stdout
