"""Robots in processes of their own, and the loop of collector and trainer around a simulated one.

EMBODRL_LEROBOT_PYTHON names an interpreter that has lerobot.
"""

import json
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import runs
from expect import raises_code
from test_join_runs import free_port, started, until

from embodrl.config.schema.real_time import RealTimeConfig
from embodrl.data.load import load_demos
from embodrl.envs.pool.pool import EnvPool
from embodrl.store.collect import METRICS_FILE
from embodrl.store.store import Store

HERE = str(Path(__file__).parent)
LEROBOT = os.environ.get("EMBODRL_LEROBOT_PYTHON")
CAMERA = {"name": "front", "height": 6, "width": 8, "fov_rad": None, "eye": None, "target": None}


def robot_pool(robot, python=None, tmp_path=None, **settings):
    kwargs = {
        "tasks": ["lift"],
        "robot": robot,
        "robot_settings": {"start": 12.0},
        "action_low": [-100.0, -100.0, 0.0],
        "action_high": [100.0, 100.0, 100.0],
        "cameras": [CAMERA],
        "instruction": "lift it",
        "success_fn": "stub_arm:is_there",
        "auto_reset": False,
        **settings,
    }
    real_time = RealTimeConfig(control_hz=50.0, safety={"max_step": (15.0,)}).model_dump(mode="json")
    environ = {"PYTHONPATH": HERE} | ({} if tmp_path is None else {"HF_HOME": str(tmp_path)})
    options = {"python": python, "real_time": real_time, "environ": environ}
    return EnvPool.create("robot", kwargs, total_num_envs=1, num_processes=1, **options)


def drive(pool):
    """Move the first joint by 15, as far as it may go at once, to 27, and then to where the task is solved."""
    first = np.zeros(1, np.int64)
    with pool:
        assert pool.spec.control_hz == 50 and pool.spec.state_dim == 3
        seen = pool.reset(first, first.astype(np.int32), first)
        assert seen.state[0].tolist() == [12, 12, 12] and (seen.images == 12).all()
        action = np.array([[[1.0, 0.12, -0.76]]], np.float32)
        step = pool.step(action)
        np.testing.assert_allclose(step.observation.state, [[27, 12, 12]], rtol=1e-5)
        assert (step.observation.images == 27).all() and not step.done[0]
        step = pool.step(action)
        assert step.success[0] and step.terminated[0, 0]
        [status] = pool.call("status")
        assert status["limited_step"] == 2 and status["periods"] == 1


def test_an_object_with_the_methods_of_a_robot_is_driven_in_its_process():
    drive(robot_pool("stub_arm:Arm"))


@pytest.mark.skipif(not LEROBOT, reason="EMBODRL_LEROBOT_PYTHON names no interpreter with lerobot")
def test_a_robot_registered_with_lerobot_is_driven_in_its_interpreter(tmp_path):
    drive(robot_pool("stub_arm", LEROBOT, tmp_path, robot_module="stub_arm"))
    with raises_code("robot-settings"), robot_pool("stub_amr", LEROBOT, tmp_path):
        pass


CONFIG = """
presets: {env: robot_sim, model: mlp, experiment: human_in_the_loop}
env: {state: full, max_episode_steps: 10, pin_cpus: false, real_time: {speed: 20}}
model: {gaussian: {initial_std: 0.1}}
sft: {max_steps: 16, batch_size: 16}
runner: {logger: {tensorboard: false}}
store: {intervention: expert, steps_per_episode: 1.0, publish_interval: 4, poll_s: 0.2}
"""


TASK = ("model=mlp", "env.state=full", "env.pin_cpus=false")
LEARNING = (*TASK, "env.eval.num_episodes=2", "env.video.enabled=false", "runner.logger.tensorboard=false")


