"""A graph as text, as Mermaid and as SVG. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from embodrl.pipelines.graph import Graph, GraphNode

COLOURS = {
    "rollout": "#cfe8ff",
    "dynamic_sampling": "#cfe8ff",
    "reward": "#fde9c4",
    "reference": "#e6dcf7",
    "proximal": "#e6dcf7",
    "advantage": "#fde9c4",
    "train": "#d3f0d6",
    "sync": "#d3f0d6",
}
"""Fill colour by role; other roles are grey."""
GREY = "#eceff1"
LINE = "#546e7a"
NODE_HEIGHT = 44
GAP_X = 40
GAP_Y = 46
MARGIN = 20
LETTER = 7.4
"""Width of a letter of the larger font, in pixels."""


def to_text(graph: Graph) -> str:
    """Return a table of the nodes, in running order."""
    head = ("", "node", "role", "gets the outputs of", "function", "retries")
    rows = [
        (str(number), node.name, node.role, ", ".join(node.deps) or "-", node.label, str(node.retries))
        for number, node in enumerate(graph.nodes, start=1)
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([f"pipeline {graph.name}", *(line.rstrip() for line in lines)])


def to_mermaid(graph: Graph) -> str:
    """Return a Mermaid flow chart."""
    lines = ["flowchart TD"]
    for node in graph.nodes:
        lines.append(f'    {_id(node.name)}["{escape(_title(node))}<br/><i>{escape(_subtitle(node))}</i>"]')
    lines += [f"    {_id(name)} --> {_id(node.name)}" for node in graph.nodes for name in node.deps]
    for node in graph.nodes:
        lines.append(f"    style {_id(node.name)} fill:{COLOURS.get(node.role, GREY)},stroke:{LINE}")
    return "\n".join(lines) + "\n"


def to_svg(graph: Graph) -> str:
    """Return a drawing in layers: data flows from the top down."""
    layers = _layers(graph)
    rows_width = [sum(box.width for box in layer) + GAP_X * (len(layer) - 1) for layer in layers]
    width = max(rows_width) + 2 * MARGIN
    boxes = dict[str, _Box]()
    for depth, (layer, used) in enumerate(zip(layers, rows_width, strict=True)):
        x = (width - used) / 2
        for box in layer:
            box.x = x + box.width / 2
            box.y = MARGIN + depth * (NODE_HEIGHT + GAP_Y)
            x += box.width + GAP_X
            boxes[box.key] = box
    height = 2 * MARGIN + len(layers) * NODE_HEIGHT + (len(layers) - 1) * GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" text-anchor="middle">',
        f"<title>pipeline {escape(graph.name)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += [_curve(way) for node in graph.nodes for way in _edge_paths(node, boxes)]
    parts += [_rectangle(box, box.node) for box in boxes.values() if box.node is not None]
    return "\n".join([*parts, "</svg>"]) + "\n"


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass
class _Box:
    """A node, or a waypoint where an edge passes through a layer; ``x`` is its middle, ``y`` its top."""

    key: str
    width: float
    before: list[str] = field(default_factory=list[str])
    node: GraphNode | None = None
    x: float = 0.0
    y: float = 0.0


def _layers(graph: Graph) -> list[list[_Box]]:
    """Return boxes by layers: a node below all its dependencies, and near the middle of its predecessors."""
    depth = dict[str, int]()
    for node in graph.nodes:
        depth[node.name] = 1 + max((depth[name] for name in node.deps), default=-1)
    layers: list[list[_Box]] = [[] for _ in range(1 + max(depth.values()))]
    for node in graph.nodes:
        before: list[str] = []
        for name in node.deps:
            for level in range(depth[name] + 1, depth[node.name]):
                key = _waypoint_key(name, node.name, level)
                layers[level].append(_Box(key, 16, [_waypoint_key(name, node.name, level - 1, depth[name])]))
            before.append(_waypoint_key(name, node.name, depth[node.name] - 1, depth[name]))
        width = LETTER * max(len(_title(node)), 0.8 * len(_subtitle(node))) + 28
        layers[depth[node.name]].append(_Box(node.name, width, before, node))
    place = dict[str, float]()
    for layer in layers:
        # sort boxes by the middle of their predecessors; the first layer keeps its order
        layer.sort(key=lambda box: sum(place[key] for key in box.before) / max(len(box.before), 1))
        place |= {box.key: (index + 0.5) / len(layer) for index, box in enumerate(layer)}
    return layers


def _waypoint_key(start: str, end: str, level: int, top: int = -1) -> str:
    """Return the key of an edge's waypoint in a layer; in the start layer, its node's key."""
    return start if level == top else f"{start}>{end}:{level}"


def _edge_paths(node: GraphNode, boxes: dict[str, _Box]) -> list[list[_Box]]:
    """Return the edges into a node, each as a path from its start through its waypoints."""
    ways: list[list[_Box]] = []
    for key in boxes[node.name].before:
        way = [boxes[key], boxes[node.name]]
        while way[0].node is None:
            way.insert(0, boxes[way[0].before[0]])
        ways.append(way)
    return ways


# -- shapes -----------------------------------------------------------------------------------------------------------


def _curve(way: list[_Box]) -> str:
    """Return an edge as a curve: vertical within each layer, bending in between."""
    x = way[0].x
    y = way[0].y + NODE_HEIGHT
    path = f"M{x:.1f} {y:.1f}"
    for box in way[1:]:
        path += f" C{x:.1f} {y + GAP_Y / 2:.1f} {box.x:.1f} {box.y - GAP_Y / 2:.1f} {box.x:.1f} {box.y:.1f}"
        x = box.x
        y = box.y
        if box is not way[-1]:
            y += NODE_HEIGHT
            path += f" L{x:.1f} {y:.1f}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#arrow)"/>'


def _rectangle(box: _Box, node: GraphNode) -> str:
    left = box.x - box.width / 2
    fill = COLOURS.get(node.role, GREY)
    return (
        f'<rect x="{left:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{NODE_HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="{LINE}"/>\n'
        f'<text x="{box.x:.1f}" y="{box.y + 18:.1f}" font-size="13" font-weight="bold">{escape(_title(node))}</text>\n'
        f'<text x="{box.x:.1f}" y="{box.y + 34:.1f}" font-size="10" fill="{LINE}">{escape(_subtitle(node))}</text>'
    )


def _title(node: GraphNode) -> str:
    return node.name + (f" (retries {node.retries})" if node.retries else "")


def _subtitle(node: GraphNode) -> str:
    return f"{node.role}: {node.label}"


def _id(name: str) -> str:
    # "end" and the like are Mermaid keywords
    return f"n_{name}"
