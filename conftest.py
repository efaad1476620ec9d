"""What all tests share: forked worker processes, and what `make test` leaves to `make test-all` for its time.

ManiSkill takes ten seconds of a core to start, most of them for its renderer's first picture. `make test` has each
kind of fault on the toy and on MuJoCo, and with ManiSkill the duties of an environment that differ there.
"""

from __future__ import annotations

import gc
import os

import fork_server
import pytest

# imageio-ffmpeg forks, and gRPC's handler of forks writes into the child's stderr, where the video's facts are read.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
fork_server.install()
gc.disable()  # until all tests are collected: nothing of them is garbage
LONG_WITH_MANISKILL = (
    "test_a_damaged_mesh_cache_is_made_again",
    "test_full_dev_shm_is_harmless",
    "test_a_number_that_cannot_be_true",
    "test_a_simulator_that_fails_in_a_reset",
    "test_a_simulator_that_fails_in_a_step",  # the limit of restarts has it crash
    "test_killed_",  # test_env_contract.py continues in another process what one has left
    "test_the_limit_of_restarts",
    "test_the_rate_of_control_is_reported",
    "test_stopped",
    "test_a_start_that_takes_too_long_after_a_death",
    "test_what_terminates_an_episode",  # test_maniskill.py has the success that ends one
)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of collections, each of which would walk through some million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(LONG_WITH_MANISKILL) and "[maniskill" in item.name:
            item.add_marker("long")
