"""The optimizer of the policy: AdamW, or a function of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.config.schema import OptimConfig
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.names import import_function

ROLE = "role"
"""Key of a parameter group: ``policy`` or ``value``, which have learning rates of their own."""


@dataclass(frozen=True)
class KeptState:
    """What an optimizer keeps of each weight.

    Attributes:
        numbers: keys of scalars, such as the count of steps.
        moments: keys of tensors of the weight's shape.
    """

    numbers: tuple[str, ...] = ("step",)
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, numbers first."""
        return (*self.numbers, *self.moments)


ADAMW = KeptState()


def make_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Return ``actor.optim.fn`` called with the groups, or AdamW; learning rates are set before each step.

    Args:
        groups: ``params``, ``weight_decay`` and ``role`` of each. With FSDP the parameters are a process's parts of the
            weights: element-wise optimizers are exact.
        optim: section ``actor.optim``.

    Raises:
        EmbodrlError: the function returned something else.
    """
    if optim.fn is None:
        return fused_adamw(groups, optim.betas, optim.eps)
    try:
        made = import_function(optim.fn)(groups, **optim.arguments)
    except EmbodrlError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise EmbodrlError(
            f"'{optim.fn}' failed: {type(error).__name__}: {error}",
            "give it arguments that it takes, and parameter groups with several weights",
            code="optimizer-invalid",
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise EmbodrlError(
            f"'{optim.fn}' returned {type(made).__name__}, not a torch.optim.Optimizer",
            "return one for the parameter groups it is given",
            code="optimizer-invalid",
        )
    if [group.get(ROLE) for group in made.param_groups] != [group[ROLE] for group in groups]:
        raise EmbodrlError(
            f"'{optim.fn}' returned an optimizer with other parameter groups",
            "pass the groups to the optimizer as they are: their roles tell their learning rates",
            code="optimizer-invalid",
        )
    return made


def kept_state(optim: OptimConfig) -> KeptState:
    """Return what the optimizer keeps of each weight, found by a step on a small one.

    Raises:
        EmbodrlError: it keeps what can't be saved by weight: no tensors, or tensors of another shape.
    """
    if optim.fn is None:
        return ADAMW
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    optimizer = make_optimizer([{"params": [weight], "weight_decay": 0.0, ROLE: "policy"}], optim)
    try:
        optimizer.step()
    except Exception as error:  # likewise
        raise EmbodrlError(
            f"the optimizer of '{optim.fn}' can't take a step: {type(error).__name__}: {error}",
            "use an optimizer whose step needs no closure",
            code="optimizer-invalid",
        ) from error
    state = {key: value for key, value in optimizer.state[weight].items() if value is not None}
    wrong = [key for key, value in state.items() if not isinstance(value, Tensor) or value.shape not in ((), (2, 3))]
    if wrong:
        raise EmbodrlError(
            f"the optimizer of '{optim.fn}' keeps {', '.join(map(str, wrong))} of a weight, which is no tensor of its"
            " shape",
            "use an element-wise optimizer: its state is saved and sharded with the weights",
            code="optimizer-state",
        )
    numbers = tuple(key for key, value in state.items() if value.ndim == 0)
    return KeptState(numbers, tuple(key for key in state if key not in numbers))
