# make train   sets everything up and trains         (ARGS="runner.seed=1" passes more settings)
# make test    sets everything up and runs the tests (ARGS="-k registry" passes more options)
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
ARGS ?=
CORES := $(shell nproc 2>/dev/null || echo 2)
PYTEST_WORKERS ?= $(shell echo $$(($(CORES) < 15 ? $(CORES) + 1 : 16)))
CHECKED := embodrl tests scripts benchmarks examples

.PHONY: help setup train test test-fast test-all test-long test-gpu test-megatron test-ray test-simulators test-vllm soak lint format warm-start clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

setup: ## make .venv with everything; a second run finds nothing to do
	@scripts/setup.sh

train: setup ## train OpenVLA in ManiSkill
	@$(BIN)/embodrl train env=maniskill model=openvla $(ARGS)

# One thread per process: the pytest workers fill the cores already, one more than there are cores as many tests wait for
# processes. All tests of a file stay in one worker; unit tests, which are many and small, come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SPREAD := -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
test: setup ## run the tests, but for the long ones (8 minutes on two cores)
	@$(PYTEST) $(SPREAD) -m "not long" $(ARGS)

test-fast: setup ## run the unit and parity tests (2 minutes on two cores)
	@$(PYTEST) -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not long" tests/unit tests/parity $(ARGS)

# Workers and simulators start as users start them, not forked from a process that has their imports.
test-all: setup ## run every test, the long ones as well (an hour and more)
	@EMBODRL_TESTS_COLD=1 $(PYTEST) $(SPREAD) $(ARGS)

test-long: setup ## run the long tests that the target test leaves out
	@$(PYTEST) -n $(PYTEST_WORKERS) -m long $(ARGS)

test-gpu: setup ## run the tests that need a CUDA GPU
	@$(PYTEST) -n 0 -m gpu $(ARGS)

test-megatron: setup ## install megatron-core, too, and run its tests
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[megatron]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/megatron $(ARGS)

# Whole Ray clusters come up, so that the tests run one after the other.
RAY_TESTS := tests/integration/test_ray_machines.py tests/integration/test_ray_runs.py \
	tests/integration/test_workers.py tests/faults/test_worker_faults.py
test-ray: setup ## install Ray, too, and run its tests
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 $(RAY_TESTS) -k ray $(ARGS)

# Simulators that .venv lacks live beside it. LIBERO's tests want EMBODRL_LIBERO_ASSETS, too; what is skipped says why.
SIMULATOR_TESTS := tests/integration/test_env_contract.py tests/integration/test_simulator_runs.py \
	tests/integration/test_long_restores.py tests/integration/test_libero.py tests/faults/test_fault_matrix.py
test-simulators: setup ## install Meta-World, Gymnasium and LIBERO beside .venv and run their tests
	@scripts/setup_simulators.sh
	@OMP_NUM_THREADS=1 EMBODRL_SIMULATORS_PYTHON=$(CURDIR)/.venv-simulators/bin/python \
		$(BIN)/python -m pytest -n 0 $(SIMULATOR_TESTS) -k "not maniskill and not toy" $(ARGS)

# Not beside the other tests: vLLM is a large dependency with pins of its own, and has an environment of its own.
test-vllm: ## make .venv-vllm with vLLM for CPUs and run its tests there
	@scripts/setup_vllm.sh
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n 0 tests/vllm $(ARGS)

# SOAK_ENV is any arguments of `embodrl train`; SOAK_ARGS are options of benchmarks/soak.py.
SOAK_MINUTES ?= 120
SOAK_ENV ?= env=toy env.step_timeout_s=20
SOAK_ARGS ?=
soak: setup ## train for two hours while simulators are killed at random (SOAK_MINUTES=10, SOAK_ENV="env=maniskill")
	@$(BIN)/python benchmarks/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS) $(SOAK_ENV)

lint: setup ## style, types, layers, sizes
	@scripts/lint.sh

format: setup ## rewrite the files in the project's style
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

warm-start: setup ## make the checkpoint that the package ships anew
	@scripts/make_warm_start.sh

clean: ## remove what was built; outputs/ and data/ stay
	rm -rf .venv .venv-simulators .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
