"""A small network that judges observations, as value function (progress) or success classifier, and its files.

Shapes: B batch, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.config.rules.reward import REWARD_MODEL
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, read_file
from embodrl.models.common.images import resize_area
from embodrl.models.common.observation_net import IMAGES, STATE, TASK, ObservationNet, ObservationSpec
from embodrl.storage.integrity import check_checksums
from embodrl.storage.tensor_files import load_tensors

WEIGHTS = "model.safetensors"
KINDS = {"value": 201, "success": 1}
"""Kind of model -> number of outputs K: logits of 201 bins, or one logit."""
HIDDEN = 128
ROWS_AT_ONCE = 256


class ObservationModel(nn.Module):
    """A network with its kind (one of ``KINDS``), known instructions, state statistics, and JSON facts to record."""

    state_mean: Tensor
    state_std: Tensor

    def __init__(
        self, kind: str, spec: ObservationSpec, instructions: Sequence[str], facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__()
        self.kind = kind
        self.spec = spec
        self.instructions = list(instructions)
        self.facts = dict(facts or {})
        self.net = ObservationNet(spec)
        self.register_buffer("state_mean", torch.zeros(spec.state_dim))
        self.register_buffer("state_std", torch.ones(spec.state_dim))
        self.hidden = nn.Linear(self.net.num_features, HIDDEN)
        self.out = nn.Linear(HIDDEN, KINDS[kind])

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return logits ``float32[B,K]``."""
        state = (inputs[STATE].float() - self.state_mean) / self.state_std
        return self.out(F.relu(self.hidden(self.net({**inputs, STATE: state}))))

    def standardize(self, state: Tensor) -> None:
        """Set the normalisation to the statistics of states ``float32[B,S]``; constant dimensions become 0."""
        if self.spec.state_dim:
            self.state_mean = state.mean(0)
            std = state.std(0, correction=0)
            self.state_std = torch.where(std > 1e-6, std, torch.inf)

    @property
    def threshold(self) -> float:
        """Probability above which a success classifier says yes."""
        found = self.facts.get("threshold")
        return float(found) if isinstance(found, int | float) else 0.5

    @property
    def centers(self) -> Tensor:
        """Centres of the value bins, ``float32[201]``: -1 to 0."""
        return torch.linspace(-1.0, 0.0, KINDS["value"])

    @torch.no_grad()
    def judge(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return ``float32[B]``: the expected value, -1 to 0, or the success probability."""
        rows = len(inputs[STATE])
        parts = [
            self({name: column[start : start + ROWS_AT_ONCE] for name, column in inputs.items()})
            for start in range(0, rows, ROWS_AT_ONCE)
        ]
        logits = torch.cat(parts) if parts else torch.zeros(0, KINDS[self.kind])
        return logits.softmax(-1) @ self.centers if self.kind == "value" else logits[:, 0].sigmoid()

    def inputs(
        self, images: NDArray[np.uint8], state: NDArray[np.float32], instructions: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return network inputs from images ``uint8[B,V,H,W,3]`` and states ``float32[B,S]``.

        Raises ``EmbodrlError`` if they do not match the environment that the model was trained on.
        """
        spec = self.spec
        unknown = [text for text in instructions if text not in self.instructions]
        seen = (images.shape[1], state.shape[1])
        if unknown or (spec.num_cameras not in (0, seen[0])) or (spec.state_dim not in (0, seen[1])):
            known = f"{spec.num_cameras} camera(s), {spec.state_dim} numbers of state"
            wrong = f"the instruction '{unknown[0]}'" if unknown else f"{seen[0]} camera(s), {seen[1]} numbers of state"
            raise EmbodrlError(
                f"the {self.kind} model was trained on {known} and {', '.join(self.instructions)}, and sees {wrong}",
                "train one on data of this environment: embodrl reward train",
                code="observation-model-input",
            )
        numbers = torch.tensor([self.instructions.index(text) for text in instructions], dtype=torch.int64)
        return network_inputs(spec, images, state, numbers)

    def save(self, directory: Path) -> None:
        """Write config.json, weights and checksums atomically."""
        content = {
            "model_type": REWARD_MODEL,
            "kind": self.kind,
            **asdict(self.spec),
            "instructions": self.instructions,
        }
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(self.state_dict(), staging, one_file=True)
            checkpoint.write_json(staging / CONFIG_FILE, {**content, "facts": self.facts})

    @classmethod
    def load(cls, directory: Path) -> ObservationModel:
        """Load the model in a directory; raise ``CheckpointError`` if it is missing or damaged."""
        fields = read_file(directory / CONFIG_FILE)
        kind = fields.text("kind", "")
        if fields.text("model_type", "") != REWARD_MODEL or kind not in KINDS:
            raise CheckpointError(
                f"{directory} is not a reward model or value function of embodrl",
                "give a directory of `embodrl reward train`",
                code="observation-model-kind",
            )
        check_checksums(directory)
        sizes = {name: fields.integer(name, low=0, high=4096) for name in ("num_cameras", "state_dim")}
        sizes |= {name: fields.integer(name, low=1, high=4096) for name in ("num_tasks", "image_size")}
        facts = fields.fields("facts", {}).content
        model = cls(kind, ObservationSpec(**sizes), fields.texts("instructions"), dict(facts))
        try:
            with checkpoint.readable(directory / WEIGHTS):
                model.load_state_dict(load_tensors(directory / WEIGHTS))
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{directory / WEIGHTS}: {error}", code="observation-model-weights") from error
        return model.eval()


def network_inputs(
    spec: ObservationSpec, images: NDArray[np.uint8], state: NDArray[np.float32], tasks: Tensor
) -> dict[str, Tensor]:
    """Return ``ObservationNet`` inputs from ``uint8[B,V,H,W,3]``, ``float32[B,S]`` and task indices ``int64[B]``."""
    inputs = {STATE: torch.from_numpy(np.ascontiguousarray(state[:, : spec.state_dim])), TASK: tasks}
    if spec.num_cameras:
        side = spec.image_size
        parts = torch.from_numpy(np.ascontiguousarray(images)).split(ROWS_AT_ONCE)
        resized = [resize_area(part.flatten(0, 1), side, side) for part in parts]
        inputs[IMAGES] = torch.cat(resized).view(len(images), -1, side, side, 3)
    return inputs
