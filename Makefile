# make train   sets up .venv and trains        (ARGS="runner.seed=1" passes more settings)
# make test    sets up .venv and runs the tests (ARGS="-k registry" passes more options)
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
ARGS ?=
CORES := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
PYTEST_WORKERS ?= $(shell echo $$(($(CORES) < 15 ? $(CORES) + 1 : 16)))
CHECKED := embodrl tests scripts benchmarks examples

.PHONY: help setup train test test-avx2 test-fast test-all test-long test-gpu test-megatron test-ray test-simulators test-vllm coverage crash-test chaos soak lint format docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

setup: ## create .venv with all dependencies; does nothing if it is up to date
	@scripts/setup.sh

train: setup ## train OpenVLA on ManiSkill PushCube
	@$(BIN)/embodrl train env=maniskill model=openvla $(ARGS)

# One thread per process: the workers already use all cores (one worker more than cores, since many tests wait for
# subprocesses). All tests of a file run in one process; the many small unit tests run last. Bytecode is kept, since
# every worker and every process that the tests start would compile the same files.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# A worker that dies ends the tests: what pytest-xdist starts in its place may hang.
SPREAD := -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: setup ## run the tests, but for the long ones (about 8 minutes on two cores)
	@$(PYTEST) $(SPREAD) -m "not long" $(ARGS)

# What computes otherwise on processors of another kind, limited to the instructions that all of them have.
NUMERICAL := tests/unit/algorithms tests/unit/models tests/unit/learners/offline tests/unit/hybrid_engines tests/unit/test_processor.py \
	tests/parity tests/integration/test_pipelines.py tests/integration/test_debug_runs.py
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
test-avx2: setup ## run the numerical tests as on a processor without AVX-512 and bf16 (2 minutes on two cores)
	@$(AVX2) $(PYTEST) $(SPREAD) -m "not long" $(NUMERICAL) $(ARGS)

test-fast: setup ## run the unit and parity tests (2 minutes on two cores)
	@$(PYTEST) -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not long" tests/unit tests/parity $(ARGS)

# Processes that the tests start are not measured.
coverage: setup ## say which lines the unit and parity tests run
	@$(PYTEST) -n $(CORES) --dist loadfile --no-loadscope-reorder -m "not long" --cov --cov-report=term:skip-covered tests/unit tests/parity $(ARGS)

# Workers and simulators start as users start them, not forked from a process that has their imports.
test-all: setup ## run every test, the long ones as well (an hour and more)
	@EMBODRL_TESTS_COLD=1 $(PYTEST) $(SPREAD) $(ARGS)

test-long: setup ## run the long tests that the target test leaves out
	@$(PYTEST) -n $(PYTEST_WORKERS) -m long $(ARGS)

# Where EMBODRL_PYTHON names an interpreter that has the packages, nothing is set up: a machine may have no registry.
GPU_TESTS := tests/unit/hybrid_engines/test_offload.py tests/integration/test_maniskill_gpu.py
test-gpu: $(if $(EMBODRL_PYTHON),,setup) ## run the tests that need a CUDA GPU (EMBODRL_PYTHON=python3 names the interpreter)
	@OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(or $(EMBODRL_PYTHON),$(BIN)/python) -m pytest -n 0 -m gpu $(GPU_TESTS) $(ARGS)

test-megatron: setup ## install megatron-core and run its tests
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[megatron]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/unit/hybrid_engines/training/megatron_engine $(ARGS)

# These tests start whole Ray clusters, so they run one at a time.
RAY_TESTS := tests/integration/test_ray_machines.py tests/integration/test_ray_runs.py \
	tests/integration/test_workers.py tests/faults/test_worker_faults.py
test-ray: setup ## install Ray and run its tests
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 $(RAY_TESTS) -k ray $(ARGS)

# Simulators that are not part of .venv are installed into .venv-simulators, LIBERO by `embodrl env install libero`.
# A skipped test gives its reason.
SIMULATOR_TESTS := tests/integration/test_env_contract.py tests/integration/test_simulator_runs.py \
	tests/integration/test_long_restores.py tests/integration/test_libero.py tests/faults/test_fault_matrix.py
test-simulators: setup ## install Meta-World, Gymnasium and LIBERO into .venv-simulators and run their tests
	@scripts/setup_simulators.sh
	@OMP_NUM_THREADS=1 EMBODRL_SIMULATORS_PYTHON=$(CURDIR)/.venv-simulators/bin/python \
		$(BIN)/python -m pytest -n 0 $(SIMULATOR_TESTS) -k "not maniskill and not toy" $(ARGS)

# Separate from the other tests: vLLM is a large dependency with conflicting pins, so it gets its own environment.
test-vllm: ## create .venv-vllm with vLLM for CPUs and run its tests there
	@scripts/setup_vllm.sh
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n 0 tests/vllm $(ARGS)

# ARGS="--scenario train --sample 50" for a part; --json FILE writes every trial.
crash-test: setup ## cut power after every file operation of a run, damage every file, and judge the recoveries
	@OMP_NUM_THREADS=1 $(BIN)/python tests/crash/crash.py $(ARGS)

# The output names the seed; SEED=N repeats its trials. ARGS="--learner sac --keep DIR" for a part. Bash has a variable
# SECONDS of its own, so the default is not taken from the environment.
SECONDS := 600
SEED ?=
chaos: setup ## send random signals to whole runs, resume them and compare (SECONDS=600, SEED=N)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/crash/chaos.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# SOAK_ENV takes any arguments of `embodrl train`; SOAK_ARGS takes options of benchmarks/soak.py.
SOAK_MINUTES ?= 120
SOAK_ENV ?= env=toy env.step_timeout_s=20
SOAK_ARGS ?=
soak: setup ## train for two hours with random simulator crashes (SOAK_MINUTES=10, SOAK_ENV="env=maniskill")
	@$(BIN)/python benchmarks/soak.py --minutes $(SOAK_MINUTES) $(SOAK_ARGS) $(SOAK_ENV)

lint: setup ## check style, types, layers and sizes
	@scripts/lint.sh

format: setup ## reformat the code
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

# NO_MKDOCS_2_WARNING hides an announcement that the theme prints at every build.
docs: setup ## build the documentation site into site/; a broken link or anchor fails
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

clean: ## remove everything that make built; outputs/ and data/ are kept
	rm -rf .venv .venv-simulators .venv-vllm build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
