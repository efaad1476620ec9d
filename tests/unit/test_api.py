"""The public API: names, laziness, configurations, and errors."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expect import raises_code
from pydantic import Field

import embodrl
from embodrl.config.schema import PositiveFloat, Section, algorithm_of

ROOT = Path(__file__).parents[2]


def test_importing_the_package_is_fast_and_loads_no_torch() -> None:
    code = "import embodrl, sys; embodrl.load_config; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    alone = "import sys; before = set(sys.modules); import embodrl; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", alone], check=True, timeout=60, capture_output=True, text=True)
    assert [name for name in loaded.stdout.split() if name.startswith("embodrl.")] == ["embodrl.version"]


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


def test_errors_are_raised_and_nothing_exits(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with raises_code("run-exists"):
        embodrl.train({"env": "toy"}, [f"runner.output_dir={tmp_path / 'run'}"])
    with raises_code("policy-not-found"):
        embodrl.load_policy(tmp_path / "nothing")


def test_own_advantages_and_losses_have_names() -> None:
    def mine(*, rewards: object, valid: object, gamma: float) -> None:
        """Mine."""

    embodrl.register_advantage("test_api_mine", mine)
    from embodrl.specs import ADVANTAGES

    entry = ADVANTAGES.entry("test_api_mine")
    assert entry.description == "Mine." and not entry.needs_values
    with raises_code("function-parameter-unknown"):
        embodrl.register_loss("test_api_wrong", lambda logprob: None)


class SignConfig(Section):
    """Signs of returns."""

    scale: PositiveFloat = Field(default=1.0, description="of the advantages")


def test_own_advantages_have_settings_that_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sign(*, rewards: object, scale: float) -> None:
        """Signs."""

    embodrl.register_advantage("test_api_sign", sign, settings=SignConfig)
    chosen = ["env=toy", "algorithm=grpo", "algorithm.adv_type=test_api_sign"]
    config = embodrl.load_config([*chosen, "algorithm.test_api_sign.scale=2"]).config
    assert config.algorithm.arguments_of("estimator")["scale"] == 2.0
    again = algorithm_of(config.algorithm.model_dump_json())  # as training processes get it
    assert again == config.algorithm and type(config).model_validate_json(config.model_dump_json()) == config
    assert embodrl.load_config(chosen).config.algorithm.arguments_of("estimator")["scale"] == 1.0
    with raises_code("config-range"):
        embodrl.load_config([*chosen, "algorithm.test_api_sign.scale=0"])
    unread = embodrl.load_config(["env=toy", "algorithm.test_api_sign.scale=2"])
    assert "algorithm.test_api_sign" in {note.key for note in unread.notes}


def test_the_text_of_a_result_leaves_out_the_layers_of_its_policy(tmp_path: Path) -> None:

    from embodrl.runs.train import TrainResult

    policy = torch.nn.Linear(2, 2)
    text = repr(TrainResult(tmp_path, 0, policy))  # type: ignore[arg-type]
    assert "Linear" not in text and str(tmp_path) in text


def test_settings_as_keywords_are_answered_with_the_list() -> None:
    for verb in (embodrl.train, embodrl.load_config, embodrl.collect, embodrl.sft, embodrl.evaluate):
        with raises_code("settings-as-keywords") as caught:
            verb(env="toy")  # type: ignore[call-arg]
        assert f'embodrl.{verb.__name__}(["env=toy"])' in str(caught.value)


def test_results_are_short_and_have_the_success_rate(tmp_path: Path) -> None:
    from embodrl.runs.eval_result import EvaluationResult
    from embodrl.runs.train import TrainResult

    result = EvaluationResult(0.5, (0.4, 0.6), {}, [object()] * 500, 0)  # type: ignore[list-item]
    assert len(repr(result)) < 120 and "500 episodes" in repr(result)
    trained = TrainResult(tmp_path, 0, None)
    assert trained.success_rate is None
    rows = [{"iteration": 0, "eval/success_rate": 0.25}, {"iteration": 1}, {"iteration": 2, "eval/success_rate": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert trained.success_rate == 0.75
