"""Policies whose network runs elsewhere: they only act, without weights, log-probs or gradients.

Shapes: B batch, C actions run, A action dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.config.schema import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common.gripper import to_environment
from embodrl.types import Observation, PolicyOutput


class ActingPolicy(VLAPolicy):
    """A policy run by another process or machine, for evaluation; ``config`` is the section ``model``."""

    decodings = ("greedy",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = config.action_dim

    @property
    def device(self) -> torch.device:
        """Device of returned tensors; the network itself runs elsewhere."""
        return torch.device("cpu")

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,H,W,3]`` and ``state float32[B,S]``."""
        return {"images": torch.tensor(observation.images), "state": torch.tensor(observation.state)}

    @abstractmethod
    def only_acts(self) -> EmbodrlError:
        """Return the error for calls that need weights or gradients."""

    @abstractmethod
    def misfit(self, message: str, setting: str) -> EmbodrlError:
        """Return the error for an answer that does not match ``setting``."""

    def output_of(self, answer: NDArray[Any], num_rows: int) -> PolicyOutput:
        """Return the first C actions of an answer ``[B,C or more,A]``, in environment units, with log-probs of 0.

        Raises ``misfit`` if the shape is wrong or a value is not finite.
        """
        wanted = (num_rows, self.num_action_chunks, self.action_dim)
        if answer.ndim != 3 or answer.shape[::2] != wanted[::2] or answer.shape[1] < wanted[1]:
            message = f"the policy answered with actions of shape {list(answer.shape)}, {list(wanted)} are run"
            raise self.misfit(message, "model.num_action_chunks and model.action_dim")
        if answer.dtype.kind != "f" or not np.isfinite(answer).all():
            raise self.misfit("the policy answered with actions that are not finite numbers", "its checkpoint")
        actions = to_environment(answer[:, : wanted[1]].astype(np.float64), self.config.gripper)
        return PolicyOutput(actions.astype(np.float32), torch.zeros(wanted), None, {})

    def parts(self) -> dict[str, nn.Module]:
        """Return no parts."""
        return {}

    def head_parameters(self) -> list[nn.Parameter]:
        return []

    unused_parameters = head_parameters

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise the error of ``only_acts``."""
        raise self.only_acts()

    predict_values = evaluate_actions = sft_inputs = sft_loss = refuse
    enable_gradient_checkpointing = save_pretrained = refuse
