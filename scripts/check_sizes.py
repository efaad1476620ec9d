"""Refuse classes that are too large; functions are limited by ruff's C901 (complexity).

A class has at most 25 methods, 15 attributes of its own and 6 constructor arguments, and a tuple assignment names at
most two things. What was larger when the limits were set is listed in ``LARGER`` with what it may have at most; a
number there is lowered when the class shrinks, and never raised.

``check_sizes.py FILE ...`` checks only these files, not what all together need.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Shape:
    """Counts of a class.

    Attributes:
        methods: those in its body, properties and dunders included.
        attributes: names that its methods assign on ``self``.
        arguments: of its constructor, without ``self``.
    """

    methods: int = 25
    attributes: int = 15
    arguments: int = 6

    def fits(self, limit: Shape) -> bool:
        """Tell whether no count is above that of the limit."""
        return all(mine <= most for mine, most in zip(astuple(self), astuple(limit), strict=True))


LIMIT = Shape()
LARGER: dict[str, Shape] = {
    "embodrl/envs/gymnasium/env.py:GymnasiumSimulator": Shape(attributes=16, arguments=8),
    "embodrl/envs/gymnasium/env.py:GymnasiumVectorEnv": Shape(arguments=14),
    "embodrl/envs/libero/controller.py:ArmModel": Shape(attributes=17),
    "embodrl/envs/libero/env.py:LiberoVectorEnv": Shape(arguments=16),
    "embodrl/envs/libero/sim.py:LiberoScene": Shape(attributes=16),
    "embodrl/envs/maniskill/axes.py:Perturbation": Shape(attributes=16),
    "embodrl/envs/maniskill/controller.py:EndEffectorController": Shape(attributes=17),
    "embodrl/envs/maniskill/env.py:ManiSkillVectorEnv": Shape(arguments=20),
    "embodrl/envs/maniskill/sim.py:ManiSkillSim": Shape(arguments=10),
    "embodrl/envs/real_time/real_time.py:RealTime": Shape(attributes=17),
    "embodrl/envs/simulator.py:SimulatorVectorEnv": Shape(arguments=8),
    "embodrl/envs/stepping.py:SteppingEnv": Shape(methods=34),
    "embodrl/envs/toy/env.py:ToyVectorEnv": Shape(arguments=10),
    "embodrl/models/gr00t/processing.py:Gr00tProcessor": Shape(arguments=8),
    "embodrl/envs/metaworld/env.py:MetaWorldVectorEnv": Shape(arguments=10),
    "embodrl/envs/robot/env.py:RobotSimulator": Shape(attributes=18, arguments=10),
    "embodrl/envs/robot/env.py:RobotVectorEnv": Shape(arguments=21),
    "embodrl/hybrid_engines/rollout/vllm/engine.py:VllmRolloutEngine": Shape(arguments=7),
    "embodrl/hybrid_engines/rollout/base.py:RolloutEngine": Shape(arguments=7),
    "embodrl/hybrid_engines/rollout/remote/engine.py:RemoteRolloutEngine": Shape(arguments=8),
    "embodrl/hybrid_engines/weight_sync/collective.py:SyncGroup": Shape(arguments=8),
    "embodrl/models/flow/expert_policy.py:ExpertPolicy": Shape(arguments=8),
    "embodrl/models/flow/flow.py:Sampler": Shape(arguments=7),
    "embodrl/models/flow/flow_policy.py:FlowPolicy": Shape(methods=28, arguments=7),
    "embodrl/models/openvla/token_policy.py:TokenPolicy": Shape(methods=29),
    "embodrl/models/openvla_oft/processing.py:OpenVLAOFTProcessor": Shape(arguments=7),
    "embodrl/processes/child.py:ChildProcess": Shape(arguments=10),
    "embodrl/reporting/sinks.py:MetricsLogger": Shape(arguments=7),
    "embodrl/scheduler/launchers/ray/launcher.py:_RayWorker": Shape(arguments=7),
    "embodrl/workers/remote_backend.py:RemoteBackend": Shape(arguments=7),
    "embodrl/workers/workflows/runner.py:WorkflowCollector": Shape(arguments=7),
}
"""path:Class -> what it may have: what was larger when the limits were set."""


def shape_of(node: ast.ClassDef) -> Shape:
    """Return the counts of a class."""
    methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    attributes = {
        found.attr
        for method in methods
        for found in ast.walk(method)
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
        if isinstance(found.value, ast.Name) and found.value.id == "self"
    }
    made = next((method for method in methods if method.name == "__init__"), None)
    arguments = 0 if made is None else len(made.args.args) - 1 + len(made.args.kwonlyargs)
    return Shape(len(methods), len(attributes), arguments)


def problems_of(path: str, tree: ast.Module, larger: dict[str, Shape]) -> Iterator[str]:
    """Yield what is too large in a file.

    Args:
        path: of the file, as in ``LARGER``.
        tree: its syntax.
        larger: what may be larger.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            shape = shape_of(node)
            limit = larger.get(f"{path}:{node.name}", LIMIT)
            if not shape.fits(limit):
                yield f"{path}:{node.lineno}: class {node.name} has {shape}, at most {limit}: make it two"
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) > 2:
                yield f"{path}:{node.lineno}: {len(target.elts)} names in a tuple assignment, at most 2"


def repeated(places: dict[str, list[str]]) -> Iterator[str]:
    """Yield the public class names that stand in several modules, but for the spellings of other systems.

    Args:
        places: name of a class at the top of a module -> paths.
    """
    for name, paths in places.items():
        own = [path for path in paths if not path.startswith("embodrl/compat/")]
        if len(own) > 1 and not name.startswith("_"):
            yield f"class {name} stands in {', '.join(paths)}: a public name stands once"


def stale(shapes: dict[str, Shape], larger: dict[str, Shape]) -> Iterator[str]:
    """Yield the entries of ``LARGER`` that can go, or be lowered."""
    for name, allowed in larger.items():
        shape = shapes.get(name)
        if shape is None or shape.fits(LIMIT):
            yield f"{name} is listed as larger, and is not: remove it from LARGER"
        elif any(
            most > max(mine, usual) for mine, most, usual in zip(*map(astuple, (shape, allowed, LIMIT)), strict=True)
        ):
            yield f"{name} has {shape}, and LARGER allows {allowed}: lower it"


def main(names: Sequence[str]) -> int:
    """Check the named files, or every file of the package."""
    problems: list[str] = []
    shapes: dict[str, Shape] = {}
    places: dict[str, list[str]] = {}
    for path in [ROOT / name for name in names] or sorted((ROOT / "embodrl").rglob("*.py")):
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))
        problems += problems_of(name, tree, LARGER)
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        shapes |= {f"{name}:{node.name}": shape_of(node) for node in classes}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    if not names:
        problems += [*stale(shapes, LARGER), *repeated(places)]
    print("\n".join(problems) or "no class is too large, and no assignment is packed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
