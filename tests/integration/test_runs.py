"""Whole runs through the command line, on the toy environment: output, determinism, signals, resuming."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from runs import Outcome, assert_gone, embodrl, metrics, start
from safetensors.torch import load_file

from embodrl.reporting.metrics_file import read_metrics
from embodrl.reporting.rows import is_measured

pytestmark = pytest.mark.slow


def _long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The uninterrupted run that the others are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}")
    assert outcome.code == 0, outcome.stderr
    return run_dir, outcome


def resume(run_dir: Path) -> Outcome:
    outcome = embodrl("resume", run_dir)
    assert outcome.code == 0, outcome.stderr
    return outcome


def assert_same_run(run_dir: Path, whole: Path) -> None:
    assert metrics(run_dir) == metrics(whole)
    left, right = (load_file(directory / "policy" / "model.safetensors") for directory in (run_dir, whole))
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


def test_a_run_leaves_what_others_rely_on(whole: tuple[Path, Outcome]) -> None:
    run_dir, outcome = whole
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["env_steps"] for row in rows] == [0, 48, 96, 144, 192]  # 4 environments x 12 steps
    assert [("eval/success_rate" in row) for row in rows] == [True, False, True, False, True]
    for name in ("rollout/success_rate", "time/env_s", "time/policy_s", "time/train_s", "train/policy_loss"):
        assert rows[0][name] is None
    for row in rows[1:]:
        assert 0 <= row["rollout/success_rate"] <= 1
        for name in ("time/env_s", "time/policy_s", "time/train_s", "time/total_s"):
            assert row[name] > 0, name
        assert isinstance(row["train/policy_loss"], float)
        assert abs(row["train/first_minibatch_kl"]) < 1e-3  # no step yet: training agrees with the rollout
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["best", "step_2", "step_4"]
    best = max(rows[2::2], key=lambda row: row["eval/success_rate"])["iteration"]
    assert (run_dir / "checkpoints" / "best").resolve().name == f"step_{best}"
    assert {path.name for path in (run_dir / "policy_best").iterdir()} >= {"config.json", "model.safetensors"}
    (record,) = json.loads((run_dir / "provenance.json").read_text())
    assert record["kind"] == "train" and "runner.output_dir" in record["command"]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["env"]["env_type"] == "toy" and config["runner"]["max_iterations"] == 4
    report = (run_dir / "report.html").read_text()
    assert "<svg" in report and "runner.output_dir" in report
    card = json.loads((run_dir / "policy" / "embodrl.json").read_text())
    assert (card["env_type"], card["iteration"]) == ("toy", 4)
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"embodrl.log", "env_0.log", "env_1.log"}
    log = (run_dir / "logs" / "embodrl.log").read_text()
    assert all(line in log for line in outcome.stdout.splitlines()), "what is on the screen is in the log"


def test_another_run_with_the_same_seed_is_the_same(whole: tuple[Path, Outcome], config: Path, tmp_path: Path) -> None:
    assert embodrl("train", "--config", config, f"runner.output_dir={tmp_path / 'run'}").code == 0
    assert_same_run(tmp_path / "run", whole[0])


@pytest.mark.parametrize(
    "stop_at",
    [
        _long("decide:1:SIGKILL"),  # before anything was logged
        "write_file:4:SIGKILL",  # within the first checkpoint: its third file (the first file is the preflight's)
        _long("act:11:SIGKILL"),  # in the rollout of iteration 3
        _long("optimizer_step:14:SIGKILL"),  # in the update of iteration 4
        _long("log:5:SIGKILL"),  # the last iteration is done, not yet logged
    ],
)
def test_a_killed_run_is_resumed_bit_exactly(
    stop_at: str, whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", stop_at=stop_at, children=children)
    assert outcome.code == -signal.SIGKILL
    assert_gone(children)
    outcome = resume(run_dir)
    first_checkpoint = stop_at.split(":")[0] in ("decide", "write_file")
    assert ("starts over" in outcome.stderr) == first_checkpoint
    assert_same_run(run_dir, whole[0])


def merged(run_dir: Path) -> list[dict[str, object]]:
    """All that does not depend on the clock and the machine, by iteration."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not is_measured(name)} for row in rows]


