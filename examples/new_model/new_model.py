"""Makes the model known. Simulator processes import this as well, so it leaves torch alone."""

from embodrl import register_model

register_model(
    "small_vla",
    "small_vla:build",  # imported when a policy is built
    "a small CNN with binned actions",
    # What the rules want to know without building the model; see embodrl/registry.py.
    value_head=True,
    max_cameras=1,
    uses_state=False,
    num_bins=21,
)
