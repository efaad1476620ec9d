"""`embodrl sft` on data of any robot: settings from the dataset, statistics, and what is refused before training."""

from pathlib import Path

import numpy as np
import pytest
from expect import raises_code
from tiny_families import TINY

from embodrl.config import load_config
from embodrl.config.schema import Config, EnvConfig, SftConfig
from embodrl.data.demos import DemoEpisode
from embodrl.data.imitation import check_robot, load_configured_demos
from embodrl.data.raw import RawWriter
from embodrl.data.statistics import read_statistics
from embodrl.errors import StatisticsMissingError
from embodrl.learners.imitation_policy import check_range, policy_with_statistics
from embodrl.runs.sft import sft

SIZES = {**TINY["pi"], "action_horizon": 5}
SMALL = [f"model.pi.{name}={value}" for name, value in SIZES.items() if name != "siglip"]
SMALL += [f"model.pi.siglip.{name}={value}" for name, value in TINY["pi"]["siglip"].items()]


def write(directory: Path, robot: str | None = "so100", action_dim: int = 6, scale: float = 40.0) -> Path:
    rng = np.random.default_rng(0)
    with RawWriter(directory) as writer:
        for number in range(3):
            actions = (scale * rng.normal(size=(20, action_dim))).astype(np.float32)
            images = rng.integers(0, 256, (20, 1, 12, 16, 3)).astype(np.uint8)
            writer.add(DemoEpisode(images, actions[:, :5], actions, "pick", "pick", number, True))
        writer.close({} if robot is None else {"robot_type": robot})
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "so100")


def loaded(data: Path, *args: str, env: str = "dataset", verb: str = "sft"):
    return load_config([f"env={env}", "model=pi05", f"sft.data_dir={data}", *SMALL, *args], verb=verb)


def test_the_data_set_says_what_the_environment_would(data: Path):
    found = loaded(data, "model.num_action_chunks=3", "model.pi.action_horizon=3")
    config = found.config
    assert [(camera.name, camera.height, camera.width) for camera in config.env.cameras] == [("camera0", 12, 16)]
    assert config.model.action_dim == 6 and config.env.include_state and config.model.warm_start is None
    assert config.env.max_episode_steps % 3 == 0
    assert "sft.data_dir" in str(found.origins["model.action_dim"])
    assert load_configured_demos(config).images.shape == (60, 1, 12, 16, 3)


def test_what_the_user_sets_stays(data: Path):
    config = loaded(data, "env.cameras=[{name: top, height: 8, width: 8}]", "env.include_state=false").config
    assert config.env.cameras[0].height == 8 and not config.env.include_state
    with raises_code("actions-are-those-of-the-data"):
        loaded(data, "model.action_dim=7")


@pytest.mark.parametrize("verb", ["train", "eval", "collect", "plan"])
def test_it_is_no_simulator(data: Path, verb: str):
    with raises_code("there-is-a-simulator"):
        loaded(data, verb=verb)


def test_evaluations_need_a_simulator_and_sft_needs_data(data: Path):
    with raises_code("there-is-a-simulator"):
        loaded(data, "sft.eval_interval=1")
    for env in ("dataset", "toy"):
        with raises_code("dataset-missing") as caught:
            sft(loaded(data / "nothing", f"sft.output_dir={data.parent / 'out'}", env=env))
        assert "does not exist" in caught.value.message and not (data.parent / "out").exists()


def test_a_file_or_a_word_names_statistics(data: Path, tmp_path: Path):
    with raises_code("statistics-exist"):
        loaded(data, "sft.stats=dta")
    with raises_code("statistics-exist"):
        loaded(data, f"model.stats_path={tmp_path / 'nothing.json'}")
    file = tmp_path / "s.json"
    file.write_text("{}")
    with raises_code("statistics-exist"):
        loaded(data, f"model.stats_path={file}", "sft.stats=data")


