"""Every model family is trained through the command line: imitation of demonstrations, then PPO.

Imitation must halve its loss on ManiSkill demonstrations. Success is compared where a policy of this size learns in
seconds, in ``corners.py``; in ManiSkill it takes minutes a family, which ``benchmarks/families.py`` does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from runs import HERE, embodrl, script

from embodrl.specs import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
# Those that act on an instruction.
FAMILIES = [name for name in MODELS if MODELS.entry(name).kind not in ("", "gaussian", "text")]


@pytest.fixture(scope="module")
def corner_demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demos") / "corners"
    settings = ["env=toy", "env.env_type=corners", "extensions=[corners]", "env.cameras=[{height: 32, width: 32}]"]
    settings += ["env.include_state=true", "env.pin_cpus=false", "collect.num_episodes=100"]
    outcome = embodrl("collect", *settings, f"collect.output_dir={directory}")
    assert outcome.code == 0, outcome.stderr
    return directory


@pytest.fixture(scope="module")
def push_demos(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """PushCube as the simulator draws it; None where it can't be run."""
    try:
        import mani_skill  # noqa: F401
    except ImportError:
        return None
    directory = tmp_path_factory.mktemp("demos") / "push"
    settings = ["env=maniskill", "env.render_backend=cpu", "env.cameras=[{height: 32, width: 32, fov_rad: 1.0}]"]
    settings += ["env.include_state=true", "env.train.total_num_envs=8", "collect.num_episodes=24"]
    outcome = embodrl("collect", *settings, f"collect.output_dir={directory}")
    if outcome.code == 1 and "Vulkan" in outcome.stderr:
        return None
    assert outcome.code == 0, outcome.stderr
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def result(
    request: pytest.FixtureRequest,
    corner_demos: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    return run_family(request.param, tmp_path_factory.mktemp(request.param), "corners", corner_demos)


def run_family(family: str, directory: Path, what: str, demos: Path) -> dict[str, Any]:
    script(HERE / "family_runs.py", family, directory, what, demos)
    return json.loads((directory / "result.json").read_text())


def test_imitation_halves_its_loss_and_beats_the_untrained_policy(result: dict[str, Any]) -> None:
    losses = result["corner_losses"]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert result["trained"] >= result["untrained"] + 0.3


@pytest.mark.sim
@pytest.mark.parametrize("family", FAMILIES)
def test_imitation_of_push_cube_halves_its_loss(family: str, push_demos: Path | None, tmp_path: Path) -> None:
    if push_demos is None:
        pytest.skip("mani_skill is not installed, or no Vulkan driver can render")
    losses = run_family(family, tmp_path, "push", push_demos)["push_losses"]
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


def test_ppo_changes_the_policy_and_stays_finite(result: dict[str, Any]) -> None:
    methods = [method for method in ("tokens", "flow_sde", "flow_noise") if method in result]
    assert methods == (["tokens"] if "tokens" in result else ["flow_sde", "flow_noise"])
    for method in methods:
        run = result[method]
        assert run["names_agree"]
        assert [row["iteration"] for row in run["rows"]][-3:] == [1, 2, 3]
        numbers = [value for row in run["rows"] for value in row.values() if isinstance(value, float)]
        assert numbers and all(math.isfinite(value) for value in numbers)
        assert all(math.isfinite(value) for value in run["moved"].values())
        # Of the policy, not of the critic alone.
        moved = [name for name, value in run["moved"].items() if value > 0 and not name.startswith("value_head")]
        assert len(moved) > 0.5 * len(run["moved"])
        assert any(name.startswith("value_head") and value > 0 for name, value in run["moved"].items())
