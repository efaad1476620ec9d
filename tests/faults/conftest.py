"""Which faults `make test` leaves out with simulators that take long to start."""

import pytest

LONG_WITH_MANISKILL = (
    "test_a_damaged_mesh_cache_is_made_anew",
    "test_a_full_dev_shm_is_of_no_account",
    "test_a_simulator_that_fails_in_a_reset",
    "test_a_simulator_that_fails_in_a_step[maniskill-hang in step]",
    "test_a_simulator_that_fails_in_a_step[maniskill-picture",
    "test_killed_between_two_steps",
    "test_a_start_that_takes_too_long_after_a_death",
)
LONG_BUT_FOR_TOY = "test_faults_in_both_processes_at_once_neither_hang_nor_break_anything"


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        with_maniskill = item.name.startswith(LONG_WITH_MANISKILL) and "[maniskill" in item.name
        if with_maniskill or (item.name.startswith(LONG_BUT_FOR_TOY) and "[toy" not in item.name):
            item.add_marker("long")
