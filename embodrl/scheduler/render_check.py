"""Simulate one step and draw one frame with SAPIEN: the proof that a driver does what it promises.

Run as a program by ``embodrl doctor``, in a process of its own: a faulty driver may crash or hang.
"""

from __future__ import annotations

import json
import os
import sys
import time

FRAME_PX = 64


def draw_frame() -> dict[str, object]:
    """Return the device, the seconds that the first step and frame took, and the picture's contrast.

    Returns:
        ``device`` (str), ``seconds`` (float) and ``contrast``, the standard deviation of the pixels: 0 for an empty
        picture.

    Raises:
        RuntimeError: SAPIEN can't simulate or render here.
    """
    import numpy as np
    import sapien

    from embodrl.envs.maniskill.rendering import render_device_name

    start = time.perf_counter()
    device = sapien.Device(render_device_name("auto"))
    scene = sapien.Scene([sapien.physx.PhysxCpuSystem(), sapien.render.RenderSystem(device)])
    scene.set_ambient_light([0.4, 0.4, 0.4])
    scene.add_directional_light([1, 0, -1], [1, 1, 1])
    builder = scene.create_actor_builder()
    builder.add_box_collision(half_size=[0.1, 0.1, 0.1])
    builder.add_box_visual(half_size=[0.1, 0.1, 0.1], material=[0.9, 0.2, 0.1])
    box = builder.build()
    box.set_pose(sapien.Pose([1.0, 0.0, 0.1]))
    camera = scene.add_camera("camera", FRAME_PX, FRAME_PX, 1.0, 0.01, 10.0)
    height_before = float(box.pose.p[2])
    scene.step()
    if float(box.pose.p[2]) >= height_before:
        raise RuntimeError("the simulation does not move: a box without support did not fall")
    scene.update_render()
    camera.take_picture()
    picture = np.asarray(camera.get_picture("Color"))[..., :3]
    return {"device": device.name, "seconds": round(time.perf_counter() - start, 3), "contrast": float(picture.std())}


def main() -> int:
    """Print the result as one line of JSON."""
    os.environ.setdefault("LP_NUM_THREADS", "1")
    os.environ.setdefault("SAPIEN_DISABLE_RAY_TRACING", "1")
    sys.stdout.write(json.dumps(draw_frame()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
