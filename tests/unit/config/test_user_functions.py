"""Functions named module:function: found, understood by their signature, and refused with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.names import call_named, import_function, nearest_module
from embodrl.specs import ADVANTAGES, LOSSES, MODELS
from embodrl.trainer.files import run_directory

ME = "test_user_functions"


def with_values(rewards: Any, values: Any, gamma: float) -> None:
    """An estimator with a critic."""


def with_groups(*, rewards: Any, group_id: Any, flavour: str = "mild") -> None:
    """An estimator without one."""


def curious(rewards: Any, weather: Any) -> None:
    """Asks for what is not there."""


def plain_loss(logprobs: Any, advantages: Any, valid: Any) -> None:
    """A loss without a critic."""


def wrapping_loss(*, logprobs: Any, **rest: Any) -> None:
    """A loss that hands on whatever it gets."""


class Pieces:
    """Functions of a user who writes classes."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def again(self) -> int:
        return self.count()

    @staticmethod
    def loss(logprobs: Any, advantages: Any, valid: Any) -> None:
        """A loss without a critic."""

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    class Inner:
        def here(self) -> str:
            return "inner"


class Needy:
    def __init__(self, size: int) -> None:
        self.size = size

    def count(self) -> int:
        return self.size


def test_a_method_is_named_by_its_class() -> None:
    count = import_function(f"{ME}:Pieces.count")
    assert count() == 1 and import_function(f"{ME}:Pieces.again")() == 2, "methods share an instance"
    assert import_function(f"{ME}:Pieces.name")() == "Pieces"
    assert import_function(f"{ME}:Pieces.Inner.here")() == "inner"
    assert import_function(f"{ME}:Pieces.loss") is Pieces.loss
    assert set(LOSSES.entry(f"{ME}:Pieces.loss").parameters) == {"logprobs", "advantages", "valid"}
    with raises_code("function-missing") as caught:
        import_function(f"{ME}:Pieces.cuont")
    assert f"{ME}:Pieces.count" in caught.value.hint
    with raises_code("method-instance"):
        import_function(f"{ME}:Needy.count")
    with raises_code("function-path"):
        import_function(f"{ME}:Pieces.")


def test_facts_follow_from_the_signature() -> None:
    handed_on = LOSSES.entry(f"{ME}:wrapping_loss").parameters
    assert {"prox_logprobs", "behavior_weights", "kl_coef", "clip_ratio_dual"} <= set(handed_on)
    assert set(LOSSES.entry(f"{ME}:plain_loss").parameters) == {"logprobs", "advantages", "valid"}
    entry = ADVANTAGES.entry(f"{ME}:with_values")
    assert entry.needs_values and not entry.needs_groups
    assert entry.description == "An estimator with a critic."
    grouped = ADVANTAGES.entry(f"{ME}:with_groups")
    assert grouped.needs_groups and not grouped.needs_values
    assert f"{ME}:with_groups" in ADVANTAGES and f"{ME}:missing" not in ADVANTAGES and "gae" in ADVANTAGES
    assert ADVANTAGES.get(f"{ME}:with_groups") is with_groups
    assert LOSSES.entry(f"{ME}:plain_loss").needs_values is False
    assert f"{ME}:with_values" not in MODELS, "models are registered"


def test_a_function_gets_what_it_names() -> None:
    assert call_named(lambda a, b=2: (a, b), {"a": 1, "c": 3}) == (1, 2)
    assert call_named(lambda a, **rest: (a, rest), {"a": 1, "c": 3}) == (1, {"c": 3})


def test_a_function_that_asks_for_what_is_not_there_is_refused() -> None:
    with raises_code("function-parameter-unknown") as caught:
        ADVANTAGES.entry(f"{ME}:curious")
    assert "rewards" in caught.value.hint and "group_id" in caught.value.hint


def test_a_module_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_mine.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises_code("function-import"):
        import_function("broken_module_of_mine:f")
    with raises_code("function-missing"):
        import_function("json:absent")
    with raises_code("function-not-callable"):
        import_function("string:digits")


GROUPED = (
    f"algorithm.adv_type='{ME}:with_groups'",
    "algorithm.loss_type=actor",
    "model.add_value_head=false",
    "actor.optim.critic_warmup_iterations=0",
    "env.train.ignore_terminations=true",
)


def test_rules_hold_for_functions_of_the_user_s() -> None:
    loaded = load_config([*GROUPED, "algorithm.group_size=8", "algorithm.gamma=0.5"])
    assert [note.key for note in loaded.notes] == ["algorithm.gamma"], "a parameter that it does not have"
    assert run_directory(loaded.config).name.startswith(f"maniskill-openvla-{ME}-with_groups-")
    with raises_code("groups-for-group-estimators"):
        load_config(list(GROUPED))
    with raises_code("critic-is-complete"):
        load_config([f"algorithm.adv_type='{ME}:with_values'", *GROUPED[1:]])


INERT = [
    ("algorithm.kl.estimator=k1", "algorithm.kl.coef is 0"),
    ("algorithm.filter.max_resamples=9", "algorithm.filter.enabled is false"),
    ("algorithm.srpo.steepness=3", "algorithm.srpo.enabled is false"),
    ("algorithm.srpo.encoder_path=x", "algorithm.srpo.enabled is false"),
    ("algorithm.length_normalized_ratio=true", "algorithm.logprob_type is token_level"),
    ("reward.retries=9", "nothing judges episodes"),
    ("algorithm.decoupled.level=chunk", "algorithm.decoupled.enabled is false"),
    ("algorithm.decoupled={enabled: true,cap: null,on_exceed: clamp}", "algorithm.decoupled.cap is null"),
]


@pytest.mark.parametrize(("setting", "reason"), INERT)
def test_a_setting_without_effect_is_reported(setting: str, reason: str) -> None:
    key = setting.partition("=")[0]
    notes = load_config([setting]).notes
    assert [note for note in notes if note.key.startswith(key) and reason in note.message]


@pytest.mark.parametrize(
    ("preset", "settings", "key"),
    [
        ("grpo", ("algorithm.huber_delta=1",), "algorithm.huber_delta"),
        ("grpo", ("algorithm.gae_lambda=0.5",), "algorithm.gae_lambda"),
        ("grpo", ("algorithm.reward_type=action_level",), "algorithm.reward_type"),
        ("rloo", ("algorithm.normalization_scope=group",), "algorithm.normalization_scope"),
        ("ppo", ("algorithm.kl={coef: 0.1,estimator: k1}",), "algorithm.kl.estimator"),
    ],
)
def test_presets_tell_what_has_no_effect_beside_them(preset: str, settings: tuple[str, ...], key: str) -> None:
    assert not load_config([f"algorithm={preset}"]).notes
    assert key in [note.key for note in load_config([f"algorithm={preset}", *settings]).notes]


@pytest.mark.parametrize(
    ("missing", "near"),
    [("nothere", ""), ("my_module", ""), ("rew", ""), ("embodrl.pipelines.nods", "nodes"), ("jsn", "json")],
)
def test_only_a_module_of_nearly_the_same_name_is_suggested(missing: str, near: str) -> None:
    assert nearest_module(missing).rpartition(".")[2] == near
