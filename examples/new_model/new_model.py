"""Makes the model known. Simulator processes import this as well, so it leaves torch alone."""

from pydantic import Field

from embodrl import ModelConfig, register_model


class SmallVlaConfig(ModelConfig):
    """The section ``model`` with a setting of this family, which is validated like all others."""

    hidden_size: int = Field(default=128, ge=8, le=4096, description="units of the hidden layers")


register_model(
    "small_vla",
    "small_vla:build",  # imported when a policy is built
    "a small CNN with binned actions",
    settings=SmallVlaConfig,
    # What the rules want to know without building the model: attributes of embodrl.ModelSpec.
    value_head=True,
    max_cameras=1,
    uses_state=False,
    num_bins=21,
)
