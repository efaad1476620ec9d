"""Videos that can't be made: refused before the start, or dropped with a warning; never the end of an episode."""

from __future__ import annotations

import logging
import resource
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from expect import raises_code

from embodrl.config import LoadedConfig, load_config
from embodrl.data.video_file import frame_rate, read_video
from embodrl.envs.pool.video import VideoWriter
from embodrl.envs.simulator import Replayed, SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import EpisodeRules
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import MissingDependencyError
from embodrl.runs.collect import frame_rate as frame_rate_of_data
from embodrl.runs.eval_output import EvalDirectory
from embodrl.runs.train import train
from embodrl.workers.env import check_videos

FRAMES = np.random.default_rng(0).integers(0, 255, (6, 64, 64, 3), np.uint8)


def finish(directory: Path, frames: list[np.ndarray]) -> list[str]:
    """Film one episode; return the files that are there afterwards."""
    writer = VideoWriter(fps=10)
    writer.start(0, str(directory / "videos" / "a"))
    for frame in frames:
        writer.add(0, frame)
    writer.finish(0, success=True)
    assert not writer.rows(np.ones(1, np.bool_))
    return [path.name for path in (directory / "videos").iterdir()]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As a disk that gets full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_step_continues_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "imageio.v2", None)
    env = ToyVectorEnv(2, ["reach-red"], image_size=16, max_episode_steps=3, auto_reset=False)
    env.reset(np.arange(2), np.zeros(2, np.int32), np.arange(2))
    env.start_video(0, str(tmp_path / "episode_000"))
    with caplog.at_level(logging.WARNING):
        step = env.chunk_step(np.zeros((2, 3, 7), np.float32), np.ones(2, np.bool_))
    assert step.valid.all() and step.truncated[:, 2].all()
    assert "episode_000_failure.mp4 was dropped: ModuleNotFoundError" in caplog.text
    assert list(tmp_path.iterdir()) == []


class Fast(Simulator):
    """Acts at 80 Hz."""

    action_low, action_high, control_hz = (-1.0,), (1.0,), 80.0

    def reset(self, seed: int) -> None: ...

    def step(self, action: np.ndarray) -> SimStep:
        return SimStep(0.0, False)

    def images(self) -> np.ndarray:
        return np.zeros((1, 16, 16, 3), np.uint8)


class FastEnv(SimulatorVectorEnv):
    def make_simulator(self, task: str) -> Simulator:
        return Replayed(Fast())


@pytest.mark.parametrize(("video_fps", "fps"), [(None, 80), (20, 20)])
def test_videos_and_data_sets_have_the_rate_of_control(tmp_path: Path, video_fps: int | None, fps: int) -> None:
    pytest.importorskip("imageio_ffmpeg")
    camera = {"name": "top", "height": 16, "width": 16}
    env = FastEnv(1, ["task"], [camera], EpisodeRules(max_episode_steps=4), max_chunk=4, video_fps=video_fps)
    assert frame_rate_of_data(config(tmp_path).config, env.spec.control_hz) == 80
    assert frame_rate_of_data(config(tmp_path, "collect.fps=20").config, env.spec.control_hz) == 20
    env.reset(np.zeros(1, np.int64), np.zeros(1, np.int32), np.arange(1))
    env.start_video(0, str(tmp_path / "episode_000"))
    env.chunk_step(np.zeros((1, 4, 1), np.float32), np.ones(1, np.bool_))
    assert frame_rate(tmp_path / "episode_000_failure.mp4") == fps


class Solving(Fast):
    """Solved by the second action for a while, on large black pictures."""

    num_steps = 0

    def step(self, action: np.ndarray) -> SimStep:
        self.num_steps += 1
        return SimStep(0.0, self.num_steps == 2)

    def images(self) -> np.ndarray:
        return np.zeros((1, 128, 128, 3), np.uint8)


class SolvingEnv(SimulatorVectorEnv):
    def make_simulator(self, task: str) -> Simulator:
        return Replayed(Solving())


def test_frames_say_which_step_they_are_and_when_success_came(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    camera = {"name": "top", "height": 128, "width": 128}
    env = SolvingEnv(1, ["task"], [camera], EpisodeRules(max_episode_steps=4, ignore_terminations=True), max_chunk=4)
    env.reset(np.zeros(1, np.int64), np.zeros(1, np.int32), np.arange(1))
    env.start_video(0, str(tmp_path / "a"))
    env.chunk_step(np.zeros((1, 4, 1), np.float32), np.ones(1, np.bool_))
    frames = np.stack(list(read_video(tmp_path / "a_success.mp4"))).astype(int)
    assert len(frames) == 4  # one a step, at the rate of control
    label = frames[:, -14:, :40]
    assert [bool((picture > 180).any()) for picture in label] == [True] * 4
    green = label[..., 1] - label[..., 0] > 60
    assert [bool(picture.mean() > 0.3) for picture in green] == [False, True, True, True]
    assert not np.array_equal(label[2], label[3]) and frames[:, :100].max() < 10
    assert not (FastEnv(1, ["task"], [camera], EpisodeRules()).film(0) > 0).any()  # what policies see has none


def test_a_full_disk_leaves_no_half_video(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("imageio_ffmpeg")
    assert finish(tmp_path / "room", list(FRAMES)) == ["a_success.mp4"]
    size = (tmp_path / "room" / "videos" / "a_success.mp4").stat().st_size
    for limit in (0, 100, size - 100):
        with files_of_at_most(limit):
            assert finish(tmp_path / str(limit), list(FRAMES)) == []
    assert caplog.text.count("a_success.mp4 was dropped") == 3


def test_frames_that_do_not_fit_cost_the_video_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("imageio_ffmpeg")
    assert finish(tmp_path, [FRAMES[0], FRAMES[1][:32]]) == []
    assert "All images in a movie should have same size" in caplog.text


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter without imageio; it has what the toy's process imports."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    packages = next((tmp_path / "bare" / "lib").glob("python3.*")) / "site-packages"
    (packages / "numpy").mkdir()
    (packages / "numpy" / "__init__.py").touch()
    return str(tmp_path / "bare" / "bin" / "python")


def config(tmp_path: Path, *overrides: str) -> LoadedConfig:
    settings = ("env=toy", "model.warm_start=null", "env.video.enabled=true", f"runner.output_dir={tmp_path}/run")
    return load_config([*settings, *overrides])


def test_videos_are_refused_where_the_simulators_can_not_encode_them(tmp_path: Path, python: str) -> None:
    loaded = config(tmp_path, f"env.python={python}")
    with raises_code("missing-dependency", MissingDependencyError, "imageio-ffmpeg", python) as error:
        train(loaded)
    assert f"{python} -m pip install 'imageio[ffmpeg]'" in error.value.hint
    assert "env.video.enabled=false" in error.value.hint
    with raises_code("missing-dependency", MissingDependencyError, python):
        EvalDirectory(loaded.config, tmp_path / "out")
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()
    check_videos(config(tmp_path, f"env.python={python}", "env.video.enabled=false").config)
