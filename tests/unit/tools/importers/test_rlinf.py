"""Recipes of RLinf become configurations of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.config.presets import presets
from embodrl.config.rlinf import RLINF_KEYS, find_key
from embodrl.errors import ConfigError
from embodrl.specs import ADVANTAGES, ENVS, LOSSES, MODELS
from embodrl.tools.importers.cli import report
from embodrl.tools.importers.recipe import MAX_FILES, read_recipe
from embodrl.tools.importers.rlinf import Import, import_rlinf

RECIPES = Path(__file__).resolve().parents[5] / "shared" / "rlinf_recipes"
RECIPE = """
defaults:
  - env/pick@env.train
  - model/net@actor.model
  - override hydra/job_logging: stdout
  - env/absent@env.eval
algorithm: {adv_type: gae, loss_type: actor_critic, gamma: 0.9, kl_beta: 0.1, clip_ratio_low: 0.2}
env:
  group_name: EnvGroup
  train: {total_num_envs: 64, rollout_epoch: 2, group_size: "${algorithm.group_size}"}
  eval: {total_num_envs: 16, rollout_epoch: 3, max_episode_steps: 50, max_steps_per_rollout_epoch: 100}
runner: {max_epochs: 100, max_steps: 30, val_check_interval: -1, logger: {log_path: "${oc.env:HOME}/x"}}
actor:
  seed: 7
  optim: {lr: 3e-4, adam_beta1: 0.9, adam_beta2: 0.99, lr_scheduler: torch_constant, lr_warmup_steps: 20}
  invented: 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for name, text in {
        "env/pick.yaml": "env_type: maniskill\nmax_episode_steps: 50\ninit_params:\n  id: PickCube-v1\n"
        "  max_episode_steps: ${..max_episode_steps}\n  sensor_configs: {width: 96}",
        "model/net.yaml": "model_type: mlp_policy\naction_dim: 7",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_becomes_a_valid_configuration(recipe: Path) -> None:
    found = import_rlinf(recipe)
    assert found.presets == {"env": "maniskill_pick", "model": "mlp", "algorithm": "ppo"}
    assert {key: found.settings[key] for key in ("runner.max_iterations", "env.eval.num_episodes", "runner.seed")} == {
        "runner.max_iterations": 30,  # the smaller limit
        "env.eval.num_episodes": 96,  # 16 environments, 3 rollouts of two episodes
        "runner.seed": 7,
    }
    assert found.settings["actor.optim.betas"] == [0.9, 0.99] and found.settings["actor.optim.lr"] == 3e-4
    config = load_config(["actor.global_batch_size=64", "actor.micro_batch_size=64"], found.document()).config
    assert config.env.cameras[0].width == 96 and config.algorithm.rollout_epoch == 2


def test_every_key_is_reported_once_with_its_reason(recipe: Path) -> None:
    found = import_rlinf(recipe)
    groups = {answer.key: answer.group for answer in found.answers}
    assert len(found.answers) == len(groups) == len(found.recipe.values)
    assert groups["algorithm.gamma"] == "mapped" and groups["algorithm.clip_ratio_low"] == "default"
    assert groups["env.group_name"] == "meaningless" and groups["algorithm.kl_beta"] == "unread"
    assert groups["actor.invented"] == groups["actor.optim.lr_warmup_steps"] == "unsupported"
    assert groups["runner.logger.log_path"] == "unsupported" and "runner.output_dir" not in found.settings
    assert found.recipe.missing == ["env/absent@env.eval"]
    text = "\n".join(report(recipe, found))
    assert all(answer.line() in text for answer in found.answers) and "env/absent" in text


def refusals(found: Import, *arguments: str) -> set[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments], found.document())
    return {(problem.code, problem.key) for problem in caught.value.problems}


def test_what_is_not_here_is_refused_until_something_is_chosen(recipe: Path, tmp_path: Path) -> None:
    (recipe.parent / "env" / "pick.yaml").write_text("env_type: calvin")
    found = import_rlinf(recipe)
    assert "env" not in found.presets and found.missing == {"env": "calvin"}
    assert "choose it yourself: env, RLinf's is calvin" in report(recipe, found)
    outcome = CliRunner().invoke(app, ["import", "rlinf", str(recipe), "--out", str(tmp_path / "mine.yaml")])
    assert outcome.exit_code == 0 and "mine.yaml env=...`" in outcome.stdout
    assert "# Choose env: RLinf's calvin is not here." in (tmp_path / "mine.yaml").read_text()
    assert ("preset-unknown", "env") in refusals(found)
    fitting = ("env=maniskill", "actor.global_batch_size=64", "actor.micro_batch_size=64")
    assert load_config([*fitting], found.document()).config.env.env_type == "maniskill"


