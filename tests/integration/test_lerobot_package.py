"""Our datasets opened by the package lerobot, and the other way round.

EMBODRL_LEROBOT_PYTHON names an interpreter that has it.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("imageio_ffmpeg")

from embodrl.data.demos import DemoEpisode
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.load import load_demos

PYTHON = os.environ.get("EMBODRL_LEROBOT_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="EMBODRL_LEROBOT_PYTHON names no interpreter with lerobot"),
]
LENGTHS = (4, 1, 6)


def lerobot(verb: str, directory: Path, output: Path) -> dict[str, np.ndarray]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output.parent / "hf")}
    command = [str(PYTHON), str(Path(__file__).with_name("lerobot_check.py")), verb, str(directory), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(output))


def test_lerobot_reads_what_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.data.lerobot.DATA_FILE_MB", 2e-4)  # the second file begins with the last episode
    rng = np.random.default_rng(0)
    writer = LeRobotWriter(tmp_path / "data", ("front", "wrist"), 20)
    episodes = [
        DemoEpisode(
            images=rng.integers(0, 256, (length, 2, 18, 22, 3), dtype=np.uint8),
            state=rng.normal(size=(length, 5)).astype(np.float32),
            actions=rng.normal(size=(length, 3)).astype(np.float32),
            instruction=f"do {number % 2}",
            task="t",
            seed=number,
            success=True,
        )
        for number, length in enumerate(LENGTHS)
    ]
    for episode in episodes:
        writer.add(episode)
    writer.close({})
    assert (tmp_path / "data/data/chunk-000/file-001.parquet").is_file()

    found = lerobot("read", tmp_path / "data", tmp_path / "found.npz")
    images, actions = np.concatenate([e.images for e in episodes]), np.concatenate([e.actions for e in episodes])
    for view, name in enumerate(("front", "wrist")):
        pictures = np.round(found[f"observation.images.{name}"] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(pictures, images[:, view])
    np.testing.assert_array_equal(found["action"], actions)
    np.testing.assert_array_equal(found["observation.state"], np.concatenate([e.state for e in episodes]))
    assert found["task"].tolist() == ["do 0"] * 4 + ["do 1"] + ["do 0"] * 6
    np.testing.assert_array_equal(found["episode_index"], np.repeat([0, 1, 2], LENGTHS))
    np.testing.assert_array_equal(found["index"], np.arange(11))
    np.testing.assert_allclose(found["stats/action/mean"], actions.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["stats/action/q99"], np.quantile(actions.astype(float), 0.99, axis=0))
    assert found["stats/observation.images.front/std"].shape == (3, 1, 1)
    # Chunks of actions, cut at the end of an episode, are where our own reader finds them.
    demos = load_demos(tmp_path / "data")
    chunks, inside = demos.action_chunks(np.arange(11), 3)
    np.testing.assert_array_equal(found["chunks"], chunks)
    np.testing.assert_array_equal(found["is_pad"], ~inside)


def test_we_read_what_lerobot_writes(tmp_path: Path) -> None:
    made = lerobot("write", tmp_path / "data", tmp_path / "made.npz")
    demos = load_demos(tmp_path / "data")
    np.testing.assert_array_equal(demos.images[:, 0], made["pictures"])
    np.testing.assert_array_equal(demos.state, made["states"])
    np.testing.assert_array_equal(demos.actions, made["actions"])
    assert demos.instruction_table == ["task 0", "task 1"]
