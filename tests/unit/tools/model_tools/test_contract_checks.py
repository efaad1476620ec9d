"""`embodrl model check` finds what it is there for: one broken promise after the other, in a policy that keeps all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import build, observation, tiny_config
from torch import nn

from embodrl.models.base import IMITATION, OPTIONAL, VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.tools.model_tools.contract import CHECKS, HALF_PRECISION, Subject, stir
from embodrl.types import SamplingParams

FAMILY = "gaussian"


def load(directory: Path) -> VLAPolicy:
    return build_policy(tiny_config(FAMILY, warm_start=str(directory)), device="cpu", dtype=torch.float32, seed=9)[0]


def subject() -> Subject:
    policy = build(FAMILY)
    stir(policy)
    return Subject(policy, observation(FAMILY), SamplingParams(0.7), load)


def patch(name: str, change: Callable[[Any], Any]) -> Callable[[VLAPolicy], None]:
    """Change what a method returns."""

    def breaks(policy: VLAPolicy) -> None:
        kept = getattr(policy, name)
        setattr(policy, name, lambda *args, **kwargs: change(kept(*args, **kwargs)))

    return breaks


def same_seed(policy: VLAPolicy) -> None:
    kept = policy.predict_action_batch
    policy.predict_action_batch = lambda seen, mode, sampling, generator=None, **more: kept(  # type: ignore[method-assign]
        seen, mode, sampling, torch.Generator().manual_seed(5), **more
    )


def add_parameter(policy: VLAPolicy) -> None:
    policy.extra = nn.Parameter(torch.zeros(1))


BROKEN: list[tuple[str, Callable[[VLAPolicy], None], str]] = [
    ("shapes", patch("predict_action_batch", lambda out: replace(out, actions=out.actions.astype(float))), "float64"),
    ("ratio-is-one", patch("evaluate_actions", lambda out: replace(out, logprobs=out.logprobs + 0.01)), "differ by"),
    (
        "rows-are-independent",
        patch(
            "evaluate_actions",
            lambda out: replace(out, logprobs=out.logprobs - out.logprobs.mean(0) * (len(out.logprobs) < 3)),
        ),
        "alone",
    ),
    ("seeds-decide", same_seed, "another generator"),
    ("gradients", add_parameter, "extra trains"),
    (
        "gradients",
        patch("evaluate_actions", lambda out: replace(out, values=out.values.detach())),
        "no gradient reaches 'value_head'",
    ),
    ("save-and-load", add_parameter, "extra is not saved"),
    ("imitation", patch("sft_loss", lambda out: (out[0] * 0 + 1, out[1])), "did not fall"),
    ("imitation", patch("sft_loss", lambda out: (out[0] * float("nan"), out[1])), "not finite scalars"),
]


def test_a_policy_that_keeps_its_promises() -> None:
    kept = subject()
    assert {name: list(check(kept)) for name, check in CHECKS.items()} == {name: [] for name in CHECKS}


@pytest.mark.parametrize(("name", "breaks", "said"), BROKEN)
def test_a_broken_promise_is_found(name: str, breaks: Callable[[VLAPolicy], None], said: str) -> None:
    broken = subject()
    breaks(broken.policy)
    problems = list(CHECKS[name](broken))
    assert any(said in problem for problem in problems), problems


def test_every_check_has_been_seen_to_fail() -> None:
    assert {name for name, _, _ in BROKEN} == set(CHECKS)


def test_a_policy_without_imitation_keeps_its_promises_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPTIONAL[IMITATION]:
        monkeypatch.setattr(type(subject().policy), name, getattr(VLAPolicy, name))
    (check,) = HALF_PRECISION.values()
    assert list(check(subject())) == []


def test_what_does_not_work_in_the_precision_of_training_is_found() -> None:
    (check,) = HALF_PRECISION.values()
    assert list(check(subject())) == []
    raw = subject()
    layer = nn.Linear(3, 3)
    kept = raw.policy.predict_action_batch

    def act(*args: Any, **kwargs: Any) -> Any:
        layer(torch.zeros(1, 3)).detach().numpy()  # bfloat16 under autocast, which NumPy does not know
        return kept(*args, **kwargs)

    raw.policy.predict_action_batch = act  # type: ignore[method-assign]
    assert list(CHECKS["shapes"](raw)) == []
    with pytest.raises(TypeError, match="BFloat16"):
        list(check(raw))
