"""Model families by name. Importing this module imports no torch; building a policy does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.models.load_report import LoadReport
from embodrl.specs import MODELS, SMALL_ACTORS, ModelSpec, RegisteredName

if TYPE_CHECKING:
    import torch

    from embodrl.config.schema import ModelConfig
    from embodrl.models.base import VLAPolicy

FAMILIES = {
    "openvla": "embodrl.models.openvla.spec:SPEC",
    "gaussian": "embodrl.models.gaussian.spec:SPEC",
    "gr00t": "embodrl.models.gr00t.spec:SPEC",
    "gr00t_n1_7": "embodrl.models.gr00t.spec:N1_7",
    "lerobot": "embodrl.models.lerobot_policy.spec:SPEC",
    "openvla_oft": "embodrl.models.openvla_oft.spec:SPEC",
    "pi0": "embodrl.models.pi.spec:PI0",
    "pi05": "embodrl.models.pi.spec:PI05",
    "pi0_fast": "embodrl.models.pi0_fast.spec:SPEC",
    "planner": "embodrl.models.planner.spec:SPEC",
    "remote": "embodrl.models.remote_policy.spec:SPEC",
    "remote_text": "embodrl.models.remote_text.spec:SPEC",
    "smolvla": "embodrl.models.smolvla.spec:SPEC",
}
"""Built-in model families: name -> location of the spec."""
ACTORS = {name: f"embodrl.models.small_actors.spec:{name.upper()}" for name in ("dsrl", "residual", "rlt")}
"""Built-in small actors."""


class SupportedModel(RegisteredName):
    """Name of a registered model family: ``SupportedModel("openvla")``, ``SupportedModel.OPENVLA``, ``members()``.

    Raises ``UnknownNameError``, with the known names and the nearest, for others.
    """

    __slots__ = ()
    registry = MODELS

    OPENVLA: ClassVar[SupportedModel]
    OPENVLA_OFT: ClassVar[SupportedModel]
    PI0: ClassVar[SupportedModel]
    PI05: ClassVar[SupportedModel]
    PI0_FAST: ClassVar[SupportedModel]
    GR00T: ClassVar[SupportedModel]
    GR00T_N1_7: ClassVar[SupportedModel]
    SMOLVLA: ClassVar[SupportedModel]
    GAUSSIAN: ClassVar[SupportedModel]
    LEROBOT: ClassVar[SupportedModel]
    PLANNER: ClassVar[SupportedModel]
    REMOTE: ClassVar[SupportedModel]
    REMOTE_TEXT: ClassVar[SupportedModel]

    @classmethod
    def register(cls, name: str, builder: Any, description: str = "", **facts: Any) -> SupportedModel:
        """Register a model family, from a module named by ``extensions`` or an entry point.

        Args:
            name: value of ``model.model_type``.
            builder: ``module:function``, imported on first use, or the function itself, called as
                ``builder(config, device=..., dtype=..., seed=...)``; returns a policy and a load report.
            description: one line for ``embodrl list models``.
            facts: attributes of ``ModelSpec`` for validation and ``embodrl list models``, among them ``settings``, a
                class derived from ``embodrl.config.schema.ModelConfig``, or ``module:Class``.

        Raises:
            EmbodrlError: the name is taken, or a fact is unknown or invalid.
        """
        return cls.of(ModelSpec.make(name, builder, description, facts))


for _name in SupportedModel.registry.builtin:
    setattr(SupportedModel, _name.upper(), SupportedModel(_name))


def build_policy(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[VLAPolicy, LoadReport]:
    """Build the policy of ``config.model_type`` and return it with its load report.

    With ``model_path``, a checkpoint in a public layout of the family, from a directory or the Hugging Face hub.
    Without, the dimensions of the family's section and the weights of ``warm_start``; random weights depend only on
    ``seed`` and ``device``.

    Args:
        config: section ``model``.
        device: device of the policy.
        dtype: dtype of its weights; value and noise heads are always float32.
        seed: seed of weights that come from no checkpoint.

    Raises:
        UnknownNameError: no such model family.
        CheckpointError: no such checkpoint, or it does not fit.
        EmbodrlError: the policy lacks a part that ``model.trainable`` or ``model.lora`` names, or methods of
            ``VLAPolicy``; or the builder's module is missing.
    """
    from embodrl.models.base import VLAPolicy
    from embodrl.models.common.lora import continue_adapters
    from embodrl.models.common.small_actor import actor_of
    from embodrl.models.common.trainable import apply_trainable

    build = MODELS.get(SupportedModel(config.model_type))
    actor, directory = actor_of(config)
    on_top = None if actor.kind is None else SMALL_ACTORS.get(actor.kind)
    if on_top is not None:
        config = on_top.base_config(config, actor)
    try:
        policy, report = build(config, device=device, dtype=dtype, seed=seed)
    except TypeError as error:
        if "abstract" not in str(error):
            raise
        raise EmbodrlError(
            f"model '{config.model_type}': {error}", "define these methods of VLAPolicy", code="policy-incomplete"
        ) from error
    if not isinstance(policy, VLAPolicy):
        raise EmbodrlError(
            f"model '{config.model_type}': {type(policy).__name__} is no VLAPolicy",
            f"derive it from VLAPolicy, and define {', '.join(sorted(VLAPolicy.__abstractmethods__))}",
            code="policy-incomplete",
        )
    apply_trainable(policy, config, seed=seed)
    if report.adapters is not None:
        continue_adapters(policy, report.adapters)
        report.conventions["adapters"] = report.adapters.describe()
    elif config.lora_path is not None and str(device) != "meta":
        raise CheckpointError(
            f"model.lora_path: no weights of {config.model_type} are loaded that adapters could be added to",
            "give the base model as model.model_path, or leave model.lora_path out",
            code="adapter-base",
        )
    if on_top is not None:
        policy = on_top.build(policy, config, actor, directory, report, seed)
    return policy, report
