"""A lerobot policy in a separate process, which only acts: no weights, log-probs or gradients here.

Shapes: B batch, V cameras, C actions run, A action dimensions.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.fields import Fields
from embodrl.models.common.acting import ActingPolicy
from embodrl.models.common.checkpoint import resolve
from embodrl.models.common.config_file import fields_of
from embodrl.models.lerobot_policy.spec import LeRobotConfig
from embodrl.models.load_report import LoadReport
from embodrl.processes import bootstrap
from embodrl.processes.child import ChildHungError, ChildProcess
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.serve import ErrorReport
from embodrl.types import ActMode, Observation, PolicyOutput, SamplingParams

_SERVER = "embodrl.models.lerobot_policy.server"


class LeRobotProcess:
    """The lerobot process, with one request at a time; it ends with this object or this process.

    Args:
        python: lerobot's interpreter.
        start: value of the START frame.
        timeout_s: timeout for loading the policy, and per answer.

    Attributes:
        facts: result of ``LeRobotServer.describe``.

    Raises:
        EmbodrlError: the process can't be started or can't load the policy.
    """

    def __init__(self, python: str, start: dict[str, object], timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        try:
            self._child = ChildProcess([python, bootstrap.__file__, _SERVER], start, name="lerobot")
        except OSError as error:
            raise EmbodrlError(
                f"'{python}' can't be started: {error}", "check model.python", code="python-not-runnable"
            ) from error
        weakref.finalize(self, self._child.kill)
        self.facts: Fields = fields_of(self._receive(), "lerobot's answer")

    def act(self, request: dict[str, object]) -> Any:
        """Return the answer to an observation; errors as in ``__init__``."""
        with self._lock:
            with contextlib.suppress(PeerGoneError):  # receiving reports the failure, with the log
                self._child.connection.send(Frame(Kind.CALL, value=request))
            return self._receive()

    def _receive(self) -> Any:
        try:
            frame = self._child.receive(time.monotonic() + self._timeout_s, busy=lambda: True)
        except (PeerGoneError, ChildHungError, TimeoutError) as error:
            raise self._lost(error) from error
        if frame.kind == Kind.OK:
            return frame.value
        report: ErrorReport = frame.value
        hint = report["hint"] or report["traceback"]
        code = report["code"] or "lerobot-raised"
        raise EmbodrlError(f"lerobot raised {report['type']}: {report['message']}", hint, code=code)

    def _lost(self, error: Exception) -> EmbodrlError:
        """Terminate the process and return an error that says how it ended."""
        if isinstance(error, PeerGoneError):
            reason = self._child.exit_reason()
        else:
            self._child.dump_stack()
            reason = str(error) or f"did not answer within {self._timeout_s:g} s (model.answer_timeout_s)"
        printed = self._child.log_tail()
        self._child.kill()
        message = f"the process of lerobot {reason}\n{printed}"
        return EmbodrlError(message, "see its last output", code="lerobot-process-lost")


class LeRobotPolicy(ActingPolicy):
    """Evaluates action chunks of a lerobot policy; raises ``EmbodrlError`` if its action dimensions differ."""

    def __init__(self, process: LeRobotProcess, config: LeRobotConfig) -> None:
        super().__init__(config)
        self.process = process
        self.cameras = list(config.lerobot_cameras) or process.facts.texts("cameras")
        self.state_dim = process.facts.integer("state_dim")
        found = process.facts.integer("action_dim")
        if found != config.action_dim:
            raise self.misfit(
                f"actions of the policy have {found} dimensions, not {config.action_dim}", "model.action_dim"
            )

    def only_acts(self) -> EmbodrlError:
        return EmbodrlError(
            "a policy in lerobot's interpreter only acts: its weights and gradients are not here",
            "use it with `embodrl eval`",
            code="lerobot-only-acts",
        )

    def misfit(self, message: str, setting: str) -> EmbodrlError:
        return EmbodrlError(message, f"check {setting}, or use a policy of this robot", code="lerobot-does-not-fit")

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,H,W,3]`` and ``state float32[B,S]``.

        Raises ``EmbodrlError`` if the number of cameras or state dimensions differs from the policy's training.
        """
        cameras = observation.images.shape[1]
        dims = observation.state.shape[1]
        if cameras != len(self.cameras):
            raise self.misfit(f"the policy reads {', '.join(self.cameras)}; there are {cameras} cameras", "env.cameras")
        if self.state_dim and dims != self.state_dim:
            raise self.misfit(f"the policy reads a state of {self.state_dim} numbers, not {dims}", "env.include_state")
        return super().preprocess(observation)

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Query the process; ``mode`` must be ``eval``. Values are not computed, log-probs are 0.

        Raises:
            EmbodrlError: another mode, a short chunk or non-finite actions; see ``preprocess`` and ``LeRobotProcess``.
        """
        if mode == "train":
            self.refuse()
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        request: dict[str, object] = {name: value.numpy() for name, value in inputs.items()}
        request |= {"cameras": self.cameras, "instructions": list(observation.instruction)}
        output = self.output_of(np.asarray(self.process.act(request)), observation.batch_size)
        return replace(output, forward_inputs=inputs)


def build_lerobot(
    config: LeRobotConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[LeRobotPolicy, LoadReport]:
    """Start lerobot's process and have it load ``model.model_path``, which may be a hub id.

    ``dtype`` is unused: lerobot's config.json decides. ``seed`` seeds the random numbers of every answer.

    Raises:
        EmbodrlError: the process can't load the policy, or the policy does not fit.
    """
    assert config.model_path is not None and config.python is not None  # see lerobot_policy_is_there
    path = str(resolve(config.model_path).absolute())
    start: dict[str, object] = {"path": path, "device": str(device), "seed": seed}
    policy = LeRobotPolicy(LeRobotProcess(config.python, start, config.answer_timeout_s), config)
    kind = policy.process.facts.text("type")
    return policy, LoadReport(path, conventions={"policy": f"{kind} of lerobot, cameras {', '.join(policy.cameras)}"})
