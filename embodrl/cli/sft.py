"""`embodrl sft`."""

from __future__ import annotations

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, load_measured


def sft(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Fine-tune a policy on demonstrations.

    \b
    Examples:
      embodrl sft sft.data_dir=data/push sft.output_dir=outputs/sft
      embodrl sft sft.max_steps=250 sft.batch_size=64 model.warm_start=null
    """

    def action() -> int | None:
        loaded = load_measured(overrides, config, lambda config: config.sft.eval_interval > 0, "sft", trust)
        from embodrl.runs import sft as verb

        return verb.sft(loaded)

    execute(action, debug)
