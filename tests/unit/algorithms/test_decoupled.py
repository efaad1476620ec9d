"""Decoupled PPO's tensor functions: by hand, against the formula written out in loops, and in what they ignore."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodrl.algorithms.decoupled import (
    cap_weights,
    log_behavior_weights,
    log_episode_weights,
    loglinear_logprobs,
    rejected,
    staleness_metrics,
    staleness_of,
    weight_metrics,
)
from embodrl.algorithms.episodes import split_episodes
from embodrl.algorithms.losses import actor_critic_loss, actor_loss
from embodrl.config.schema import RejectionConfig
from embodrl.errors import EmbodrlError

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
PAIRS = [("token_level", "token")] + [(ratio, "chunk") for ratio in ("token_level", "action_level", "chunk_level")]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"clip_ratio_dual": 3.0},
    {"length_normalized_ratio": True},
    {"surrogate": "log_ratio", "drift_coef": 0.3},
    {"kl_coef": 0.4, "kl_estimator": "k2"},
]


def random_inputs(seed: int, num: int = 6, chunk: int = 3, dim: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num, chunk, dim, generator=generator)
    noise = torch.randn(3, num, chunk, dim, generator=generator)
    valid = torch.rand(num, chunk, generator=generator) < 0.7
    valid[0] = True
    return {
        "logprobs": (old + 0.4 * noise[0]).requires_grad_(),
        "old_logprobs": old,
        "prox_logprobs": old + 0.4 * noise[1],
        "ref_logprobs": old + 0.2 * noise[2],
        "advantages": torch.randn(num, 1, generator=generator),
        "valid": valid,
        "weights": 0.5 + torch.rand(num, generator=generator),
    }


def weights_for(inputs: dict[str, Tensor], level: str, normalized: bool, cap: float | None, on_exceed: Any) -> Tensor:
    names = ("prox_logprobs", "old_logprobs", "valid")
    log_weights = log_behavior_weights(*(inputs[name] for name in names), level == "token", normalized)
    return cap_weights(log_weights, cap, on_exceed)[0]


def one_token(theta: float, prox: float, old: float, advantage: float, **changes: Any) -> Any:
    """The loss of two chunks of one token, the second of which is fresh, has a ratio of 1 and earns nothing."""

    def column(probability: float) -> Tensor:
        return torch.tensor([math.log(probability), 0.0]).view(2, 1, 1)

    cap, on_exceed = changes.pop("cap", 5.0), changes.pop("on_exceed", "mask")
    valid = torch.ones(2, 1, dtype=torch.bool)
    weights, _ = cap_weights(log_behavior_weights(column(prox), column(old), valid, True), cap, on_exceed)
    return actor_loss(
        logprobs=column(theta),
        old_logprobs=column(old),
        prox_logprobs=column(prox),
        behavior_weights=weights,
        advantages=torch.tensor([[advantage], [0.0]]),
        valid=valid,
        logprob_type="token_level",
        **CLIP | changes,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * 1.25),  # w = .4 / .2, u = .5 / .4
        ({"theta": 0.6}, 2 * 1.28),  # u = 1.5 is clipped
        ({"theta": 0.6, "advantage": -1.0}, -2 * 1.5),
        ({"theta": 0.6, "advantage": -1.0, "clip_ratio_dual": 1.3}, -2 * 1.3),
        ({"theta": 0.1, "advantage": -1.0}, -2 * 0.8),
        ({"old": 0.8}, 0.5 * 1.25),
        ({"cap": 1.5}, 0.0),
        ({"cap": 1.5, "on_exceed": "clamp"}, 1.5 * 1.25),
        ({"old": 0.01, "cap": None}, 40 * 1.25),
        ({"old": 0.01}, 0.0),
        ({"old": 0.01, "on_exceed": "clamp"}, 5 * 1.25),
        ({"surrogate": "log_ratio"}, 2 * math.log(1.25)),
        ({"surrogate": "log_ratio", "drift_coef": 0.5}, 2 * math.log(1.25) - 0.5 * 2 * (1.25 - 1 - math.log(1.25))),
    ],
)
def test_the_loss_by_hand(changes: dict[str, Any], expected: float) -> None:
    output = one_token(**({"theta": 0.5, "prox": 0.4, "old": 0.2, "advantage": 1.0} | changes))
    assert float(output.loss) == pytest.approx(-expected / 2, rel=1e-5), "divided by both, masked or not"


def test_metrics_are_relative_to_the_proximal_policy() -> None:
    metrics = one_token(theta=0.5, prox=0.5, old=0.1, advantage=1.0).metrics
    assert float(metrics["approx_kl"]) == 0 and float(metrics["clip_fraction"]) == 0
    metrics = one_token(theta=0.5, prox=0.5, old=0.2, advantage=1.0).metrics
    assert float(metrics["ratio_mean"]) == pytest.approx((2.5 * 1 + 1) / 2), "w u"
    assert float(one_token(theta=0.5, prox=0.1, old=0.5, advantage=1.0).metrics["clip_fraction"]) == 0.5


def test_what_the_proximal_policy_would_hardly_draw_hardly_counts_in_its_kl() -> None:
    metrics = one_token(theta=0.5, prox=1e-6, old=0.5, advantage=1.0).metrics
    # Drawn with .5, w = 2e-6: w (r - 1 - log r) with r = 5e5, over the two tokens; without w it is 2.5e5.
    assert float(metrics["approx_kl"]) == pytest.approx(2e-6 * (5e5 - 1 - math.log(5e5)) / 2, rel=1e-4)
    assert float(metrics["ratio_mean"]) == pytest.approx((0.5 / 0.5 + 1) / 2, rel=1e-4)


def test_loglinear_by_hand() -> None:
    old, present = torch.full((4, 1, 1), -1.0), torch.full((4, 1, 1), -0.4, requires_grad=True)
    prox = loglinear_logprobs(present, old, torch.tensor([0, 1, 2, 5]))
    # alpha = (v_prox - v_b) / (v_theta - v_b), v_theta = v_prox + 1: 0/1, 1/2, 2/3, 5/6
    assert prox.flatten().tolist() == pytest.approx([-1.0, -0.7, -0.6, -0.5])
    assert not prox.requires_grad
    present = torch.tensor([[[torch.inf]]])
    assert float(loglinear_logprobs(present, old[:1], torch.tensor([0]))) == -1


def test_staleness_by_hand() -> None:
    valid = torch.tensor([[[True, False], [False, False]], [[True, True], [True, True]]])
    versions = torch.tensor([[3, 99], [5, 1]])
    staleness = staleness_of(versions, valid, 5)
    assert staleness.tolist() == [[2, 0], [0, 4]]
    assert staleness_metrics(staleness, valid) == {"staleness/mean": 2.0, "staleness/max": 4.0}
    assert set(staleness_metrics(staleness, valid & False).values()) == {0.0}
    with raises_code("chunk-version", EmbodrlError, "5", "4"):
        staleness_of(versions, valid, 4)


@pytest.mark.parametrize(
    ("metric", "level", "bounds", "expected"),
    [
        # Log ratios by action: one chunk has 0.6 and -0.2, the next 0 alone, another episode -1 and 0.2.
        ("ratio", "token", {"upper": 1.5}, [[[1, 0], [0, 0]], [[0, 0], [0, 0]]]),  # e^0.6 = 1.82
        ("ratio", "token", {"upper": None, "lower": 0.5}, [[[0, 0], [1, 0]], [[0, 0], [0, 0]]]),  # e^-1 = 0.37
        ("k1", "token", {"upper": 0.5}, [[[0, 0], [1, 0]], [[0, 0], [0, 0]]]),  # -(-1)
        ("k1", "token", {"upper": None, "lower": -0.5}, [[[1, 0], [0, 0]], [[0, 0], [0, 0]]]),
        ("k2", "token", {"upper": 0.1}, [[[1, 0], [1, 0]], [[0, 0], [0, 0]]]),  # 0.18, 0.02; 0.5, 0.02
        ("k3", "token", {"upper": 0.3}, [[[0, 0], [1, 0]], [[0, 0], [0, 0]]]),  # e^0.6 - 1.6 = 0.222; e^-1 = 0.368
        ("ratio", "chunk", {"upper": 1.2}, [[[1], [0]], [[0], [0]]]),  # e^0.2 = 1.22, e^-0.4
        ("ratio", "chunk", {"upper": 1.23}, [[[0], [0]], [[0], [0]]]),
        ("k2", "chunk", {"upper": 0.15}, [[[0], [1]], [[0], [0]]]),  # (0.18 + 0.02) / 2, (0.5 + 0.02) / 2
        ("k3", "chunk", {"upper": 0.19}, [[[0], [1]], [[0], [0]]]),  # (0.222 + 0.019) / 2, (0.368 + 0.021) / 2
        ("ratio", "episode", {"upper": 1.1}, [[[1], [0]], [[1], [0]]]),  # e^(0.4 / 3) = 1.14 in both its chunks
        ("k2", "episode", {"upper": 0.06, "lower": 0.0}, [[[1], [1]], [[1], [0]]]),  # 0.2 / 3
        ("k2", "episode", {"upper": 0.07}, [[[0], [1]], [[0], [0]]]),
    ],
)
def test_rejection_by_hand(metric: Any, level: Any, bounds: dict[str, Any], expected: list[Any]) -> None:
    log_ratios = torch.tensor([[[0.6, -0.2], [-1.0, 0.2]], [[0.0, math.nan], [math.nan, math.nan]]])
    valid = log_ratios.isfinite()
    terminated = torch.zeros_like(valid)
    terminated[1, 0, 0] = terminated[0, 1, 1] = True
    old = torch.full((2, 2, 2, 1), -3.0)
    episodes = split_episodes(valid, terminated, torch.zeros_like(valid))
    settings = RejectionConfig(metric=metric, level=level, **bounds)
    found = rejected(old + log_ratios.unsqueeze(-1), old, valid, settings, episodes)
    assert found.squeeze(-1).int().tolist() == expected


def test_an_episode_has_the_geometric_mean_of_its_valid_tokens() -> None:
    valid = torch.ones(3, 2, 2, dtype=torch.bool)
    terminated = torch.zeros_like(valid)
    terminated[1, 0, 0], valid[1, 0, 1] = True, False
    valid[1:, 1] = False
    ratios = torch.tensor([[[2, 2], [0.5, 0.5]], [[1, 9], [9, 9]], [[3, 12], [9, 9]]], dtype=torch.float32)
    old = torch.zeros(3, 2, 2, 1)
    prox = torch.where(valid, ratios.log(), torch.nan).unsqueeze(-1)
    episodes = split_episodes(valid, terminated, torch.zeros_like(valid))
    weights = log_episode_weights(prox, old, valid, episodes).exp()
    first = (2 * 2 * 1) ** (1 / 3)
    assert weights.flatten().tolist() == pytest.approx([first, 0.5, first, 1.0, 6.0, 1.0])


def written_out(
    inputs: dict[str, Tensor], ratio: str, level: str, cap: float | None, on_exceed: str, **v: Any
) -> float:
    """The loss in loops over lists: ratios are groups of tokens, and so are weights."""
    normalized = v.get("length_normalized_ratio", False) and ratio != "token_level"
    num, chunk, dim = inputs["old_logprobs"].shape
    theta, prox, old, ref = (
        inputs[name].tolist() for name in ("logprobs", "prox_logprobs", "old_logprobs", "ref_logprobs")
    )

    def total(tokens: list[tuple[int, int, int]], above: Any, below: Any) -> float:
        log = sum(above[i][c][a] - below[i][c][a] for i, c, a in tokens)
        return log / len(tokens) if normalized else log

    sum_policy, sum_kl, num_ratios, num_tokens = 0.0, 0.0, 0, 0
    for i in range(num):
        tokens = [(i, c, a) for c in range(chunk) if inputs["valid"][i, c] for a in range(dim)]
        actions = [[t for t in tokens if t[1] == c] for c in range(chunk)]
        groups = {"token_level": [[t] for t in tokens], "action_level": actions, "chunk_level": [tokens]}[ratio]
        advantage, weight = float(inputs["advantages"][i, 0]), float(inputs["weights"][i])
        num_tokens += len(tokens)
        sum_kl += weight * sum(0.5 * (theta[i][c][a] - ref[i][c][a]) ** 2 for _, c, a in tokens)
        for group in groups:
            if not group:
                continue
            num_ratios += 1
            x = total(group, theta, prox)
            w = math.exp(total(group if level == "token" else tokens, prox, old))
            if cap is not None and w > cap:
                w = 0.0 if on_exceed == "mask" else cap
            low, high = 0.8, 1.28
            if v.get("surrogate") == "log_ratio":
                value = min(advantage * x, advantage * min(max(x, math.log(low)), math.log(high)))
            else:
                value = min(advantage * math.exp(x), advantage * min(max(math.exp(x), low), high))
                if v.get("clip_ratio_dual") and advantage < 0:
                    value = max(value, advantage * v["clip_ratio_dual"])
            drift = math.exp(x) - 1 - x if x < math.log(3) else 2 - math.log(3) + 2 * (x - math.log(3))
            sum_policy += weight * w * (v.get("drift_coef", 0.0) * drift - value)
    return sum_policy / num_ratios + v.get("kl_coef", 0.0) * sum_kl / num_tokens


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pair=st.sampled_from(PAIRS),
    variant=st.sampled_from(VARIANTS),
    cap=st.sampled_from([None, 1.1, 1.5]),
    on_exceed=st.sampled_from(["mask", "clamp"]),
)
def test_the_loss_equals_the_formula(
    seed: int, pair: tuple[Any, str], variant: dict[str, Any], cap: float | None, on_exceed: str
) -> None:
    inputs = random_inputs(seed)
    ratio, level = pair
    normalized = variant.get("length_normalized_ratio", False) and ratio != "token_level"
    weights = weights_for(inputs, level, normalized, cap, on_exceed)
    output = actor_loss(**inputs, behavior_weights=weights, logprob_type=ratio, **CLIP, **variant)
    expected = written_out(inputs, ratio, level, cap, on_exceed, **variant)
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), pair=st.sampled_from(PAIRS), variant=st.sampled_from(VARIANTS))
def test_masking_a_chunk_equals_deleting_it(seed: int, pair: tuple[Any, str], variant: dict[str, Any]) -> None:
    inputs = random_inputs(seed)
    keep = inputs["valid"].any(-1)
    deleted = {name: tensor[keep] for name, tensor in inputs.items()}
    with torch.no_grad():
        for name in ("logprobs", "old_logprobs", "prox_logprobs", "ref_logprobs"):
            inputs[name][~inputs["valid"]] = torch.nan
        inputs["advantages"][~keep] = torch.nan
    results = [
        actor_loss(
            **part,
            behavior_weights=weights_for(part, pair[1], False, 1.3, "mask"),
            logprob_type=pair[0],
            **CLIP,
            **variant,
        )
        for part in (inputs, deleted)
    ]
    torch.testing.assert_close(results[0].loss, results[1].loss)
    for name, value in results[1].metrics.items():
        torch.testing.assert_close(results[0].metrics[name], value)
    (gradient,) = torch.autograd.grad(results[0].loss, inputs["logprobs"])
    assert (gradient[~inputs["valid"]] == 0).all() and gradient.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), pair=st.sampled_from(PAIRS), scale=st.floats(0.1, 10))
def test_loss_and_gradient_grow_with_the_weights(seed: int, pair: tuple[Any, str], scale: float) -> None:
    inputs = random_inputs(seed)
    weights = weights_for(inputs, pair[1], False, None, "mask")
    once, more = (
        actor_loss(**inputs, behavior_weights=w, logprob_type=pair[0], **CLIP, drift_coef=0.1).loss
        for w in (weights, scale * weights)
    )
    torch.testing.assert_close(more, scale * once, rtol=1e-4, atol=1e-6)
    gradients = [torch.autograd.grad(loss, inputs["logprobs"])[0] for loss in (once, more)]
    torch.testing.assert_close(gradients[1], scale * gradients[0], rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    logs=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8),
    cap=st.floats(1.001, 50),
    data=st.data(),
)
def test_the_cap_and_the_bounds_of_the_metrics(logs: list[float], cap: float, data: st.DataObject) -> None:
    log_weights = torch.tensor(logs).view(-1, 1, 1)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(logs), max_size=len(logs)))).view(-1, 1, 1)
    plain = log_weights.exp()
    masked, exceeds = cap_weights(log_weights, cap, "mask")
    clamped, same = cap_weights(log_weights, cap, "clamp")
    assert torch.equal(exceeds, same) and torch.equal(exceeds, plain > cap)
    assert torch.equal(masked[~exceeds], plain[~exceeds]) and torch.equal(clamped[~exceeds], plain[~exceeds])
    assert (masked[exceeds] == 0).all() and (clamped[exceeds] == torch.tensor(cap)).all()
    floored, same = cap_weights(log_weights, cap, "mask", 0.5)
    expected = [0.0 if w > cap else max(w, 0.5) for w in plain.flatten().tolist()]
    assert torch.equal(exceeds, same) and floored.flatten().tolist() == expected
    uncapped, none = cap_weights(log_weights, None, "clamp")
    assert torch.equal(uncapped, plain) and not none.any()
    count = mask.sum().clamp_min(1).float()
    for weights in (masked, clamped):
        metrics = {k: float(v) for k, v in weight_metrics(log_weights, weights, exceeds, mask, count).items()}
        assert all(math.isfinite(value) for value in metrics.values())
        assert 0 <= metrics["behavior_weight_mean"] <= min(cap, metrics["behavior_weight_max"]) * (1 + 1e-5)
        assert metrics["exceeds"] == pytest.approx(float((exceeds & mask).sum()) / float(count)) and (
            0 <= metrics["exceeds"] <= 1
        )


def test_a_masked_weight_that_overflows_leaves_no_trace() -> None:
    inputs = random_inputs(0)
    inputs["old_logprobs"][1] = -1e4
    weights = weights_for(inputs, "token", False, 5.0, "mask")
    assert (weights[1][inputs["valid"][1]] == 0).all()
    loss = actor_loss(**inputs, behavior_weights=weights, logprob_type="token_level", **CLIP).loss
    (gradient,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert gradient.isfinite().all() and (gradient[1] == 0).all() and (gradient[0] != 0).any()


def test_weights_finer_than_the_ratio_are_refused() -> None:
    inputs = random_inputs(0)
    weights = weights_for(inputs, "token", False, None, "mask")
    for ratio in ("action_level", "chunk_level"):
        with raises_code("loss-shapes"):
            actor_loss(**inputs, behavior_weights=weights, logprob_type=ratio, **CLIP)  # pyright: ignore


def test_the_critic_is_not_weighted() -> None:
    inputs = random_inputs(3)
    critic = {name: torch.randn(6, 1) for name in ("values", "old_values", "returns")}
    common: dict[str, Any] = {**inputs, **CLIP, "logprob_type": "token_level"}
    both = [
        actor_critic_loss(**common, **critic, value_clip=0.2, value_loss_coef=0.5, behavior_weights=weights)
        for weights in (None, torch.zeros(6, 1, 1))
    ]
    assert torch.equal(both[0].metrics["value_loss"], both[1].metrics["value_loss"])
    assert float(both[1].metrics["policy_loss"]) == 0 and float(both[1].metrics["value_loss"]) > 0
