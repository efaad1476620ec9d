"""An extension that sends this process a signal at a chosen point of its work, so that no test depends on timing.

``STOP_AT=act:3:SIGINT`` interrupts the third call of the function called ``act`` in POINTS; several are separated by
commas. ``optimizer_step:6:SIGKILL:simulator`` kills a simulator instead, and waits until it is dead; with
``fsdp_step:6:SIGKILL:rank_1`` only the process of that rank takes the signal, with ``rank_1_once`` not the one that is
started in its place, with ``parent_of_1`` the main process takes it, with ``worker`` its youngest worker, and with
``all_of_1`` the main process and all that it has started, and ``later`` is as if it came a second after the one before.
The process ids of the children at that moment go to the file ``STOP_AT_CHILDREN``. ``publish:1:EIO`` raises that
error instead of a signal, from the first call on.
"""

import errno
import os
import signal
import sys
from pathlib import Path

import psutil

POINTS = {
    "act": "embodrl.hybrid_engines.rollout.native:NativeRolloutEngine.act",
    "decide": "embodrl.hybrid_engines.rollout.native:NativeRolloutEngine.decide",
    "expert_actions": "embodrl.envs.pool.pool:EnvPool.expert_actions",
    "vllm_token": "embodrl.hybrid_engines.rollout.vllm.decoder:_Step.choose",
    "optimizer_step": "embodrl.hybrid_engines.training.native:NativeTrainEngine.optimizer_step",
    "fsdp_step": "embodrl.hybrid_engines.training.fsdp:FsdpTrainEngine.optimizer_step",
    "join": "embodrl.workers.acting_process:make_receiver",
    "take_weights": "embodrl.workers.rollout_process:RolloutProcess.update_weights",
    "gather_only": "embodrl.hybrid_engines.weight_sync.base:GatherOnly._send",
    "write_shard": "embodrl.hybrid_engines.training.sharded_checkpoint:_HashedFiles.create_stream",
    "write_file": "embodrl.storage.checkpoint:_write_file",
    "sync_directory": "embodrl.storage.checkpoint:sync_directory",
    "publish": "embodrl.storage.checkpoint:publish_directory",
    "store": "embodrl.data.replay:ReplayStores.add",
    "learn": "embodrl.learners.off_policy:OffPolicyUpdate.update_actor",
    "learn_rlt": "embodrl.learners.rlt:RltUpdate.update_actor",
    "learn_td3": "embodrl.learners.offline.td3_bc:Td3BcUpdate.update_actor",
    "learn_offline": "embodrl.learners.offline.learner:OfflineUpdater.imitate",
    "log": "embodrl.reporting.sinks:MetricsLogger.log",
    "log_late": "embodrl.reporting.sinks:MetricsLogger.log_late",
    "add_episode": "embodrl.data.raw:RawWriter.add",
    "add_lerobot_episode": "embodrl.data.lerobot_writer:LeRobotWriter.add",
    "sft_step": "embodrl.learners.imitation_update:ImitationUpdate.step",
    "wait_started": "embodrl.envs.pool.pool:EnvPool.wait_started",
}


def simulator():
    """The simulator process that was started first."""
    found = [child for child in psutil.Process().children() if any("bootstrap.py" in part for part in child.cmdline())]
    return min(found, key=lambda child: child.create_time())


def worker():
    """The process of a group of workers that was started last."""
    found = [child for child in psutil.Process().children() if any("process_main" in part for part in child.cmdline())]
    return max(found, key=lambda child: child.create_time())


def lives(process):
    """Tell whether a process is there that is more than a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_helper(process):
    """Tell whether a process belongs to the tests' fork server, or is the guard of this process's family."""
    command = process.cmdline()
    return command[0].startswith("zygote") or any("guard.py" in part for part in command)


def fail(point, wanted, code):
    """Let a point raise an OSError from its call number ``wanted`` on."""
    owner, name, original = resolve(point)
    calls = 0

    def replacement(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls >= wanted:
            raise OSError(code, os.strerror(code))
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def resolve(point):
    """The owner, name and value of a point."""
    module_name, _, path = POINTS[point].partition(":")
    __import__(module_name)
    owner = sys.modules[module_name]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def install(point, wanted, number, whom):
    (owner, name, original), calls = resolve(point), 0
    rank, once = os.environ.get("RANK"), whom.endswith("_once")
    ranked = (f"rank_{rank}", f"rank_{rank}_once", f"parent_of_{rank}", f"all_of_{rank}")
    here = whom in ("", "later", "simulator", "worker", *ranked)

    def replacement(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == wanted and here and not (once and Path(os.environ["STOP_AT_CHILDREN"]).exists()):
            family = psutil.Process().children(recursive=True)
            children = [child.pid for child in family if not is_helper(child)]
            Path(os.environ["STOP_AT_CHILDREN"]).write_text("\n".join(map(str, children)))
            if whom in ("simulator", "worker"):
                child = simulator() if whom == "simulator" else worker()
                child.send_signal(number)
                while lives(child):
                    os.sched_yield()
            elif whom.startswith("all"):
                driver = psutil.Process(os.getppid())
                for member in (driver, *driver.children(recursive=True)):
                    if member is driver or not is_helper(member):
                        member.send_signal(number)
            else:
                if whom == "later":
                    sys.modules["embodrl.processes.ending"].REPEAT_S = 0.0
                os.kill(os.getppid() if whom.startswith("parent") else os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


if os.environ.get("STOP_AT") and Path(sys.argv[0]).name != "bootstrap.py":  # which starts simulators
    for order in os.environ["STOP_AT"].split(","):
        point, wanted, number, *whom = order.split(":")
        if number in errno.errorcode.values():
            fail(point, int(wanted), getattr(errno, number))
        else:
            install(point, int(wanted), signal.Signals[number], "".join(whom))
