"""The public API: names, laziness, and the verbs as functions."""

import ast
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from expect import raises_code
from runs import TINY, TINY_POLICY

import embodrl

ROOT = Path(__file__).parents[2]


def tiny() -> dict[str, object]:
    """Return the smallest run as a mapping."""
    config = yaml.safe_load(TINY)
    config["runner"] |= {"max_iterations": 1, "eval_interval": 0, "logger": {"tensorboard": False, "console": "off"}}
    config["actor"]["optim"]["critic_warmup_iterations"] = 0
    config["extensions"] = []
    config["env"]["num_processes"] = 1
    return config


def test_importing_the_package_is_fast_and_loads_no_torch() -> None:
    code = "import embodrl, sys; embodrl.load_config; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    alone = "import sys; before = set(sys.modules); import embodrl; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", alone], check=True, timeout=60, capture_output=True, text=True)
    assert [name for name in loaded.stdout.split() if name.startswith("embodrl.")] == []


def test_an_environment_is_registered_without_torch() -> None:
    code = "from embodrl import Simulator, VectorEnv, register_env; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    for name in embodrl.__all__:
        assert getattr(embodrl, name) is not None, name
    assert set(embodrl.__all__) <= set(dir(embodrl))
    with pytest.raises(AttributeError, match="no_such_name"):
        embodrl.no_such_name  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((ROOT / "embodrl" / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    seen: set[str] = set()
    for node in ast.walk(blocks[0]):
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            seen |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert set(embodrl.__all__) - {"__version__"} <= seen


def test_examples_import_from_the_top_level_only() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            deep = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("embodrl.")
            assert not deep, f"{path}: {ast.unparse(node)}"


def test_a_configuration_comes_from_overrides_a_mapping_or_a_file(tmp_path: Path) -> None:
    assert embodrl.load_config(["env=toy", "runner.seed=3"]).config.runner.seed == 3
    loaded = embodrl.load_config({"env": "toy", "runner": {"seed": 4}}, ["runner.max_iterations=2"])
    assert (loaded.config.env.env_type, loaded.config.runner.seed, loaded.config.runner.max_iterations) == ("toy", 4, 2)
    path = tmp_path / "mine.yaml"
    path.write_text("presets: {env: toy}\nrunner: {seed: 5}\n")
    for given in (path, str(path)):
        assert embodrl.load_config(given).config.runner.seed == 5
    with raises_code("config-unknown-key"):
        embodrl.load_config({"runner": {"sed": 4}})
    with raises_code("preset-unknown"):
        embodrl.load_config({"env": "toi"})
    with raises_code("overrides-after-loading"):
        embodrl.train(loaded, ["runner.seed=1"])


def test_training_evaluation_and_loading_from_a_script(tmp_path: Path) -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    torch.set_num_threads(2)
    mode = torch.get_deterministic_debug_mode()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    result = embodrl.train(tiny(), [f"runner.output_dir={tmp_path / 'run'}"])
    assert (result.exit_code, result.run_dir) == (0, tmp_path / "run")
    assert [row["iteration"] for row in result.metrics] == [0, 1]
    assert result.metrics[1]["env_steps"] == 48
    assert isinstance(result.policy, embodrl.VLAPolicy)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert torch.get_num_threads() == 2 and torch.get_deterministic_debug_mode() == mode
    assert torch.equal(torch.rand(1), expected), "the caller's random state is untouched"

    trained = {name: value.clone() for name, value in result.policy.state_dict().items()}
    for place in (result.run_dir, result.run_dir / "policy", result.run_dir / "checkpoints" / "step_1"):
        loaded = embodrl.load_policy(place, device="cpu").state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in trained.items()), place
    policy = embodrl.load_policy(result.run_dir, device="cpu")
    images = np.zeros((16, 16, 3), np.uint8)
    alone = policy.predict(images, "reach the red goal")
    assert (alone.shape, alone.dtype) == ((3, 7), np.float32)
    batch = policy.predict(np.stack([images[None]] * 2), ["reach the red goal"] * 2)
    np.testing.assert_array_equal(batch, np.stack([alone, alone]))
    with raises_code("predict-images"):
        policy.predict(images.astype(np.float32), "reach the red goal")  # pyright: ignore[reportArgumentType]

    evaluated = embodrl.evaluate(policy=result.run_dir)
    final = result.metrics[1]["eval/success_rate"]
    assert evaluated.success_rate == final, "the evaluation of the run's last iteration"
    assert len(evaluated.episodes) == 6 and evaluated.interval[0] <= final <= evaluated.interval[1]
    assert evaluated.report is not None and evaluated.report.is_file() and evaluated.report.is_relative_to(tmp_path)
    again = embodrl.evaluate(tiny(), policy=result.policy, output_dir=tmp_path / "again")
    assert again.success_rate == final and again.output_dir == tmp_path / "again"


def test_errors_are_raised_and_nothing_exits(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with raises_code("run-exists"):
        embodrl.train(tiny(), [f"runner.output_dir={tmp_path / 'run'}"])
    with raises_code("policy-not-found"):
        embodrl.load_policy(tmp_path / "nothing")


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[object] = []

    def run() -> None:
        results.append(embodrl.collect(tiny(), [f"collect.output_dir={tmp_path / 'demos'}"]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    (collected,) = results
    assert isinstance(collected, embodrl.CollectResult)
    assert (collected.exit_code, collected.num_episodes) == (0, 6)
    assert all(rate and rate > 0.5 for rate in collected.success_rate.values())
    settings = ["sft.max_steps=2", "sft.lr_warmup_steps=1", "sft.batch_size=4", "sft.log_interval=1"]
    paths = [f"sft.data_dir={tmp_path / 'demos'}", f"sft.output_dir={tmp_path / 'sft'}"]
    tuned = embodrl.sft(tiny(), [*settings, *paths])
    assert tuned.exit_code == 0 and len(tuned.metrics) == 2 and tuned.policy_dir.is_dir()


def test_own_advantages_and_losses_have_names() -> None:
    def mine(*, rewards: object, valid: object, gamma: float) -> None:
        """Mine."""

    embodrl.register_advantage("test_api_mine", mine)
    from embodrl.specs import ADVANTAGES

    entry = ADVANTAGES.entry("test_api_mine")
    assert entry.description == "Mine." and not entry.needs_values
    with raises_code("function-parameter-unknown"):
        embodrl.register_loss("test_api_wrong", lambda logprob: None)


def test_examples_without_a_simulator_run() -> None:
    for name in ("batches/convert.py", "task_runner/many.py"):
        subprocess.run([sys.executable, str(ROOT / "examples" / name)], check=True, timeout=120)


def test_the_quick_start_runs(tmp_path: Path) -> None:
    config = yaml.safe_load(TINY_POLICY)["model"]["architecture"]
    sizes = ["env.max_episode_steps=6", "env.cameras=[{height: 16, width: 16}]", "env.num_processes=1"]
    sizes += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=12", "env.pin_cpus=false"]
    sizes += ["env.eval.total_num_envs=4", "env.eval.num_episodes=6", "model.num_action_chunks=3"]
    sizes += [f"model.architecture={yaml.safe_dump(config, default_flow_style=True, width=10000).strip()}"]
    sizes += ["model.value_head.hidden_sizes=[8]", "actor.global_batch_size=8", "actor.micro_batch_size=4"]
    sizes += ["actor.optim.critic_warmup_iterations=0", "actor.optim.lr_warmup_iterations=0"]
    sizes += ["runner.logger.console=off", f"runner.output_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), *sizes]
    outcome = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["0", "1", "2", "3"], outcome.stdout
    assert "actions: (3, 7)" in outcome.stdout


def test_the_text_of_a_result_leaves_out_the_layers_of_its_policy(tmp_path: Path) -> None:
    import torch

    from embodrl.runs.train import TrainResult

    policy = torch.nn.Linear(2, 2)
    text = repr(TrainResult(tmp_path, 0, policy))  # type: ignore[arg-type]
    assert "Linear" not in text and str(tmp_path) in text