def assert_same_figures(run_dir: Path, whole: Path) -> None:
    assert merged(run_dir) == merged(whole)
    for name in ("policy", "policy_best"):
        left, right = (load_file(directory / name / "model.safetensors") for directory in (run_dir, whole))
        assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
    cards = [json.loads((each / "policy_best" / "embodrl.json").read_text()) for each in (run_dir, whole)]
    assert cards[0]["iteration"] == cards[1]["iteration"]


@pytest.mark.long
def test_evaluations_beside_training_have_the_same_figures(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    """The process that evaluates is killed within its first evaluation, and is replaced."""
    run_dir, children = tmp_path / "run", tmp_path / "children"
    order = ("train", "--config", config, f"runner.output_dir={run_dir}", "runner.eval_async=true")
    outcome = embodrl(*order, stop_at="decide:2:SIGKILL:rank_0_once", children=children)
    assert outcome.code == 0, outcome.stderr
    assert_same_figures(run_dir, whole[0])
    assert "restart 1 of 3 of the evaluation process" in outcome.stderr
    assert outcome.stdout.count("evaluation after iteration") == 3
    assert not (run_dir / "eval_weights").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "stop_at",
    [
        "decide:1:SIGKILL:parent_of_0",  # within the first evaluation: there is no checkpoint
        "decide:3:SIGKILL:parent_of_0",  # within the second one, of iteration 2
        "log:5:SIGKILL",  # it is done, and the checkpoint knows it as under way
        "log_late:3:SIGKILL",  # the last one is done and not logged
        "log_late:2:SIGTERM",
    ],
)
def test_an_evaluation_that_was_under_way_is_repeated(
    stop_at: str, whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    order = ("train", "--config", config, f"runner.output_dir={run_dir}", "runner.eval_async=true")
    assert embodrl(*order, stop_at=stop_at, children=children).code in (-signal.SIGKILL, 128 + signal.SIGTERM)
    resume(run_dir)
    assert_same_figures(run_dir, whole[0])


@pytest.mark.long
def test_an_evaluation_process_that_dies_again_and_again_ends_the_run(config: Path, tmp_path: Path) -> None:
    order = ("train", "--config", config, f"runner.output_dir={tmp_path / 'run'}", "runner.eval_async=true")
    outcome = embodrl(*order, "rollout.max_restarts=1", stop_at="decide:1:SIGKILL:rank_0")
    assert outcome.code == 1 and "evaluation-process-lost" in outcome.stderr
    assert "embodrl resume" in outcome.stderr


@pytest.mark.long
def test_evaluations_beside_training_play_the_shares_of_all_rollout_processes(config: Path, tmp_path: Path) -> None:
    two = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"
    for name, beside in (("turns", "false"), ("beside", "true")):
        order = (f"runner.output_dir={tmp_path / name}", two, f"runner.eval_async={beside}")
        assert embodrl("train", "--config", config, *order).code == 0
    assert_same_figures(tmp_path / "beside", tmp_path / "turns")


@pytest.mark.long
def test_a_run_that_has_solved_its_task_ends_and_can_be_trained_on(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", "runner.stop_at_success=0")
    assert outcome.code == 0 and (run_dir / "policy" / "model.safetensors").is_file(), outcome.stderr
    assert metrics(run_dir) == metrics(whole[0])[:3]  # iterations 0, 1 and 2
    resume(run_dir)
    assert metrics(run_dir) == metrics(whole[0])[:3]
    assert embodrl("resume", run_dir, "runner.stop_at_success=null").code == 0
    assert_same_run(run_dir, whole[0])


@pytest.mark.long
def test_held_out_evaluations_change_nothing_of_what_is_trained(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    held_out = ("env.eval.tasks=[reach-green]", "env.eval.max_episode_steps=4")
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", *held_out)
    assert embodrl(*arguments, stop_at="act:11:SIGKILL").code == -signal.SIGKILL
    resume(run_dir)

    def trained(directory: Path) -> list[dict[str, object]]:
        return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(directory)]

    assert trained(run_dir) == trained(whole[0])
    rows = [row for row in metrics(run_dir) if "eval/episodes" in row]
    assert [row["eval/episode_length"] for row in rows] == [4.0, 4.0, 4.0]
    found = tmp_path / "eval.json"
    assert embodrl("eval", run_dir, "axes=colours", "--json", found, "--output", tmp_path / "eval").code == 0
    measured = json.loads(found.read_text())
    assert measured["success_rate"] == rows[-1]["eval/success_rate"]
    assert {episode["task"] for episode in measured["per_episode"]} == {"reach-green"}
    colours = measured["axes"]["colours"]["per_episode"]
    assert {episode["task"] for episode in colours} == {"reach-green"} and len(colours) == measured["episodes"]
    assert {episode["instruction"].split()[-2] for episode in colours} == {"red", "blue"}  # green is another colour now


@pytest.mark.long
def test_decoupling_a_synchronous_run_changes_nothing_not_even_after_resuming(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", "--config", config, f"runner.output_dir={run_dir}", "algorithm.decoupled.enabled=true")
    assert embodrl(*arguments, stop_at="act:11:SIGKILL").code == -signal.SIGKILL
    resume(run_dir)
    rows = metrics(run_dir)
    for row in rows[1:]:  # the version stamped on a chunk is the engine's, while the critic warms up, too
        assert row["staleness/mean"] == row["staleness/max"] == 0
        assert row["train/behavior_weight_mean"] == row["train/behavior_weight_max"] == 1
    added = ("staleness/", "train/behavior_")
    assert [{k: v for k, v in row.items() if not k.startswith(added)} for row in rows] == metrics(whole[0])
    left, right = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, whole[0]))
    assert all(left[name].equal(right[name]) for name in left)


@pytest.mark.long
def test_a_run_continues_without_its_warm_start_and_from_another_directory(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(whole[0] / "policy", tmp_path / "warm")
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", config, "model.warm_start=warm"]
    assert embodrl("train", *arguments, "runner.output_dir=left").code == 0
    outcome = embodrl("train", *arguments, "runner.output_dir=run", stop_at="act:11:SIGKILL")
    assert outcome.code == -signal.SIGKILL
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["model"]["warm_start"] == str(tmp_path / "warm")
    shutil.rmtree(tmp_path / "warm")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "is missing" in resume(tmp_path / "run").stderr
    assert_same_run(tmp_path / "run", tmp_path / "left")


def test_a_stop_that_could_not_be_saved_is_reported(config: Path, tmp_path: Path) -> None:
    orders = "publish:1:EIO,act:6:SIGINT"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={tmp_path}", stop_at=orders)
    assert outcome.code == 1
    assert "could not save iteration 1, the last" in outcome.stderr and "will start over" in outcome.stderr
    assert "continues" not in outcome.stdout


@pytest.mark.parametrize(
    "stop_at",
    [
        "optimizer_step:3:SIGKILL:simulator",  # in an update
        "write_file:4:SIGKILL:simulator",  # while a checkpoint is written
        "log:3:SIGKILL:simulator",  # before the scenes are rebuilt and their states are requested
    ],
)
@pytest.mark.long
def test_a_simulator_that_dies_while_it_has_nothing_to_do_costs_a_restart(
    stop_at: str, config: Path, tmp_path: Path
) -> None:
    outcome = embodrl("train", "--config", config, f"runner.output_dir={tmp_path}", stop_at=stop_at)
    assert outcome.code == 0, outcome.stderr
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["env/restarts"] == 1
    assert "restart 1 of 10" in outcome.stderr


@pytest.mark.long
def test_a_closed_terminal_costs_the_screen_only(config: Path, tmp_path: Path) -> None:
    process = start("train", "--config", config, f"runner.output_dir={tmp_path}")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert [row["iteration"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert "standard output is lost" in (tmp_path / "logs" / "embodrl.log").read_text()


@pytest.mark.long
def test_a_finished_run_whose_checkpoint_could_not_be_saved_fails(config: Path, tmp_path: Path) -> None:
    outcome = embodrl(
        "train",
        "--config",
        config,
        f"runner.output_dir={tmp_path}",
        "runner.max_iterations=1",
        "actor.optim.critic_warmup_iterations=0",
        stop_at="publish:1:EIO",
    )
    assert outcome.code == 1
    assert "could not save iteration 1, the last" in outcome.stderr
    assert (tmp_path / "policy" / "config.json").is_file()


@pytest.mark.parametrize(
    ("stop_at", "code", "checkpoint"),
    [
        _long("decide:2:SIGINT", 130, "step_0"),  # in the first evaluation
        _long("act:2:SIGTERM", 143, "step_0"),  # in the first rollout
        _long("act:6:SIGINT", 130, "step_1"),  # in a rollout, away from the schedule
        _long("act:6:SIGHUP", 129, "step_1"),  # the terminal was closed
        ("optimizer_step:10:SIGTERM", 143, "step_3"),  # in an update: it is finished first
        _long("decide:6:SIGINT", 130, "step_2"),  # in the evaluation after iteration 2
    ],
)
def test_a_signal_saves_and_the_run_continues_from_there(
    stop_at: str, code: int, checkpoint: str, whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", stop_at=stop_at, children=children)
    assert outcome.code == code, outcome.stderr
    assert f"embodrl resume {run_dir}" in outcome.stdout
    assert_gone(children)
    assert checkpoint in [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert f"resuming from {run_dir / 'checkpoints' / checkpoint}" in resume(run_dir).stdout
    assert_same_run(run_dir, whole[0])


@pytest.mark.parametrize(
    ("stop_at", "code"),
    [
        ("act:1:SIGINT,act:2:SIGINT:later", 130),
        _long("optimizer_step:1:SIGINT,optimizer_step:2:SIGTERM:later", 143),
        ("wait_started:1:SIGINT", 130),  # nothing to save yet
        _long("wait_started:1:SIGTERM", 143),
    ],
)
def test_a_second_signal_or_one_at_the_start_ends_at_once(
    stop_at: str, code: int, config: Path, tmp_path: Path
) -> None:
    run_dir, children = tmp_path / "run", tmp_path / "children"
    # Two stages: the policy is asked twice before the loop looks at the signal.
    stages = ["rollout.pipeline_stages=2"] if stop_at.startswith("act") else []
    outcome = embodrl(
        "train", "--config", config, f"runner.output_dir={run_dir}", *stages, stop_at=stop_at, children=children
    )
    assert outcome.code == code, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert_gone(children)
    assert not list(run_dir.glob("checkpoints/*"))


def test_a_signal_from_outside_ends_every_process(config: Path, tmp_path: Path) -> None:
    process = start("train", "--config", config, f"runner.output_dir={tmp_path}", "runner.max_iterations=100000")
    path, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 120
    while not path.is_file() or len(path.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    children = tmp_path / "children"
    import psutil

    children.write_text("\n".join(str(child.pid) for child in psutil.Process(process.pid).children(recursive=True)))
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert_gone(children)
    done = metrics(tmp_path)[-1]["iteration"]
    assert (tmp_path / "checkpoints" / f"step_{done}").is_dir()


@pytest.mark.parametrize("damage", [_long("torn"), "flipped"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    damage: str, whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    copy(whole[0], run_dir)
    path = run_dir / "checkpoints" / "step_4" / "policy.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "torn":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcome = resume(run_dir)
    assert "step_4 is not used" in outcome.stderr
    assert f"resuming from {run_dir / 'checkpoints' / 'step_2'}" in outcome.stdout
    assert "step_4 is not used" in (run_dir / "logs" / "embodrl.log").read_text()
    assert_same_run(run_dir, whole[0])


def test_a_run_without_an_intact_checkpoint_is_refused_and_left_alone(
    whole: tuple[Path, Outcome], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    copy(whole[0], run_dir)
    for path in run_dir.glob("checkpoints/*/state.json"):
        path.write_text("{}")
    before = (run_dir / "metrics.jsonl").read_bytes()
    outcome = embodrl("resume", run_dir)
    assert outcome.code == 1
    assert "is intact" in outcome.stderr and "hint" in outcome.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_finished_run_is_left_alone_and_continues_when_asked(whole: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    copy(whole[0], run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "logs"}
    outcome = resume(run_dir)
    assert "run already complete (4/4 iterations)" in outcome.stdout
    assert before == {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.parent.name != "logs"}

    outcome = embodrl("resume", run_dir, "runner.max_iterations=5", "cluster.num_threads=2")
    assert outcome.code == 2 and "resume with cluster.num_threads=1" in outcome.stderr

    outcome = embodrl("resume", run_dir, "runner.max_iterations=5", "env.num_processes=1")
    assert outcome.code == 2 and "resume with env.num_processes=2" in outcome.stderr

    outcome = embodrl("resume", run_dir, "runner.max_iterations=3")
    assert outcome.code == 2 and "runner.max_iterations" in outcome.stderr

    assert embodrl("resume", run_dir, "runner.max_iterations=5").code == 0
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[:5] == metrics(whole[0])
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["runner"]["max_iterations"] == 5


def test_what_can_not_work_is_refused_before_anything_starts(
    whole: tuple[Path, Outcome], config: Path, tmp_path: Path
) -> None:
    outcome = embodrl("train", "--config", config, f"runner.output_dir={whole[0]}")
    assert outcome.code == 1 and "holds an earlier run" in outcome.stderr

    outcome = embodrl("train", "--config", config, "runner.output_dir=/proc/none/run")
    assert outcome.code == (2 if "The configuration" in outcome.stderr else 1)
    assert "can't be written" in outcome.stderr and "hint" in outcome.stderr

    outcome = embodrl("resume", tmp_path)
    assert outcome.code == 2 and "code: not-a-run" in outcome.stderr
    import torch

    if not torch.cuda.is_available():
        run_dir = tmp_path / "run"
        outcome = embodrl("train", "--config", config, f"runner.output_dir={run_dir}", "cluster.device=cuda")
        assert outcome.code in (1, 2) and "GPU" in outcome.stderr
        assert not run_dir.exists()


def test_a_policy_of_a_run_is_measured(whole: tuple[Path, Outcome], tmp_path: Path) -> None:
    run_dir, result = whole[0], tmp_path / "result.json"
    outcome = embodrl(
        "eval", "--config", run_dir / "config.yaml", f"model.warm_start={run_dir / 'policy'}", "--json", result
    )
    assert outcome.code == 0, outcome.stderr
    found = json.loads(result.read_text())
    last = metrics(run_dir)[-1]
    assert found["episodes"] == 6
    assert found["success_rate"] == last["eval/success_rate"]
    assert found["mean_return"] == last["eval/return"]
    assert found["per_task"].keys() == {"reach-red", "reach-green"}


def test_demonstrations_fine_tuning_and_evaluation(config: Path, tmp_path: Path) -> None:
    demos, tuned = tmp_path / "demos", tmp_path / "sft"
    settings = ["env.max_episode_steps=21", "collect.format=raw"]
    outcome = embodrl("collect", "--config", config, f"collect.output_dir={demos}", *settings)
    assert outcome.code == 0, outcome.stderr
    index = json.loads((demos / "index.json").read_text())
    assert [episode["task"] for episode in index["episodes"]].count("reach-red") == 3
    assert len(index["episodes"]) == 6 and all(episode["success"] for episode in index["episodes"])

    settings = [f"sft.data_dir={demos}", f"sft.output_dir={tuned}", "sft.max_steps=30", "sft.batch_size=8"]
    settings += ["sft.lr_warmup_steps=3", "sft.log_interval=10", "sft.lr=3.0e-3"]
    outcome = embodrl("sft", "--config", config, *settings)
    assert outcome.code == 0, outcome.stderr
    rows = [json.loads(line) for line in (tuned / "sft_metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[-1]["loss"] < rows[0]["loss"]

    result = tmp_path / "result.json"
    outcome = embodrl("eval", "--config", config, f"model.warm_start={tuned / 'policy'}", "--json", result)
    assert outcome.code == 0, outcome.stderr
    assert json.loads(result.read_text())["episodes"] == 6


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
