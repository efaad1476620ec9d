"""Dual clip, GSPO, CPGD, KL, weights and Huber: by hand, against the published formulas, and in what they ignore."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.kl import kl_per_token, policy_drift
from embodrl.algorithms.losses import actor_critic_loss, actor_loss, count_elements, value_loss
from embodrl.config import load_config

LEVELS = ["token_level", "action_level", "chunk_level"]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"clip_ratio_dual": 3.0},
    {"length_normalized_ratio": True},
    {"surrogate": "log_ratio", "drift_coef": 0.3},
    {"kl_coef": 0.4, "kl_estimator": "k2"},
    {"surrogate": "log_ratio", "clip_ratio_dual": 2.0, "kl_coef": 0.1, "drift_coef": 0.1},
]


def random_inputs(seed: int, num: int = 6, chunk: int = 3, dim: int = 2, spread: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num, chunk, dim, generator=generator)
    valid = torch.rand(num, chunk, generator=generator) < 0.7
    valid[0] = True
    return {
        "logprobs": (old + spread * torch.randn(num, chunk, dim, generator=generator)).requires_grad_(),
        "old_logprobs": old,
        "ref_logprobs": old + 0.2 * torch.randn(num, chunk, dim, generator=generator),
        "advantages": torch.randn(num, 1, generator=generator),
        "valid": valid,
        "weights": 0.5 + torch.rand(num, generator=generator),
    }


def one_token(ratios: list[float], advantages: list[float], **settings: Any) -> Any:
    num = len(ratios)
    return actor_loss(
        logprobs=torch.tensor(ratios).log().view(num, 1, 1),
        old_logprobs=torch.zeros(num, 1, 1),
        advantages=torch.tensor(advantages).view(num, 1),
        valid=torch.ones(num, 1, dtype=torch.bool),
        **({"logprob_type": "token_level"} | CLIP | settings),
    )


def test_dual_clip_by_hand() -> None:
    ratios, advantages = [5.0, 5.0, 2.0, 0.1], [-1.0, 1.0, -2.0, -1.0]
    output = one_token(ratios, advantages, clip_ratio_dual=3.0)
    # -1 * min(5, 3); +1 * 1.28; -2 * 2; -1 * max(.1, .8)
    assert float(output.loss) == pytest.approx(-(-3.0 + 1.28 - 4.0 - 0.8) / 4)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(4 / 4)


def test_log_ratio_by_hand() -> None:
    ratios, advantages = [2.0, 0.5, 0.5, 2.0], [1.0, 1.0, -1.0, -1.0]
    output = one_token(ratios, advantages, surrogate="log_ratio")
    # min(ln 2, ln 1.28) + ln .5 - max(ln .5, ln .8) - ln 2
    expected = math.log(1.28) + math.log(0.5) - math.log(0.8) - math.log(2.0)
    assert float(output.loss) == pytest.approx(-expected / 4)


def test_drift_has_the_clipped_gradient_of_the_kl() -> None:
    x = torch.tensor([-2.0, -0.1, 0.0, 0.5, math.log(3.0), 2.0, 9.0], requires_grad=True)
    value = policy_drift(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, torch.clamp(x.exp() - 1, max=2.0).detach(), atol=1e-5, rtol=1e-5)
    value = value.detach()
    assert (value >= 0).all() and float(value[2]) == 0
    assert float(value[3]) == pytest.approx(math.exp(0.5) - 1 - 0.5, rel=1e-5)  # k3 where it is not clipped
    assert (value.diff()[3:] > 0).all(), "grows with the distance"


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.3), ("k2", 0.045), ("k3", math.exp(-0.3) - 1 + 0.3)])
def test_kl_estimators_by_hand(estimator: Any, value: float) -> None:
    assert float(kl_per_token(torch.tensor(-0.2), torch.tensor(-0.5), estimator)) == pytest.approx(value, rel=1e-5)


def test_kl_estimators_estimate_the_kl() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    true = float((p * (p / q).log()).sum())
    for estimator, tolerance in (("k1", 1e-6), ("k3", 1e-6), ("k2", 2e-3)):  # k2 is biased
        mean = (p * kl_per_token(p.log(), q.log(), estimator)).sum()  # pyright: ignore[reportArgumentType]
        assert float(mean) == pytest.approx(true, abs=tolerance)


def published_gspo(inputs: dict[str, Tensor], low: float, high: float) -> float:
    """``1/G sum_i min(s_i A_i, clip(s_i) A_i)``, ``s_i = exp(1/|y_i| sum_t log ratio)`` with lists."""
    total, count = 0.0, 0
    for i in range(len(inputs["valid"])):
        tokens = [
            float(inputs["logprobs"][i, c, a] - inputs["old_logprobs"][i, c, a])
            for c in range(inputs["valid"].shape[1])
            if inputs["valid"][i, c]
            for a in range(inputs["logprobs"].shape[2])
        ]
        if tokens:
            s, advantage = math.exp(sum(tokens) / len(tokens)), float(inputs["advantages"][i, 0])
            total += min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage)
            count += 1
    return -total / count


def published_cpgd(inputs: dict[str, Tensor], low: float, high: float, drift: float) -> float:
    total, count = 0.0, 0
    for i, c, a in inputs["old_logprobs"].abs().nonzero().tolist():
        if inputs["valid"][i, c]:
            x, advantage = float((inputs["logprobs"] - inputs["old_logprobs"])[i, c, a]), float(inputs["advantages"][i])
            bound = math.log(1 + high) if advantage > 0 else math.log(1 - low)
            clipped = min(x, bound) if advantage > 0 else max(x, bound)
            total += -advantage * clipped + drift * (math.exp(x) - 1 - x)
            count += 1
    return total / count


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_gspo_and_cpgd_equal_the_published_formulas(seed: int) -> None:
    inputs = {n: t.detach() for n, t in random_inputs(seed, spread=0.2).items() if n not in ("weights", "ref_logprobs")}
    gspo = actor_loss(
        **inputs, logprob_type="chunk_level", length_normalized_ratio=True, clip_ratio_low=0.03, clip_ratio_high=0.04
    )
    assert float(gspo.loss.detach()) == pytest.approx(published_gspo(inputs, 0.03, 0.04), abs=1e-5)
    cpgd = actor_loss(**inputs, logprob_type="token_level", **CLIP, surrogate="log_ratio", drift_coef=0.3)
    assert float(cpgd.loss.detach()) == pytest.approx(published_cpgd(inputs, 0.2, 0.28, 0.3), abs=1e-5)


def test_the_preset_of_fpo_has_the_ratio_of_its_authors() -> None:
    """``exp(mean(old) - mean(new))`` over samples and dimensions, clipped to 0.05 (akanazawa/fpo, playground)."""
    algorithm = load_config(["env=toy", "model=pi0", "algorithm=fpo"]).config.algorithm
    inputs = random_inputs(0, spread=0.1) | {"valid": torch.ones(6, 3, dtype=torch.bool), "weights": None}
    given = {name: inputs[name] for name in ("logprobs", "old_logprobs", "advantages", "valid")}
    names = ("logprob_type", "clip_ratio_low", "clip_ratio_high", "length_normalized_ratio")
    found = actor_loss(**given, **{name: getattr(algorithm, name) for name in names})
    ratio = (inputs["logprobs"].mean((1, 2)) - inputs["old_logprobs"].mean((1, 2))).exp()
    advantages = inputs["advantages"][:, 0]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages)
    torch.testing.assert_close(found.loss, -surrogate.mean())


def test_a_token_has_nothing_to_be_averaged_with() -> None:
    inputs = random_inputs(0)
    plain = actor_loss(**inputs, logprob_type="token_level", **CLIP)
    mean = actor_loss(**inputs, logprob_type="token_level", **CLIP, length_normalized_ratio=True)
    assert torch.equal(plain.loss, mean.loss)


def test_the_kl_is_weighted_by_chunk() -> None:
    inputs = random_inputs(2)
    factors = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0, 0.0])
    settings: dict[str, Any] = {"logprob_type": "token_level", **CLIP, "kl_estimator": "k2"}
    found = actor_loss(**inputs, **settings, kl_coef=0.3, kl_weights=factors)
    apart = (inputs["logprobs"] - inputs["ref_logprobs"]).square() / 2 * inputs["valid"].unsqueeze(-1)
    tokens = inputs["valid"].sum() * apart.shape[-1]
    expected = (apart.sum((1, 2)) * inputs["weights"] * factors).sum() / tokens
    torch.testing.assert_close(found.metrics["ref_kl"], expected.detach())
    torch.testing.assert_close(found.loss, actor_loss(**inputs, **settings).loss + 0.3 * expected)


def test_the_reference_pulls_towards_itself() -> None:
    inputs = random_inputs(1) | {"advantages": torch.zeros(6, 1)}
    for estimator in ("k2", "k3"):
        output = actor_loss(**inputs, logprob_type="token_level", **CLIP, kl_coef=1.0, kl_estimator=estimator)
        (gradient,) = torch.autograd.grad(output.loss, inputs["logprobs"])
        distance = (inputs["logprobs"] - inputs["ref_logprobs"]).detach()
        live = inputs["valid"].unsqueeze(-1).expand_as(gradient)
        assert (gradient[live].sign() == distance[live].sign()).all() and (gradient[~live] == 0).all()
        assert float(output.metrics["ref_kl"]) >= 0
    del inputs["ref_logprobs"]
    with raises_code("reference-missing"):
        actor_loss(**inputs, logprob_type="token_level", **CLIP, kl_coef=1.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS), variant=st.sampled_from(VARIANTS))
def test_masking_a_chunk_equals_deleting_it(seed: int, level: str, variant: dict[str, Any]) -> None:
    inputs = random_inputs(seed)
    keep = inputs["valid"].any(-1)
    deleted = {name: tensor[keep] for name, tensor in inputs.items()}
    with torch.no_grad():
        for name in ("logprobs", "old_logprobs", "ref_logprobs"):
            inputs[name][~inputs["valid"]] = torch.nan
        inputs["advantages"][~keep] = torch.nan
    output = actor_loss(**inputs, logprob_type=level, **CLIP, **variant)
    expected = actor_loss(**deleted, logprob_type=level, **CLIP, **variant)
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        torch.testing.assert_close(output.metrics[name], value)
    (gradient,) = torch.autograd.grad(output.loss, inputs["logprobs"])
    assert (gradient[~inputs["valid"]] == 0).all() and gradient.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(LEVELS),
    variant=st.sampled_from(VARIANTS),
    shift=st.floats(-3, 3),
)
def test_metrics_keep_their_bounds(seed: int, level: str, variant: dict[str, Any], shift: float) -> None:
    inputs = random_inputs(seed)
    inputs["logprobs"] = inputs["logprobs"] + shift
    metrics = actor_loss(**inputs, logprob_type=level, **CLIP, **variant).metrics
    assert 0 <= float(metrics["clip_fraction"]) <= 1
    assert float(metrics["ratio_mean"]) >= 0
    for name in ("approx_kl", "drift", "ref_kl"):
        assert float(metrics.get(name, 0.0)) >= 0, name


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS), variant=st.sampled_from(VARIANTS))
def test_parts_with_the_counts_of_the_whole_add_up_to_it(seed: int, level: str, variant: dict[str, Any]) -> None:
    inputs = random_inputs(seed)
    whole = actor_loss(**inputs, logprob_type=level, **CLIP, **variant)
    counts = count_elements(inputs["valid"], action_dim=2, logprob_type=level)  # pyright: ignore[reportArgumentType]
    parts = [
        actor_loss(**{n: t[rows] for n, t in inputs.items()}, logprob_type=level, counts=counts, **CLIP, **variant)
        for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(parts[0].metrics[name] + parts[1].metrics[name], value)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.sampled_from(LEVELS), scale=st.floats(0.1, 10))
def test_the_surrogate_grows_with_the_advantages(seed: int, level: str, scale: float) -> None:
    inputs = random_inputs(seed)
    once = actor_loss(**inputs, logprob_type=level, **CLIP, clip_ratio_dual=3.0)
    more = actor_loss(
        **inputs | {"advantages": inputs["advantages"] * scale}, logprob_type=level, **CLIP, clip_ratio_dual=3.0
    )
    torch.testing.assert_close(more.loss, scale * once.loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_valid_gives_zero(variant: dict[str, Any]) -> None:
    inputs = random_inputs(0)
    inputs["valid"] = torch.zeros_like(inputs["valid"])
    inputs["advantages"] = torch.full_like(inputs["advantages"], torch.nan)
    output = actor_loss(**inputs, logprob_type="action_level", **CLIP, **variant)
    assert float(output.loss.detach()) == 0 and all(float(value) == 0 for value in output.metrics.values())


def test_huber_by_hand() -> None:
    off: dict[str, Any] = {"valid": torch.ones(2, 1) > 0, "old_values": torch.zeros(2, 1)}
    values, returns = torch.tensor([[0.5], [3.0]]), torch.zeros(2, 1)
    output = value_loss(values=values, returns=returns, value_clip=None, huber_delta=1.0, **off)
    # .5 * .5^2, and 1 * (3 - .5)
    assert float(output.loss) == pytest.approx((0.125 + 2.5) / 2)
    expected = torch.nn.functional.huber_loss(values, returns, delta=0.7)
    found = value_loss(values=values, returns=returns, value_clip=None, huber_delta=0.7, **off)
    torch.testing.assert_close(found.loss, expected)
    clipped = value_loss(values=values, returns=torch.full((2, 1), 4.0), value_clip=0.2, huber_delta=1.0, **off)
    # clipped to .2 both: errors 3.8
    assert float(clipped.loss) == pytest.approx(3.8 - 0.5)
    wide = value_loss(values=values, returns=returns, value_clip=0.2, huber_delta=100.0, **off)
    assert torch.equal(wide.loss, value_loss(values=values, returns=returns, value_clip=0.2, **off).loss)


def test_the_critic_takes_the_variants_of_the_actor() -> None:
    inputs = random_inputs(3)
    critic = {name: torch.randn(6, 1) for name in ("values", "old_values", "returns")}
    for variant in VARIANTS:
        both = actor_critic_loss(
            **inputs, **critic, **CLIP, **variant, logprob_type="token_level", value_clip=0.2, value_loss_coef=0.5
        )
        actor = actor_loss(**inputs, **CLIP, **variant, logprob_type="token_level")
        value = value_loss(**critic, valid=inputs["valid"], value_clip=0.2)
        torch.testing.assert_close(both.loss, actor.loss + 0.5 * value.loss)