@pytest.mark.slow
@pytest.mark.long
def test_critics_learn_from_a_person_who_corrects_a_robot(tmp_path):
    demos, controls = tmp_path / "demos", tmp_path / "controls"
    few = ("env.num_processes=1", "env.train.total_num_envs=4", "collect.num_episodes=4")
    outcome = runs.embodrl("collect", "env=toy", *TASK, *few, f"collect.output_dir={demos}")
    assert outcome.code == 0, outcome.stderr
    algorithm = (
        *("algorithm=hil_serl", f"algorithm.off_policy.demos={demos}", "algorithm.off_policy.warm_up=10"),
        *("algorithm.off_policy.intervention_device=scripted_device:Device", "runner.max_iterations=1"),
        *("env.train.max_steps_per_rollout_epoch=20", "env.real_time.speed=50"),
        *(f"env.real_time.control_dir={controls}", "env.reset_timeout_s=3600", "env.step_timeout_s=3600"),
    )
    run = tmp_path / "run"
    outcome = runs.embodrl("train", "env=robot_sim", *LEARNING, *algorithm, f"runner.output_dir={run}")
    assert outcome.code == 0, outcome.stderr
    row = runs.metrics(run)[-1]
    recorded = len(load_demos(demos).episode)
    assert row["replay/expert_share"] == 0.5 and row["replay/demos"] == recorded + 10
    assert (controls / "closed").read_text() == "20"