def test_a_task_that_is_not_here_is_unsupported(recipe: Path) -> None:
    (recipe.parent / "env" / "pick.yaml").write_text("env_type: maniskill\ninit_params: {id: PourTea-v1}")
    found = import_rlinf(recipe)
    assert found.presets["env"] == "maniskill" and found.missing == {"env.tasks": "PourTea-v1"}
    assert "env.tasks" not in found.settings
    assert {key for _, key in refusals(found)} & {"env.tasks", "env.tasks.0"}


def test_a_path_that_the_launch_script_fills_in_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("a: {b: null}\nc: ${a.b}/data\nd: ${a.b}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.unresolved == ["c"] and recipe.values["d"] is None


@pytest.fixture(scope="module")
def imported() -> dict[str, Import]:
    if not RECIPES.is_dir():
        pytest.skip("RLinf's recipes are not at hand")
    return {path.name: import_rlinf(path) for path in sorted(RECIPES.glob("*.yaml"))}


def test_every_name_that_is_written_exists(imported: dict[str, Import]) -> None:
    for recipe, found in imported.items():
        for group, name in found.presets.items():
            assert name in presets(group), f"{recipe}: {group}={name}"
        registered: dict[str, list[str]] = {
            "algorithm.loss_type": LOSSES.names(),
            "algorithm.adv_type": ADVANTAGES.names(),
            "env.env_type": ENVS.names(),
            "env.suite": list(ENVS.entry("libero").suites),
            "env.tasks": [task for spec in ENVS.all() for task in spec.instructions()],
            "model.model_type": MODELS.names(),
        }
        for key, known in registered.items():
            written = found.settings.get(key, [])
            assert set(written if isinstance(written, list) else [written]) <= set(known), f"{recipe}: {key}"


def test_a_value_that_is_refused_here_is_not_mapped(imported: dict[str, Import]) -> None:
    found = imported["libero_object_0_nft_openpi.yaml"]
    (answer,) = (one for one in found.answers if one.key == "actor.model.openpi.noise_level")
    assert answer.group == "unsupported" and "model.flow.noise_level" not in found.settings


@pytest.mark.parametrize(
    ("text", "code"), [("a: [", "config-yaml-syntax"), ("- 1", "config-yaml-mapping"), ("a: 1\na: 2", None)]
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str, code: str | None) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert code is None or caught.value.problems[0].code == code


def test_interpolations_end(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text("a: ${b}\nb: ${a}\nc: ${c}x${c}\nd: {e: '${.f}', f: '3', g: 'v${d.f}'}")
    recipe = read_recipe(path)
    assert set(recipe.unresolved) == {"a", "b", "c"}
    assert recipe.values["d.e"] == "3" and recipe.values["d.g"] == "v3"


def test_defaults_stay_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("a: 1")
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "recipe.yaml"
    path.write_text("defaults: ['../secret@b', '/etc/passwd@c', 'x/../secret@d']\nz: 1")
    assert read_recipe(path).values == {"z": 1}


def test_each_pattern_is_reached() -> None:
    """An entry behind one that matches the same keys would never count."""
    for entry in RLINF_KEYS:
        if entry.is_literal:
            assert find_key(entry.pattern) is entry, entry.pattern


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("algorithm.clip_ratio_c", "algorithm.clip_ratio_dual"),
        ("algorithm.kl_beta", "algorithm.kl.coef"),
        ("env.train.rollout_epoch", "algorithm.rollout_epoch"),
        ("env.num_envs", "env.train.total_num_envs"),
        ("actor.seed", "runner.seed"),
        ("runner.logger.log_path", "runner.output_dir"),
        ("rollout.model", "model"),
        ("runner.resume_dir", ""),
        ("env.eval.video_cfg.save_video", "env.video"),
        ("name", "runner.name"),
        ("steps", "runner.max_iterations"),
    ],
)
def test_a_key_that_is_typed_is_answered_by_the_table(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", f"{key}=1"])
    assert caught.value.problems[0].nearest == near


def test_the_recipes_of_rlinf_are_read(imported: dict[str, Import]) -> None:
    found = list(imported.values())
    read, unsupported = sum(one.num_read for one in found), sum(one.count("unsupported") for one in found)
    assert len(found) == 115 and 1 - unsupported / read >= 0.8
    assert not [answer.key for one in found for answer in one.answers if answer.note.startswith("not known")]


@pytest.mark.skipif(not RECIPES.is_dir(), reason="RLinf's recipes are not at hand")
@pytest.mark.parametrize("name", ["maniskill_ppo_mlp", "libero_spatial_ppo_openpi_pi05", "maniskill_sac_mlp"])
def test_recipes_of_rlinf_whose_parts_exist_are_valid(name: str) -> None:
    document = import_rlinf(RECIPES / f"{name}.yaml").document()
    load_config(["model.model_path=null", "model.unnorm_key=null"], document)


def test_files_that_name_each_other_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    many = [f"env/f{number}" for number in range(40)]
    for name in ("recipe.yaml", *(f"{entry}.yaml" for entry in many)):
        (tmp_path / name).write_text(yaml.safe_dump({"defaults": many}))
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.num_files == MAX_FILES and recipe.missing
