"""Wrong settings of robots and of who corrects them; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

ALONE = (
    *("env.num_processes=1", "env.train.total_num_envs=1", "env.eval.total_num_envs=1"),
    *("actor.global_batch_size=20", "actor.micro_batch_size=10"),
)
CLOCK = ("env.real_time.control_hz=10", *ALONE)
GATE = "algorithm.dagger.gate_threshold=0.3"
ARM = ("env=robot", "model=mlp", "model.num_action_chunks=1", *ALONE, "env.instruction=go")

ROBOT = [
    Wrong(
        "several environments with one clock",
        "env.num_processes",
        "robot-not-alone",
        ("env.num_processes=2", "env.real_time.control_hz=10"),
        more=("env.train.total_num_envs", "env.eval.total_num_envs"),
        names="2",
    ),
    Wrong(
        "a clock far away",
        "env.real_time.control_hz",
        "clock-is-here",
        (*CLOCK, "env.remote=[robots:5555]"),
        more=("env.remote",),
    ),
    Wrong(
        "limits of another robot",
        "env.real_time.safety.low",
        "limits-fit-the-actions",
        ("env.real_time.safety.low=[0,0]",),
        names="7",
    ),
    Wrong(
        "limits in the wrong order",
        "env.real_time.safety.low",
        "limits-fit-the-actions",
        ("env.real_time.safety.low=[1]", "env.real_time.safety.high=[0,2,2,2,2,2,2]"),
    ),
    Wrong(
        "a person who can't say anything",
        "env.real_time.wait_for_person",
        "person-can-be-heard",
        ("env.real_time.wait_for_person=true",),
    ),
    Wrong(
        "a person in a stop_requested",
        "env.reset_timeout_s",
        "person-has-time",
        ("env.reset_timeout_s=60", "env.step_timeout_s=900", "env.real_time.control_dir=here", *CLOCK),
        names="60",
    ),
    Wrong(
        "a store of an unknown kind",
        "store.url",
        "store-url-is-valid",
        ("store.url=rediz://host/0/run", *ALONE),
        names="redis://",
    ),
    Wrong("a store without its library", "store.url", "store-library-is-installed", ("store.url=oss://bucket/run",)),
    Wrong("a missing policy", "store.intervention", "intervention-is-possible", ("store.intervention=missing", GATE)),
    Wrong(
        "a keyboard whose emergency stop is not read",
        "env.real_time.control_dir",
        "intervention-is-possible",
        ("store.intervention=keyboard", "env=toy", "env.tasks=[reach-red]", *CLOCK),
    ),
    Wrong(
        "a person without a clock", "store.intervention", "intervention-is-possible", ("store.intervention=keyboard",)
    ),
    Wrong(
        "no rule for a stand-in",
        "algorithm.dagger.gate_threshold",
        "intervention-is-possible",
        ("algorithm.dagger.gate_threshold=null", "store.intervention=expert"),
    ),
    Wrong("a robot without words", "env.instruction", "robot-is-named", ("env.instruction=null", *ARM[:-1])),
    Wrong("no robot", "env.robot", "robot-is-named", ("env.robot=null", *ARM)),
    Wrong("no function", "env.reset_fn", "robot-is-named", ("env.reset_fn=home", *ARM), names="home"),
    Wrong(
        "ranges of another robot",
        "env.action_low",
        "ranges-are-those-of-the-actions",
        ("env.action_low=[0]", *ARM),
        names="6",
    ),
    Wrong(
        "a range in the wrong order",
        "env.action_low",
        "ranges-are-those-of-the-actions",
        ("env.action_low=[0,0,0,0,0,101]", *ARM),
        names="101",
    ),
    Wrong(
        "a robot without a clock",
        "env.real_time.control_hz",
        "robot-has-a-clock-of-its-own",
        ("env.real_time.control_hz=null", *ARM),
    ),
    Wrong(
        "a robot with the noise of another",
        "env.real_time.action_noise",
        "robot-has-a-clock-of-its-own",
        ("env.real_time.action_noise=0.1", *ARM),
    ),
    Wrong(
        "a robot with a fast clock",
        "env.real_time.speed",
        "robot-has-a-clock-of-its-own",
        ("env.real_time.speed=2", *ARM),
    ),
    Wrong(
        "no judge of success",
        "env.success_fn",
        "robot-has-a-clock-of-its-own",
        ("env.success_fn=null", "env.real_time.control_dir=null", "env.real_time.wait_for_person=false", *ARM),
    ),
]