BUCKET = "bucket_00000.safetensors"
BY_REWARD = """
presets: {env: robot_sim, model: mlp, algorithm: hil_serl}
env:
  tasks: [reach-red]
  state: full
  pin_cpus: false
  max_episode_steps: 10
  real_time: {speed: 50}
  train: {max_steps_per_rollout_epoch: 20}
algorithm: {off_policy: {warm_up: 20}}
actor: {global_batch_size: 32, micro_batch_size: 32}
cluster: {num_threads: 1}
collect: {num_episodes: 40000}
runner:
  max_iterations: 1000
  eval_interval: 0
  eval_at_start: false
  save_interval: 1
  logger: {tensorboard: false, console: plain}
store: {intervention: expert, episodes_per_shard: 1, poll_s: 0.2}
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cloud", [False, True])
def test_a_run_learns_by_reward_from_a_robot_that_an_expert_corrects(tmp_path, cloud):
    """With ``cloud`` a server acts, and the robot and who corrects it are elsewhere."""
    pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
    config, demos, store = tmp_path / "config.yaml", tmp_path / "demos", Store(str(tmp_path / "store"))
    config.write_text(BY_REWARD)
    few = ("env.num_processes=1", "env.train.total_num_envs=4", "collect.num_episodes=4", "env.tasks=[reach-red]")
    outcome = runs.embodrl("collect", "env=toy", *TASK, *few, f"collect.output_dir={demos}")
    assert outcome.code == 0, outcome.stderr
    common = ("--config", config, f"store.url={store.url}")
    own = (f"runner.output_dir={tmp_path / 'run'}", f"algorithm.off_policy.demos={demos}")
    metrics, port = tmp_path / "spool" / "collector-0" / METRICS_FILE, free_port()

    def versions() -> set[int]:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return {json.loads(line)["collect/policy_version"] for line in lines if line.endswith("}")}

    with ExitStack() as closing:
        store.create()
        trainer = closing.enter_context(started(tmp_path, "train", *common, *own))
        until(lambda: store.names("weights") == ["weights/v000000"], trainer)
        store.get("weights/v000000", tmp_path / "first")
        collect = ("store", "collect", *common, f"store.spool_dir={tmp_path / 'spool'}")
        if cloud:
            serve = ("serve", "--config", config, "protocol=http", f"serve.port={port}", "serve.token=none")
            closing.enter_context(started(tmp_path, *serve, "model.random_weights=true"))
            collect += ("rollout.backend=remote", f"rollout.remote.urls=[http://127.0.0.1:{port}]")
        collector = closing.enter_context(started(tmp_path, *collect))
        until(lambda: max(versions(), default=0) > 2, trainer, collector)
        for process in (trainer, collector):
            process.terminate()
            assert process.wait() == 143
    rows = runs.metrics(tmp_path / "run")[1:]
    assert rows[-1]["replay/demos"] > rows[0]["replay/demos"] > len(load_demos(demos).episode), "corrections count"
    assert all(row["rollout/return"] > 0 for row in rows) and "train/critic_loss" in rows[-1]
    store.get(store.names("weights")[-1], tmp_path / "last")
    files = [
        {path.name: path.read_bytes() for path in tmp_path.glob(f"{at}/*.safetensors")} for at in ("first", "last")
    ]
    assert files[0] and files[0].keys() == files[1].keys() and files[0] != files[1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_learns_from_a_robot_and_never_drives_it(tmp_path, monkeypatch):
    (tmp_path / "arms.py").write_text("import stub_arm\n\ndef arm(**settings):\n    return stub_arm.Arm()\n")
    for folder in (HERE, str(tmp_path)):
        monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
    config, store = tmp_path / "config.yaml", Store(str(tmp_path / "store"))
    content = BY_REWARD.replace("robot_sim", "robot").replace("hil_serl", "sac").replace("1000", "2")
    for old, new in (("reach-red", "lift"), ("full", "proprio"), ("intervention: expert, ", ""), ("speed: 50", "")):
        content = content.replace(old, new)
    config.write_text(content)
    arm = (
        *("env.robot=arms:arm", "env.success_fn=stub_arm:is_there"),
        *("env.action_low=[0,-100,0]", "env.action_high=[100,100,100]", "env.instruction=go"),
        *("env.real_time.control_hz=50", "model.action_dim=3", f"store.url={store.url}"),
        *("env.real_time.wait_for_person=false", "env.real_time.control_dir=null"),
    )
    with ExitStack() as closing:
        store.create()
        run = ("train", "--config", config, *arm, f"runner.output_dir={tmp_path / 'run'}")
        trainer = closing.enter_context(started(tmp_path, *run))
        until(lambda: bool(store.names("weights")), trainer)
        collect = ("store", "collect", "--config", config, *arm, f"store.spool_dir={tmp_path / 'spool'}")
        collector = closing.enter_context(started(tmp_path, *collect))
        assert trainer.wait() == 0, (tmp_path / "train.log").read_text()
        assert collector.wait() == 0, (tmp_path / "store.log").read_text()
    rows = runs.metrics(tmp_path / "run")
    assert rows[-1]["iteration"] == 2 and not any(name.startswith("eval/") for row in rows for name in row)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_episode_is_lost_when_actor_and_learner_are_killed(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
    from test_store_runs import Role, assert_each_attempt_counts_once

    from embodrl.storage.checkpoint import CheckpointManager
    from embodrl.store.shards import EPISODES

    (tmp_path / "config.yaml").write_text(CONFIG)
    store, moments = Store(str(tmp_path / "store")), random.Random(time.time_ns())
    store.create()
    roles = [Role(name, tmp_path, str(tmp_path / "store")) for name in ("train", "collect")]
    try:
        for role, begun in zip(roles, ("weights", EPISODES), strict=True):
            while not store.names(begun):
                assert role.process.poll() is None, Path(role.log.name).read_text()
                time.sleep(0.1)
            time.sleep(moments.uniform(0, 3))
            role.restart()
        for role in roles:
            assert role.process.wait(900) == 0, Path(role.log.name).read_text()
    finally:
        for role in roles:
            role.process.kill()
            role.process.wait()
            role.log.close()
    marks = {name: store.mark(name) for name in store.names(EPISODES)}
    assert_each_attempt_counts_once(marks)
    checkpoint, _ = CheckpointManager(tmp_path / "out", 1).latest_good()
    read = checkpoint.state.fields("data_rng").fields("store").texts("shards")
    assert len(set(read)) == len(read) >= 16 and set(read) <= set(marks)
    [metrics] = tmp_path.glob(f"spool/*/{METRICS_FILE}")
    text = metrics.read_text()
    assert '"control/missed_deadlines"' in text and '"collect/interventions"' in text
