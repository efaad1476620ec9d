"""`embodrl run`."""

from __future__ import annotations

import shlex

from embodrl.cli.common import ConfigFile, Debug, Overrides, Trust, execute, importing


def run(overrides: Overrides = None, config: ConfigFile = None, trust: Trust = False, debug: Debug = False) -> None:
    """Run a recipe: collect demonstrations, fine-tune on them, train with RL. Run again, it resumes.

    All stages are checked before the first one starts. Each setting goes to the stages that read it; runner.output_dir
    is the common directory, with one subdirectory per stage: collect, sft, rl.

    \b
    Examples:
      embodrl run experiment=pick_cube runner.seed=0 runner.output_dir=outputs/pick_0
      embodrl run experiment=pick_cube collect.num_episodes=20 algorithm=ppo
      embodrl run experiment=pick_cube 'recipe.stages=[sft,rl]' sft.data_dir=data/pick
    """

    def action() -> int:
        with importing():
            from embodrl.tools.recipe.stages import plan_recipe, run_recipe

        recipe = plan_recipe(overrides or [], config, trust)
        if recipe.expected:
            print(recipe.expected, flush=True)
        code = run_recipe(recipe, lambda line: print(line, flush=True))
        if code == 0:
            last = recipe.stages[-1]
            print(f"done: {last.directory}")
            if last.name != "collect":
                print(f"next: embodrl eval {shlex.quote(str(last.directory))}")
        return code

    execute(action, debug)
