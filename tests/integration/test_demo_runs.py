"""`collect` and `sft` through the command line, on the toy environment: signals, and what is in the way."""

import json
from pathlib import Path

import pytest
from runs import Outcome, assert_gone, embodrl
from safetensors.torch import load_file

from embodrl.data.load import load_demos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Demonstrations of a collection that got a signal while its third episode was kept."""
    directory = tmp_path_factory.mktemp("demos")
    children = directory.with_name("children")
    outcome = collect(config, directory, stop_at="add_episode:3:SIGTERM", children=children)
    assert_gone(children)
    return directory, outcome


def collect(config: Path, directory: Path, kind: str = "raw", *arguments: str, **options: object) -> Outcome:
    settings = [f"collect.output_dir={directory}", f"collect.format={kind}", "env.max_episode_steps=21"]
    return embodrl("collect", "--config", config, *settings, *arguments, **options)


def sft(config: Path, demos: Path, directory: Path, *arguments: str, **options: object) -> Outcome:
    settings = [f"sft.data_dir={demos}", f"sft.output_dir={directory}", "sft.max_steps=30", "sft.batch_size=4"]
    settings += ["sft.lr_warmup_steps=3", "sft.log_interval=10"]
    return embodrl("sft", "--config", config, *settings, *arguments, **options)


def test_a_stopped_collection_is_complete_as_far_as_it_goes(stopped: tuple[Path, Outcome]) -> None:
    directory, outcome = stopped
    assert outcome.code == 143, outcome.stderr
    content = json.loads((directory / "index.json").read_text())
    assert content["meta"]["stopped_early"] is True
    assert 3 <= len(content["episodes"]) < 6
    assert f"{len(content['episodes'])} of 6 episodes were kept" in outcome.stdout


def test_a_stopped_collection_is_a_whole_lerobot_data_set(config: Path, tmp_path: Path) -> None:
    demos = tmp_path / "demos"
    outcome = collect(config, demos, "lerobot", stop_at="add_lerobot_episode:3:SIGTERM")
    assert outcome.code == 143, outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]
    info = json.loads((demos / "meta" / "info.json").read_text())
    meta = json.loads((demos / "meta" / "embodrl.json").read_text())
    assert 3 <= info["total_episodes"] < 6 and meta["stopped_early"] is True and meta["expert_success_rate"]
    outcome = sft(config, demos, tmp_path / "sft")
    assert outcome.code == 0, outcome.stderr
    assert f"{info['total_episodes']} episodes, {info['total_frames']} frames" in outcome.stdout
    outcome = collect(config, demos, "lerobot")
    assert outcome.code == 1 and "code: dataset-exists" in outcome.stderr


@pytest.mark.parametrize(
    ("kind", "point"), [pytest.param("raw", "add_episode", marks=pytest.mark.long), ("lerobot", "add_lerobot_episode")]
)
def test_a_killed_collection_continues_from_its_last_commit(
    config: Path, tmp_path: Path, kind: str, point: str
) -> None:
    demos = tmp_path / "demos"
    settings = ["collect.num_episodes=54", "env.tasks=[reach-red]"]
    outcome = collect(config, demos, kind, *settings, stop_at=f"{point}:52:SIGKILL")
    assert outcome.code == -9 and not demos.exists()
    outcome = collect(config, demos, kind, *settings, "collect.noise_std=0.5")
    assert outcome.code == 1 and "code: collect-other-settings" in outcome.stderr
    outcome = collect(config, demos, kind, *settings)
    assert outcome.code == 0, outcome.stderr
    assert "continuing an interrupted collection: 50 episodes" in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]
    assert load_demos(demos).num_episodes == 54


def test_a_signal_ends_fine_tuning_with_the_policy_so_far(
    stopped: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    outcome = sft(config, stopped[0], tmp_path, stop_at="sft_step:5:SIGINT")
    assert outcome.code == 130, outcome.stderr
    assert "stopped by a signal after 5 of 30 steps" in outcome.stdout
    assert [json.loads(row)["step"] for row in (tmp_path / "sft_metrics.jsonl").read_text().splitlines()] == [5]
    assert load_file(tmp_path / "policy" / "model.safetensors")
    before = (tmp_path / "policy" / "model.safetensors").read_bytes()
    outcome = sft(config, stopped[0], tmp_path)
    assert outcome.code == 1 and "code: sft-output-exists" in outcome.stderr
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == before


@pytest.fixture(scope="module")
def tuned(stopped: tuple[Path, Outcome], config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sft") / "whole"
    outcome = sft(config, stopped[0], directory)
    assert outcome.code == 0, outcome.stderr
    return directory


@pytest.mark.long
def test_fine_tuning_on_two_datasets_continues_bit_exactly(
    stopped: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    outcome = collect(config, other, "raw", "collect.num_episodes=2", "collect.seed=900000")
    assert outcome.code == 0, outcome.stderr
    mixture = (f"sft.further_data=[{other}]", "sft.data_weights=[0.3,0.7]", "sft.random_shift_px=1")
    outcome = sft(config, stopped[0], tmp_path / "whole", *mixture)
    assert outcome.code == 0 and f"2 episodes, 42 frames from {other}" in outcome.stdout, outcome.stderr
    on_disk = (*mixture, "sft.memory_gb=1e-6")
    outcome = sft(config, stopped[0], tmp_path / "parts", *on_disk, stop_at="sft_step:7:SIGINT")
    assert outcome.code == 130 and outcome.stdout.count("held on disk") == 3, outcome.stderr
    outcome = embodrl("resume", tmp_path / "parts")
    assert outcome.code == 0, outcome.stderr
    whole, parts = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "parts"))
    assert all(whole[name].equal(parts[name]) for name in whole)
    outcome = sft(config, stopped[0], tmp_path / "wrong", f"sft.further_data=[{tmp_path}]")
    assert outcome.code == 2 and "code: dataset-missing" in outcome.stderr


@pytest.mark.long
def test_fine_tuning_keeps_its_best_policy_and_ends_early(
    stopped: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    """A success rate of 0 is reached by the first evaluation; evaluated between steps, and while it trains."""
    for name, more in (("turns", "runner.eval_async=false"), ("meanwhile", "runner.eval_async=true")):
        arguments = ["sft.eval_interval=10", "sft.val_episodes=2", "runner.stop_at_success=0", "sft.max_steps=30", more]
        outcome = sft(config, stopped[0], tmp_path / name, *arguments)
        assert outcome.code == 0 and "solved" in outcome.stdout, outcome.stderr
        rows = [json.loads(row) for row in (tmp_path / name / "sft_metrics.jsonl").read_text().splitlines()]
        evaluated = [row for row in rows if "eval/success_rate" in row]
        assert any(row.get("sft/val_loss", 0.0) > 0 for row in rows) and "2 episodes are held out" in outcome.stdout
        assert "next: embodrl eval" in outcome.stdout
        assert "held-out episodes" in (tmp_path / name / "report.html").read_text()
        assert [row["iteration"] for row in evaluated] == [10]
        assert (tmp_path / name / "policy_best" / "model.safetensors").is_file()


def test_fine_tuning_that_was_stopped_resumes_bit_exactly(
    stopped: tuple[Path, Outcome], config: Path, tuned: Path, tmp_path: Path
) -> None:
    assert sft(config, stopped[0], tmp_path, stop_at="sft_step:13:SIGTERM").code == 143
    outcome = embodrl("resume", tmp_path)
    assert outcome.code == 0, outcome.stderr
    for name in ("model.safetensors", "value_head.safetensors"):
        assert (tmp_path / "policy" / name).read_bytes() == (tuned / "policy" / name).read_bytes()
    rows = [[json.loads(row) for row in (d / "sft_metrics.jsonl").read_text().splitlines()] for d in (tmp_path, tuned)]
    assert rows[0][-1]["loss"] == rows[1][-1]["loss"] and rows[0][-1]["step"] == 30


def test_images_on_disk_train_the_policy_of_those_in_memory(
    stopped: tuple[Path, Outcome], config: Path, tuned: Path, tmp_path: Path
) -> None:
    outcome = sft(config, stopped[0], tmp_path, "sft.memory_gb=1e-6", stop_at="sft_step:13:SIGTERM")
    assert outcome.code == 143 and f"held on disk in {tmp_path}" in outcome.stdout, outcome.stderr
    outcome = embodrl("resume", tmp_path)
    assert outcome.code == 0 and f"held on disk in {tmp_path}" in outcome.stdout, outcome.stderr
    for name in ("model.safetensors", "value_head.safetensors"):
        assert (tmp_path / "policy" / name).read_bytes() == (tuned / "policy" / name).read_bytes()


@pytest.mark.long
def test_killed_fine_tuning_resumes_from_its_last_checkpoint(
    stopped: tuple[Path, Outcome], config: Path, tuned: Path, tmp_path: Path
) -> None:
    often = ("sft.save_interval=10", "sft.log_interval=5")
    outcome = sft(config, stopped[0], tmp_path, *often, stop_at="sft_step:17:SIGKILL")
    assert outcome.code == -9 and not (tmp_path / "policy").exists()
    metrics = tmp_path / "sft_metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])  # damaged meanwhile
    outcome = embodrl("resume", tmp_path, "sft.log_interval=10")
    assert outcome.code == 0 and "step_10" in outcome.stdout, outcome.stderr
    assert [json.loads(row)["step"] for row in metrics.read_text().splitlines()] == [5, 10, 20, 30]
    assert "resumed at iteration 10 with sft.log_interval: 5 -> 10" in (tmp_path / "config.yaml").read_text()
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == (
        tuned / "policy" / "model.safetensors"
    ).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(("step", "where"), [(7, "from the start"), (17, "step_10")])
def test_fine_tuning_restarts_its_training_process_to_the_same_policy(
    stopped: tuple[Path, Outcome], config: Path, tuned: Path, tmp_path: Path, step: int, where: str
) -> None:
    often = ("sft.save_interval=10", "sft.log_interval=5", "actor.own_process=true")
    orders = {"stop_at": f"sft_step:{step}:SIGKILL:rank_0_once", "children": tmp_path / "children"}
    outcome = sft(config, stopped[0], tmp_path / "run", *often, **orders)
    assert outcome.code == 0, outcome.stderr
    log = (tmp_path / "run" / "logs" / "embodrl.log").read_text()
    (restart,) = [line for line in log.splitlines() if "restart 1 of 3 of the training processes" in line]
    assert where in restart and "actor[0] was killed by SIGKILL" in restart
    records = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert [(record["kind"], record["from_iteration"]) for record in records] == [
        ("train", 0),
        ("resume", 10 if step > 10 else 0),
    ]
    rows = [json.loads(row) for row in (tmp_path / "run" / "sft_metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 25, 30]
    assert (tmp_path / "run" / "policy" / "model.safetensors").read_bytes() == (
        tuned / "policy" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_fine_tuning_in_two_processes_has_the_losses_of_one(
    stopped: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    exact = ("actor.precision=fp32", "rollout.precision=fp32")
    two = (
        "actor.training_backend=fsdp",
        "cluster.device=cpu",
        "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
    )
    losses = []
    for name, settings in (("one", exact), ("two", (*exact, *two))):
        directory = tmp_path / name
        outcome = sft(config, stopped[0], directory, "sft.log_interval=1", *settings)
        assert outcome.code == 0, outcome.stderr
        losses.append([json.loads(r)["loss"] for r in (directory / "sft_metrics.jsonl").read_text().splitlines()])
    assert len(losses[0]) == 30 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(list((tmp_path / "two" / "checkpoints" / "step_30" / "optimizer").glob("shard-*.safetensors"))) == 2


def test_fine_tuning_needs_a_directory_that_can_be_written(
    stopped: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embodrl.config import load_config
    from embodrl.errors import OutputError
    from embodrl.runs import sft as worker

    output_dir = tmp_path / "file" / "out"
    settings = ["env=toy", "model.warm_start=null", f"sft.data_dir={stopped[0]}"]
    loaded = load_config([*settings, f"sft.output_dir={output_dir}"])
    (tmp_path / "file").write_text("mine")  # after the configuration was checked, which would refuse it
    monkeypatch.setattr(worker, "prepare_imitation", lambda session: pytest.fail("started"))
    with pytest.raises(OutputError) as refused:
        worker.sft(loaded)
    assert "sft.output_dir" in refused.value.hint