def test_a_policy_without_weights_gets_those_of_the_data(data: Path, tmp_path: Path):
    config = loaded(data).config
    demos, file = load_configured_demos(config), tmp_path / "statistics.json"
    chosen, policy = policy_with_statistics(config, demos, file, lambda text: None)
    assert chosen.model.stats_path == str(file) and config.model.stats_path is None
    found = read_statistics(file)
    assert (found.name, found.num_frames, found.num_episodes) == ("so100", 60, 3)
    np.testing.assert_allclose(found.action["q01"], np.percentile(demos.actions.astype(np.float64), 1, axis=0))
    np.testing.assert_allclose(found.state["std"], demos.state.astype(np.float64).std(0))
    check_range(policy, demos, config.sft)
    # Given again as a file, by either setting, they are the same.
    for setting in ("sft.stats", "model.stats_path"):
        given = loaded(data, f"{setting}={file.rename(tmp_path / 'given.json')}").config
        policy_with_statistics(given, demos, file, lambda text: None)
        assert read_statistics(file).action == found.action


def test_a_policy_of_other_units_refuses_the_data(data: Path, tmp_path: Path):
    config = loaded(data, "sft.stats=checkpoint").config
    demos = load_configured_demos(config)
    chosen, policy = policy_with_statistics(config, demos, tmp_path / "statistics.json", lambda text: None)
    assert chosen.model.stats_path is None and not (tmp_path / "statistics.json").exists()
    with raises_code("sft-actions-out-of-range") as caught:
        check_range(policy, demos, config.sft)
    assert all(f"of dimension {index}" in caught.value.message for index in range(6))
    check_range(policy, demos, config.sft.model_copy(update={"max_clipped": 1.0}))


def test_a_base_model_learns_a_new_robot(data: Path, tmp_path: Path):
    config = loaded(data).config
    demos = load_configured_demos(config)
    _, base = policy_with_statistics(config, demos, tmp_path / "statistics.json", lambda text: None)
    base.save_pretrained(tmp_path / "base")
    told: list[str] = []
    settings = (f"model.model_path={tmp_path / 'base'}", "model.unnorm_key=my_arm")
    chosen, policy = policy_with_statistics(loaded(data, *settings).config, demos, tmp_path / "s.json", told.append)
    assert chosen.model.stats_path is not None and "my_arm" in told[0]
    policy.save_pretrained(tmp_path / "tuned")
    assert [path.parent.name for path in (tmp_path / "tuned").rglob("norm_stats.json")] == ["my_arm"]
    with pytest.raises(StatisticsMissingError):
        config = loaded(data, *settings, "sft.stats=checkpoint").config
        policy_with_statistics(config, demos, tmp_path / "s.json", told.append)


def config_of(env: str, data: Path, **changes: object) -> Config:
    return Config(env=EnvConfig(env_type=env), sft=SftConfig.model_validate({"data_dir": str(data), **changes}))


@pytest.mark.parametrize(
    ("robot", "env", "refused"),
    [
        ("toy", "maniskill", True),
        ("so100", "toy", True),
        ("toy", "toy", False),
        ("panda", "maniskill", False),
        (None, "maniskill", False),
        ("so100", "dataset", False),
    ],
)
def test_data_of_another_robot_are_refused(tmp_path: Path, robot: str | None, env: str, refused: bool):
    data = write(tmp_path / "data", robot, action_dim=7, scale=0.1)
    if not refused:
        return check_robot(config_of(env, data))
    with raises_code("sft-other-robot"):
        check_robot(config_of(env, data))
    return check_robot(config_of(env, data, check_robot=False))


def test_data_of_another_rate_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from embodrl.data import imitation
    from embodrl.data.facts import DatasetFacts

    config = config_of("toy", tmp_path)
    for fps, refused in ((20.0, False), (19.9, False), (30.0, True)):
        monkeypatch.setattr(imitation, "read_facts", lambda path, keys, fps=fps: DatasetFacts({}, 7, 0, fps, "toy"))
        if refused:
            with raises_code("sft-other-robot"):
                check_robot(config)
        else:
            check_robot(config)
