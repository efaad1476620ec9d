"""The public API in whole runs: the verbs as functions, the quick start and the examples that need no simulator."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from expect import raises_code
from runs import TINY_POLICY, script, tiny
from safetensors.torch import load_file

import embodrl
from embodrl.errors import EmbodrlError
from embodrl.reporting.rows import is_measured
from embodrl.runs.train import resume
from embodrl.storage import checkpoint
from embodrl.trainer import files
from embodrl.workers.collector import SyncCollector

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_training_evaluation_and_loading_from_a_script(tmp_path: Path) -> None:
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    torch.set_num_threads(2)
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
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
    assert torch.utils.deterministic.fill_uninitialized_memory
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


@pytest.mark.long
def test_a_run_that_does_not_fit_on_the_disk_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, demos, tuned = (tmp_path / name for name in ("run", "demos", "tuned"))
    many = [f"runner.output_dir={run}", "runner.keep_last_n=9", "runner.keep_best=false"]
    needed: list[int] = []

    def preflight(directory: Path, num_bytes: int) -> None:
        needed.append(num_bytes)
        checkpoint.preflight(directory, num_bytes)

    monkeypatch.setattr(files, "preflight", preflight)
    embodrl.collect(tiny(), [f"collect.output_dir={demos}"])
    embodrl.train(tiny(), many)
    state, policy = tensor_bytes(run / "checkpoints/step_1"), tensor_bytes(run / "policy")
    assert needed[0] == pytest.approx(10 * state + policy, rel=1e-3)  # without the optimizer's counts of steps
    written = [path for name in ("checkpoints/step_1", "policy") for path in (run / name).rglob("*") if path.is_file()]
    rest = needed[0] - sum(path.stat().st_size for path in written)
    assert resume(run, ["runner.max_iterations=2"]) == 0
    assert needed[1] == rest, "what the first process has written is there already"

    # Enough for what is asked before the policy is built, and not for the run.
    shutil.rmtree(run)
    usage = shutil.disk_usage(tmp_path)._replace(free=files.LEAST_FREE_BYTES)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with raises_code("disk-space"):
        embodrl.train(tiny(), [*many, "runner.keep_last_n=1000"])
    assert not (run / "config.yaml").exists() and not (run / "metrics.jsonl").exists()
    paths = [f"sft.data_dir={demos}", f"sft.output_dir={tuned}", "runner.keep_last_n=1000"]
    with raises_code("disk-space"):
        embodrl.sft(tiny(), ["sft.max_steps=2", "sft.lr_warmup_steps=1", "sft.batch_size=4", *paths])
    assert not tuned.exists()


def tensor_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for path in directory.glob("*.safetensors") for tensor in load_file(path).values())


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


def unclocked(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not (is_measured(name) or name.startswith("eval/"))}


APART = ("actor.own_process=true", "rollout.own_process=true")


@pytest.mark.parametrize("places", [(), pytest.param(APART, marks=pytest.mark.long)])
def test_a_session_takes_the_steps_of_the_trainer(tmp_path: Path, places: tuple[str, ...]) -> None:
    settings = ["runner.max_iterations=2", "algorithm.kl.coef=0.1", *places]
    trained = embodrl.train(tiny(), [*settings, f"runner.output_dir={tmp_path / 'run'}"])
    rows: list[dict[str, Any]] = []
    with embodrl.Session(tiny(), [*settings, f"runner.output_dir={tmp_path / 'session'}"]) as session:
        first = session.evaluate()
        while session.iteration < 2:
            batch = session.rollout()
            assert isinstance(batch, embodrl.TrajectoryBatch) and "ref_logprobs" in batch
            advantages = session.advantages(batch)
            assert isinstance(advantages, embodrl.Advantages)
            assert "train/policy_loss" in session.train(batch, advantages)
            rows.append(session.sync())
        result = session.evaluate(tmp_path / "videos")
        session.save(tmp_path / "policy")
    assert [unclocked(row) for row in rows] == [unclocked(row) for row in trained.metrics[1:]]
    assert (first.success_rate, result.success_rate) == tuple(trained.metrics[i]["eval/success_rate"] for i in (0, 2))
    saved, expected = (load_file(path / "policy" / "model.safetensors") for path in (tmp_path, trained.run_dir))
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)
    with raises_code("session-closed"):
        session.rollout()


def test_the_steps_of_a_session_have_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / 'run'}"]) as session:
        for step in (lambda: session.advantages(Any), lambda: session.train(Any, Any), session.sync):
            with raises_code("session-order", EmbodrlError, "rollout"):
                step()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(SyncCollector, "gather", interrupted)
            session.rollout()
        batch = session.rollout()
        for step in (session.rollout, session.sync):
            with raises_code("session-order", EmbodrlError, "train"):
                step()
        with pytest.raises(EmbodrlError):
            session.advantages(batch.select("rewards"))  # an error leaves the step to be taken again
        assert isinstance(session.advantages(batch), embodrl.Advantages)
        with raises_code("session-order", EmbodrlError, "train"):
            session.advantages(batch)
        session.train(batch, made(batch))
        assert session.sync()["iteration"] == 1
        batch = session.rollout()
        # Of one's own, in place of session.advantages.
        learned = session.train(batch, made(batch))
        assert "train/policy_loss" in learned and "time/advantage_s" not in learned
        with raises_code("session-order", EmbodrlError, "sync"):
            session.train(batch, made(batch))
        assert session.sync()["iteration"] == session.iteration == 2
        session.save(tmp_path / "run" / "policy")
    with raises_code("run-exists"), embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / 'run'}"]):
        pass


@pytest.mark.parametrize("places", [(), pytest.param(APART, marks=pytest.mark.long)])
def test_a_session_updates_with_a_loss_of_its_own(tmp_path: Path, places: tuple[str, ...]) -> None:
    """The configured loss, given as a function, takes the same steps; half of it, and one that is local, others."""
    from embodrl.algorithms.losses import actor_critic_loss, actor_loss

    def halved(*, values: Any, **others: Any) -> embodrl.LossOutput:
        output = actor_critic_loss(values=values, **others)
        return embodrl.LossOutput(0.5 * output.loss, output.metrics | {"half": torch.ones(()) / 2})

    losses = [None, actor_critic_loss, actor_loss] if places else [None, actor_critic_loss, halved]
    found: list[dict[str, torch.Tensor]] = []
    for number, loss in enumerate(losses):
        settings = [f"runner.output_dir={tmp_path / str(number)}", "actor.optim.clip_grad=1e9", *places]
        # Plain gradient descent, whose steps are as long as the gradients.
        settings += ["actor.optim.fn=torch.optim:SGD"]
        with embodrl.Session(tiny(), settings) as session:
            batch = session.rollout()
            advantages = session.advantages(batch)
            if places:
                with raises_code("loss-unusable", EmbodrlError, "halved"):
                    session.train(batch, advantages, loss=halved)
            learned = session.train(batch, advantages, loss)
            assert ("train/half" in learned) == (loss is halved)
            assert ("train/value_loss" in learned) == (loss is not actor_loss)
            found.append({name: value.clone() for name, value in session.policy.state_dict().items()})
            assert session.sync()["iteration"] == 1
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert any(not torch.equal(value, found[2][name]) for name, value in found[0].items())


def test_a_loss_that_the_run_can_not_use_is_refused(tmp_path: Path) -> None:
    def critic(*, values: Any, valid: Any) -> None: ...
    def actor(*, logprobs: Any) -> None: ...
    def wrong(*, logprob: Any) -> None: ...

    reinforce = ["algorithm.adv_type=reinforce_pp", "algorithm.loss_type=actor", "model.add_value_head=false"]
    decoupled = ["algorithm.decoupled.enabled=true"]
    warm = ["actor.optim.critic_warmup_iterations=1", "runner.max_iterations=2"]
    for number, (loss, code, settings) in enumerate(
        (
            (critic, "loss-unusable", reinforce),
            (actor, "loss-unusable", decoupled),
            (actor, "loss-unusable", warm),
            (wrong, "function-parameter-unknown", []),
            (actor, "loss-unusable", ["algorithm.kl.coef=0.1"]),
        )
    ):
        session = embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / str(number)}", *settings])
        with session, raises_code(code, EmbodrlError, loss.__name__):
            session.train(Any, Any, loss)  # pyright: ignore[reportArgumentType]


def made(batch: embodrl.TrajectoryBatch) -> embodrl.Advantages:
    rewards = batch.rewards.sum(-1, keepdim=True)
    return embodrl.Advantages(rewards, rewards, batch.valid.any(-1, keepdim=True))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("algorithm", ["sac", "dagger"])
def test_a_session_learns_off_policy(algorithm: str, tmp_path: Path) -> None:
    from embodrl.algorithms.losses import actor_loss

    small = ["env=toy", "model=mlp", "env.state=full", f"algorithm={algorithm}", "runner.max_iterations=2"]
    small += ["env.num_processes=1", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=25"]
    small += ["runner.eval_interval=0", "runner.eval_at_start=false", "env.eval.num_episodes=4"]
    small += ["actor.global_batch_size=8", "actor.micro_batch_size=8"]
    small += ["algorithm.off_policy.warm_up=50"] if algorithm == "sac" else []
    trained = embodrl.train([*small, f"runner.output_dir={tmp_path / 'run'}"])
    with embodrl.Session([*small, f"runner.output_dir={tmp_path / 'session'}"]) as session:
        rows = []
        for _ in range(2):
            batch = session.rollout()
            with raises_code("session-order", EmbodrlError, "train"):
                session.advantages(batch)
            with raises_code("session-advantages"):
                session.train(batch, made(batch))
            with raises_code("loss-unusable"):
                session.train(batch, loss=actor_loss)
            assert session.train(batch)["replay/size"]
            rows.append(session.sync())
        session.save(tmp_path / "policy")
    expected = [{k: v for k, v in unclocked(row).items() if not k.startswith("eval/")} for row in trained.metrics]
    assert [unclocked(row) for row in rows] == expected[-2:]
    found, learned = (load_file(path / "policy" / "model.safetensors") for path in (tmp_path, trained.run_dir))
    assert found.keys() == learned.keys() and all(torch.equal(found[name], learned[name]) for name in found)


def test_a_session_is_for_runs_with_rollouts(tmp_path: Path) -> None:
    iql = ["env=toy", "model=mlp", "algorithm=iql", "env.state=full", f"runner.output_dir={tmp_path / 'run'}"]
    embodrl.collect(tiny(), ["collect.format=raw", f"collect.output_dir={tmp_path / 'demos'}"])
    with raises_code("session-pipeline"), embodrl.Session([*iql, f"algorithm.off_policy.demos={tmp_path / 'demos'}"]):
        pass
    with embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / 'ppo'}"]) as session:
        batch = session.rollout()
        with raises_code("session-advantages"):
            session.train(batch)
    assert not (tmp_path / "run").exists()


def test_the_loop_written_out_learns_what_the_command_does(tmp_path: Path) -> None:
    path = ROOT / "examples" / "training_loop" / "ppo.py"
    assert len(path.read_text().splitlines()) <= 80
    small = ["env=toy", "model=mlp", "env.state=full", "runner.max_iterations=2", "env.eval.num_episodes=8"]
    small += ["env.num_processes=1", "env.train.max_steps_per_rollout_epoch=25", "actor.global_batch_size=8"]
    small += ["actor.micro_batch_size=8", "actor.optim.critic_warmup_iterations=0"]
    script(path, *small, f"runner.output_dir={tmp_path / 'script'}")
    trained = embodrl.train([*small, f"runner.output_dir={tmp_path / 'run'}"])
    rows = [json.loads(line) for line in (tmp_path / "script" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and [unclocked(row) for row in rows] == [unclocked(row) for row in trained.metrics[1:]]
    found, expected = (load_file(tmp_path / each / "policy" / "model.safetensors") for each in ("script", "run"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_examples_without_a_simulator_run() -> None:
    for name in ("batches/convert.py", "task_runner/many.py"):
        script(ROOT / "examples" / name)


@pytest.mark.long
def test_the_quick_start_runs(tmp_path: Path) -> None:
    config = yaml.safe_load(TINY_POLICY)["model"]["architecture"]
    sizes = ["env.max_episode_steps=6", "env.cameras=[{height: 16, width: 16}]", "env.num_processes=1"]
    sizes += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=12", "env.pin_cpus=false"]
    sizes += ["env.eval.num_episodes=6", "model.num_action_chunks=3"]
    sizes += [f"model.architecture={yaml.safe_dump(config, default_flow_style=True, width=10000).strip()}"]
    sizes += ["model.value_head.hidden_sizes=[8]", "actor.global_batch_size=8", "actor.micro_batch_size=4"]
    sizes += ["actor.optim.critic_warmup_iterations=0", "actor.optim.lr_warmup_iterations=0"]
    sizes += ["runner.logger.console=off", f"runner.output_dir={tmp_path / 'run'}"]
    outcome = script(ROOT / "examples" / "quickstart.py", *sizes)
    lines = outcome.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["0", "1", "2", "3"], outcome.stdout
    assert "actions: (3, 7)" in outcome.stdout
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    sizes[-1] = f"runner.output_dir={tmp_path / 'notebook'}"
    code = "\n".join(cells).replace("settings = [", f"settings = [*{sizes!r}, ", 1)
    variables: dict[str, Any] = {}
    exec(code.replace("max_iterations=3", "max_iterations=1"), variables)
    assert variables["actions"].shape == (3, 7) and len(variables["trained"].metrics) == 2
