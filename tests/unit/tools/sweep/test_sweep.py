"""Sweeps: which runs they stand for, and the queue; the runs themselves are stand-ins written in shell."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from expect import raises_code
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.config.argument_file import read_arguments
from embodrl.errors import ConfigError, EmbodrlError, OutputError, UsageError
from embodrl.tools.sweep import runs as sweeps
from embodrl.tools.sweep.combinations import SweptRun, expand_sweep
from embodrl.tools.sweep.runs import Sweep, make_slots, new_sweep, read_sweep, run_sweep, slurm_script, submit_to_slurm

ROW = '{{"iteration": 3, "env_steps": 30}}'
DONE = f"mkdir -p {{run}}/policy; echo '{ROW}' > {{run}}/metrics.jsonl; touch {{run}}/report.html"


def test_every_combination_is_a_run() -> None:
    runs = expand_sweep(["env=toy", "runner.seed=1,2", "algorithm=choice(ppo,grpo)", "env.tasks=[reach-red]"])
    assert [run.name for run in runs] == [
        *("seed-1_algorithm-ppo", "seed-1_algorithm-grpo", "seed-2_algorithm-ppo", "seed-2_algorithm-grpo"),
    ]
    assert runs[1].overrides == ("env=toy", "runner.seed=1", "algorithm=grpo", "env.tasks=[reach-red]")
    assert [run.overrides[0] for run in expand_sweep(["runner.seed=range(0,6,2)"])] == [
        *("runner.seed=0", "runner.seed=2", "runner.seed=4"),
    ]


def test_names_are_unique_and_hold_no_odd_characters() -> None:
    same = expand_sweep(["actor.optim.lr=3,4", "critic.lr=1,2"])
    assert same[0].name == "actor.optim.lr-3_critic.lr-1"
    odd = expand_sweep(["env.tasks=[a],'[a]'"])
    assert len({run.name for run in odd}) == 2
    assert all("/" not in run.name and "[" not in run.name for run in odd)
    assert {run.name for run in expand_sweep(["model.model_path=/a/b,../c"])} == {"model_path-a-b", "model_path-c"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["runner.seed=1"], "sweep-single"),
        (["runner.seed=range(0,2000)"], "sweep-size"),
        (["actor.optim.lr=interval(0,1)"], "sweep-kind"),
        (["env=glob(*)"], "sweep-kind"),
    ],
)
def test_what_is_no_sweep_is_refused(arguments: list[str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_sweep(arguments)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_all_runs_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    arguments = ["env=toy", "algorithm=ppo,grpox", "algorithm.gamma=0.5,7", "runner.output_dir=x"]
    with pytest.raises(ConfigError) as caught:
        new_sweep(arguments, None, tmp_path / "sweep")
    problems = {problem.code: problem for problem in caught.value.problems}
    assert {"preset-unknown", "sweep-directory"} < problems.keys()
    assert "algorithm-grpox_gamma-0.5" in problems["preset-unknown"].message
    assert "(in" not in problems["sweep-directory"].message  # all of them
    assert any("gamma-7" in problem.message for problem in problems.values())
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_is_written_and_read_again(tmp_path: Path) -> None:
    made = new_sweep(["env=toy", "runner.seed=0,1", "runner.max_iterations=3"], None, tmp_path)
    assert read_sweep(tmp_path) == made
    assert made.max_iterations == (3, 3)
    with raises_code("sweep-exists", OutputError, str(tmp_path)):
        new_sweep(["env=toy", "runner.seed=0,1"], None, tmp_path)


def test_resume_continues_a_sweep_without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_sweep(["env=toy", "runner.seed=0,1"], None, tmp_path)
    done: list[Sweep] = []
    monkeypatch.setattr(sweeps, "run_sweep", lambda sweep: done.append(sweep) or 7)
    assert CliRunner().invoke(app, ["resume", str(tmp_path)]).exit_code == 7 and done == [made]
    refused = CliRunner().invoke(app, ["resume", str(tmp_path), "runner.seed=3"])
    assert refused.exit_code == 2 and "sweep-settings" in refused.stderr and done == [made]
    content = json.loads((tmp_path / "sweep.json").read_text())
    content["runs"][0]["name"] = "../elsewhere"
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    with raises_code("output", OutputError, "elsewhere"):
        read_sweep(tmp_path)


def stand_in(monkeypatch: pytest.MonkeyPatch, directory: Path, scripts: list[str], jobs: int = 1) -> Sweep:
    """A sweep whose runs are shell scripts, in which {run} stands for the directory of the run."""
    runs = [SweptRun(f"seed-{index}", ()) for index in range(len(scripts))]
    sweep = Sweep(directory, tuple(runs), None, (3,) * len(runs), jobs, "local", ())
    (directory / "logs").mkdir(parents=True, exist_ok=True)

    def command(self: Sweep, index: int) -> list[str]:
        return ["bash", "-c", scripts[index].format(run=shlex.quote(str(self.path(index))))]

    monkeypatch.setattr(Sweep, "command", command)
    return sweep


def test_a_failed_run_does_not_stop_the_others_and_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = stand_in(monkeypatch, tmp_path, [DONE, "echo broken; exit 3", DONE])
    assert run_sweep(sweep) == 1
    assert sweep.unfinished() == [1]
    assert (tmp_path / "logs" / "seed-1.log").read_text() == "broken\n"
    assert "seed-2" in (tmp_path / "comparison.html").read_text()
    again = stand_in(monkeypatch, tmp_path, ["exit 9", DONE, "exit 9"])
    assert run_sweep(again) == 0
    assert again.unfinished() == []


def test_progress_names_the_runs_and_counts_their_own_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, str]] = []

    def update(_: object, done: int, note: str) -> None:
        shown.append((done, note))
        if done == 3:  # it waits until it was seen
            (tmp_path / "go").touch()

    monkeypatch.setattr(sweeps.Progress, "update", update)
    monkeypatch.setattr(sweeps, "POLL_S", 0.02)
    waits = f"mkdir -p {{run}}; echo '{ROW}' > {{run}}/metrics.jsonl; until [ -e {{run}}/../go ]; do sleep 0.02; done; "
    assert run_sweep(stand_in(monkeypatch, tmp_path, [waits + DONE])) == 0
    assert (3, "0 of 1 runs done; seed-0 3/3") in shown
    assert shown[-1] == (3, "1 of 1 runs done")


def test_runs_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.os, "sched_getaffinity", lambda pid: set(range(5)))
    bound: list[tuple[int, ...]] = []
    slots = make_slots(2)
    assert [slot.cores for slot in slots] == [(0, 1), (2, 3, 4)]
    monkeypatch.undo()
    monkeypatch.setattr(sweeps.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [slot.gpus for slot in make_slots(1)] == [("4", "7")]
    both = 'printf %s "$CUDA_VISIBLE_DEVICES" > {run}.gpus; ' + DONE
    assert run_sweep(stand_in(monkeypatch, tmp_path, [both])) == 0
    assert (tmp_path / "seed-0.gpus").read_text() == "4,7"


def test_too_many_runs_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for jobs, what in ((4, "cores"), (3, "GPUs")):
        with raises_code("sweep-jobs", EmbodrlError, what):
            make_slots(jobs)


def test_a_signal_stops_all_runs_which_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = "trap 'touch {run}.saved; exit 143' TERM; "
    waits = "while :; do sleep 0.02; done"
    signals = "until [ -e {run}/../started ]; do sleep 0.02; done; kill -TERM $PPID; "
    scripts = [saves + signals + waits, saves + "touch {run}/../started; " + waits, "touch {run}.never"]
    monkeypatch.setattr(sweeps, "make_slots", lambda jobs: [sweeps.Slot((0,), None)] * jobs)
    monkeypatch.setattr(sweeps.os, "sched_setaffinity", lambda pid, cores: None)
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-1").mkdir()
    sweep = stand_in(monkeypatch, tmp_path, scripts, jobs=2)
    assert run_sweep(sweep) == 143
    assert (tmp_path / "seed-0.saved").exists() and (tmp_path / "seed-1.saved").exists()
    assert not (tmp_path / "seed-2.never").exists()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch that accepts every script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text("#!/bin/bash\ngrep -q 'SBATCH --bad' $2 && echo 'unknown option' >&2 && exit 1\necho 17\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path / "sweep"


def test_slurm_gets_one_array_whose_jobs_start_or_continue_their_runs(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "stand_in" / "embodrl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(*sys.argv[1:])\n")
    # What lies in the current directory, perhaps the sweep of somebody else, is not imported.
    (tmp_path / "embodrl.py").write_text("print('foreign code ran')\n")
    monkeypatch.chdir(tmp_path)
    sweep = new_sweep(["env=toy", "runner.seed=0,1,2"], None, slurm, 2, "slurm", ["--gpus=1"])
    assert submit_to_slurm(sweep) == "17"
    script = slurm / "sweep.sbatch"
    assert "#SBATCH --array=0,1,2%2\n" in script.read_text() and "#SBATCH --gpus=1\n" in script.read_text()

    def job(index: int) -> str:
        environment = {"SLURM_ARRAY_TASK_ID": str(index), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(package.parent)}
        return subprocess.check_output(["bash", script], env=environment, text=True, timeout=60)

    settings = slurm / "settings" / "seed-1.yaml"
    assert job(1) == f"train @{settings} runner.output_dir='{slurm / 'seed-1'}'\n"
    assert read_arguments(settings)[0] == ["env=toy", "runner.seed=1"]
    (slurm / "seed-1" / "checkpoints" / "step_4").mkdir(parents=True)
    assert job(1) == f"resume {slurm / 'seed-1'}\n"
    (slurm / "seed-2").mkdir()
    (slurm / "seed-2" / "metrics.jsonl").touch()  # its node has failed before the first checkpoint
    assert job(2) == f"resume {slurm / 'seed-2'}\n"
    (slurm / "seed-0" / "policy").mkdir(parents=True)
    (slurm / "seed-0" / "report.html").touch()
    assert "#SBATCH --array=1,2%2\n" in slurm_script(read_sweep(slurm))


def test_slurm_signals_the_run_and_keeps_the_log_of_a_job_that_is_requeued(slurm: Path) -> None:
    sweep = new_sweep(["env=toy", "runner.seed=0,1"], None, slurm.parent / "it's 5%A", 1, "slurm")
    directives = [line for line in slurm_script(sweep).splitlines() if line.startswith("#SBATCH ")]
    assert {"#SBATCH --signal=B:TERM@60", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(directives)
    words = [word for line in directives for word in shlex.split(line, comments=False)[1:]]
    assert f"--output={slurm.parent}/it's 5%%A/logs/slurm-%A_%a.log" in words and "--job-name=it's 5%A" in words


def test_slurm_itself_takes_the_script(tmp_path: Path) -> None:
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], check=False, capture_output=True).returncode:
        pytest.skip("there is no Slurm here")
    sweep = new_sweep(
        ["env=toy", "runner.seed=0,1"], None, tmp_path / "it's 5%A", 1, "slurm", ["--time=10", "--comment=two words"]
    )
    (tmp_path / "script").write_text(slurm_script(sweep))
    tried = subprocess.run(["sbatch", "--test-only", tmp_path / "script"], check=False, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr


def test_slurm_that_is_missing_or_refuses(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = new_sweep(["env=toy", "runner.seed=0,1"], None, slurm, 1, "slurm", ["--bad"])
    with raises_code("sweep-slurm", EmbodrlError, "unknown option"):
        submit_to_slurm(refused)
    monkeypatch.setenv("PATH", "/nowhere")
    with raises_code("sweep-slurm", EmbodrlError, "not installed"):
        new_sweep(["env=toy", "runner.seed=0,1"], None, slurm / "other", 1, "slurm")


def test_metrics_that_can_not_be_read_do_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = "mkdir -p {run}/metrics.jsonl {run}/policy; touch {run}/report.html"
    sweep = stand_in(monkeypatch, tmp_path, [unreadable, DONE])
    assert run_sweep(sweep) == 0
    assert sweep.unfinished() == []


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this user's secret."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("EMBODRL_TRUST", raising=False)
    return tmp_path / "state"


def foreign(directory: Path, *overrides: str, **changes: object) -> Path:
    """The directory of a sweep as somebody else may send it."""
    directory.mkdir()
    run = {"name": "seed-1", "overrides": ["env=toy", "model=mlp", *overrides], "max_iterations": 1}
    content = {"config_file": None, "jobs": 1, "backend": "local", "slurm": [], "runs": [run]}
    (directory / "sweep.json").write_text(json.dumps(content | changes))
    return directory


@pytest.mark.parametrize(
    ("overrides", "changes", "key"),
    [
        (["env.python=/tmp/program"], {}, "env.python"),
        (["extensions=[evil_ext]"], {}, "extensions"),
        (["reward.fn='evil_ext:fn'"], {}, "reward.fn"),
        (["env={python: /tmp/program}"], {}, "env.python"),
        (["presets.dirs=[/tmp]"], {}, "presets.dirs"),
        ([], {"config_file": "/tmp/settings.yaml"}, "config_file"),
        ([], {"backend": "slurm", "slurm": ["--wrap=program"]}, "slurm"),
    ],
)
def test_resume_runs_no_code_that_a_sweep_of_somebody_else_names(
    overrides: list[str],
    changes: dict[str, object],
    key: str,
    user: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Sweep] = []
    monkeypatch.setattr(sweeps, "run_sweep", lambda sweep: done.append(sweep) or 0)
    monkeypatch.setattr(sweeps, "submit_to_slurm", lambda sweep: done.append(sweep) or "")
    directory = foreign(tmp_path / "sweep", *overrides, **changes)
    with raises_code("settings-run-code", ConfigError, key):
        read_sweep(directory)
    refused = CliRunner().invoke(app, ["resume", str(directory)])
    assert refused.exit_code == 2 and "settings-run-code" in refused.stderr and done == []
    assert CliRunner().invoke(app, ["resume", str(directory), "--trust"]).exit_code == 0
    assert len(done) == 1 and "--trust" in done[0].command(0)


def test_a_run_of_a_sweep_reads_its_settings_with_their_trust(user: Path, tmp_path: Path) -> None:
    program = f"env.python={sys.executable}"
    sweep = new_sweep(["env=toy", program, "runner.seed=0,1"], None, tmp_path / "mine")
    sweep.write_settings()
    argument = f"@{sweep.settings_file(1)}"
    loaded = load_config([argument, "runner.name=last"])
    assert (loaded.config.runner.seed, loaded.config.runner.name) == (1, "last")
    assert loaded.config.env.python == sys.executable and loaded.origins["runner.seed"].kind == "file"
    assert not any("env.python" in text or "runner.seed" in text for text in sweep.command(1))
    assert read_sweep(sweep.directory) == sweep
    shutil.rmtree(user)  # the secret of another user
    with raises_code("settings-run-code", ConfigError, "env.python"):
        load_config([argument])
    with raises_code("settings-run-code", ConfigError, "env.python"):
        read_sweep(sweep.directory)


def test_settings_of_a_foreign_sweep_reach_its_runs_without_approval(user: Path, tmp_path: Path) -> None:
    sweep = read_sweep(foreign(tmp_path / "sweep", "runner.seed=3"))
    sweep.write_settings()
    assert load_config([f"@{sweep.settings_file(0)}"]).config.runner.seed == 3
    lying = replace(sweep, runs=(SweptRun("seed-1", ("env=toy", "env.python=/tmp/program", "--trust")),))
    lying.write_settings()
    with raises_code("settings-run-code", ConfigError, "env.python"):
        load_config([f"@{sweep.settings_file(0)}"])


@pytest.mark.parametrize("content", ["env=toy\n", "- 3\n", '- "env=toy"\nx', "- [\n"])
def test_what_is_no_file_of_arguments_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    for path in (tmp_path / "file", tmp_path / "missing", tmp_path):
        with raises_code("argument-file", ConfigError):
            load_config([f"@{path}"])


@pytest.mark.parametrize("option", ["--gpus=1\ntouch owned", "gpus", ""])
def test_options_of_slurm_are_no_further_lines_of_the_script(option: str, slurm: Path) -> None:
    with raises_code("sweep-slurm-line", UsageError):
        new_sweep(["env=toy", "runner.seed=0,1"], None, slurm, 1, "slurm", [option])
    with raises_code("sweep-slurm-line", UsageError):
        new_sweep(["env=toy", "runner.seed=0,1"], None, slurm / "a\ntouch owned", 1, "slurm")
    assert not slurm.exists()
    with raises_code("sweep-slurm-line", UsageError):
        read_sweep(foreign(slurm, backend="slurm", slurm=[option]))
