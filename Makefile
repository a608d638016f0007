# `make rl` and `make test` are the two commands; `make help` lists the rest. Sessions in other environments: noxfile.py.
#: Variables:
#:   VENV          environment to create and use (.venv); PYTHON creates it (python3)
#:   REQUIREMENTS  what goes into it: requirements-cpu.txt or, for GPUs, requirements.txt
#:   GPU_VENV      environment of make test-gpu (.venv-software-gpu): 7 GB, with requirements-software-gpu.txt
#:   PYTHON_ENV    an environment you made, used as it is; nothing is installed
#:   PYTEST_ARGS   more arguments for pytest, for example "-k planner -x"
#:   ARGS          of make rl: "rl_config.iterations=5"; of pytest in make gpu-check: "-k stage1"
#:   TRAINER       of make rl: megatron or fsdp2; NPROC: its ranks; CONFIG: its file; OUT: where it writes
#:   SERVER        of make rl: 1 lets `vllm serve` generate, in a process of its own
#:   STOP_SECONDS  after which `hybrid-engine run` kills the ranks of make rl that have not ended by Ctrl-C (600)
#:   DEVICE        of make gpu-check: cuda, or cpu to see what can run without a GPU
#:   DIR, HAVE     of make offline-bundle: where it goes; what pip list prints on the other machine
#:   PLACE         of make offline-bundle: where to unpack it, on this machine
PYTHON       ?= python3
VENV         ?= .venv
GPU_VENV     ?= .venv-software-gpu
REQUIREMENTS ?= requirements-cpu.txt
TRAINER      ?= megatron
NPROC        ?= 2
STOP_SECONDS ?= 600
$(if $(filter megatron fsdp2,$(TRAINER)),,$(error TRAINER is megatron or fsdp2, not '$(TRAINER)'))
CONFIG       ?= examples/gpt_rl/configs/$(if $(filter fsdp2,$(TRAINER)),fsdp2_to_dp,tp2_to_dp2).yaml
OUT          ?= runs/gpt_rl$(if $(filter fsdp2,$(TRAINER)),_fsdp2)
PY           := $(or $(PYTHON_ENV),$(VENV))/bin/python
READY        := $(if $(PYTHON_ENV),,$(VENV)/.installed-project)
MARKER       := $(VENV)/.made-by-make
STAMP        := $(VENV)/.installed-$(notdir $(REQUIREMENTS))
# Two processes, each with whole files, whose tests share launches, in the order of folders: the longest are not last.
# One that crashes ends the run: with another in its place xdist loses tests, and waits for them without end.
PYTEST       := $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Tests of other folders that run over it, too.
OF_THE_SWITCH = failures ranks sharding_manager late_state incremental verifier reports
OVER_SOFTWARE_GPU = $(GPU_VENV)/bin/python -m tests.software_gpu --gpus 4 -- $(GPU_VENV)/bin/python
# Pytest rewrites each file's assertions, and keeps that where Python may write bytecode.
test test-fast test-faults test-long: export PYTHONDONTWRITEBYTECODE =
# Modules are found from the checkout, also by subprocesses that run elsewhere.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help env rl test test-fast test-faults test-long test-gpu test-mutants lint format docs matrix bench gpu-check offline-bundle
help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile && sed -n 's/^#: //p' Makefile
env: $(READY) ## Create the environment in VENV if it is missing or out of date
rl: $(READY) ## Train a GPT by RL, Megatron or FSDP2 <-> vLLM (TRAINER, NPROC, CONFIG, OUT, SERVER, ARGS)
	OMP_NUM_THREADS=1 $(if $(SERVER),$(PY) -m examples.gpt_rl.served $(CONFIG) --) \
	    $(PY) -m hybrid_engine run --nproc-per-node $(NPROC) \
	    --shutdown-timeout $(STOP_SECONDS) -m examples.gpt_rl.train --config $(CONFIG) --out $(OUT) $(ARGS)
test: lint ## Check style, formatting and types, then run the tests (but for test-faults and test-long)
	$(PYTEST) $(PYTEST_ARGS)
test-fast: $(READY) ## Run the tests that start no ranks and take seconds: the loop while writing code
	HYPOTHESIS_PROFILE=fast $(PYTEST) -q -m 'not ranks and not slow' $(PYTEST_ARGS)
test-faults: $(READY) ## Break real jobs on purpose: kills, stalls, random failures
	$(PYTEST) -m faults $(PYTEST_ARGS) tests/faults tests/walk tests/hybrid_engine/ranks/test_failure_watch.py
test-long: $(READY) ## What takes minutes: servers in more families, changed config.json files, whole runs of examples
	$(PYTEST) -m long $(PYTEST_ARGS) tests
test-mutants: $(READY) ## Change the engine line by line, and require tests to notice (ONLY=text, KIND=hand or syntax)
	HYPOTHESIS_PROFILE=fast $(PY) -m tests.mutants.run --only '$(ONLY)' $(if $(KIND),--kind $(KIND))
lint: $(READY) ## Check style, formatting, sizes and types
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m tests.harness.readability && $(PY) -m mypy
format: $(READY) ## Fix style and formatting in place
	$(PY) -m ruff check --fix . && $(PY) -m ruff format .
docs: $(READY) ## Make the pages of docs/ that have a source
	$(PY) docs/make_configuration.py && $(PY) docs/make_seventy_billion.py && $(PY) docs/make_pictures.py && \
	    $(PY) docs/make_models.py && $(PY) docs/make_console.py
matrix: $(READY) ## Switch every layout and model family with both real engines (ONLY=text, JSON=file, RECORD=1)
	OMP_NUM_THREADS=1 $(PY) -m tests.hybrid_engine.tools.verify.matrix \
	    $(if $(ONLY),--only '$(ONLY)') $(if $(JSON),--json '$(JSON)') $(if $(filter 1,$(RECORD)),--record)
bench: $(READY) ## Time resharding beside its peers, as JSON (QUICK=1, ONLY=text, JSON=file)
	$(PY) -m benchmarks.reshard --json '$(or $(JSON),runs/reshard.json)' \
	    $(if $(QUICK),--quick) $(if $(ONLY),--only '$(ONLY)')
# tests/conftest.py is for the rest of the suite; a wide line has the reason of what is skipped.
# The CUDA wheels of torch and vLLM have an environment of their own.
test-gpu: ## The same checks, and more, over a GPU in software: any machine (GPU_VENV, ARGS, JSON)
	$(MAKE) env VENV='$(GPU_VENV)' REQUIREMENTS=requirements-software-gpu.txt PYTHON_ENV=
	$(OVER_SOFTWARE_GPU) -m pytest tests/software_gpu -v -p no:cacheprovider --durations 10 $(ARGS)
	$(OVER_SOFTWARE_GPU) -m pytest -p tests.software_gpu.checks -v -p no:cacheprovider --durations 10 $(ARGS) \
	    $(addprefix tests/hybrid_engine/switch/test_,$(addsuffix .py,$(OF_THE_SWITCH))) \
	    $(addprefix tests/walk/test_walk.py::test_,a_random_walk every_call_is_right_or_refused)
	$(OVER_SOFTWARE_GPU) -m pytest tests/gpu --confcutdir=tests/gpu -v -p no:cacheprovider --timeout 900 \
	    --budget 5000 --device cuda $(if $(JSON),--records '$(JSON)') $(ARGS)
gpu-check: $(READY) ## Check on this machine's GPUs what was written for them (ARGS=options, JSON=file)
	COLUMNS=200 $(PY) -m pytest tests/gpu --confcutdir=tests/gpu -v --continue-on-collection-errors -p no:cacheprovider \
	    --timeout 240 --device $(or $(DEVICE),cuda) $(if $(JSON),--records '$(JSON)') $(ARGS)
offline-bundle: $(READY) ## Collect what ran on GPUs, for a machine without registries or here (DIR, HAVE, PLACE)
	$(PY) -m tests.gpu.offline.bundle '$(or $(DIR),$(error Name the folder: DIR=folder))' $(if $(HAVE),--have '$(HAVE)')
	$(if $(PLACE),for folder in '$(DIR)'/*/; do $(PY) "$$folder/run.py" '$(PLACE)' --unpack || exit; done)

# VENV is made anew when the list of packages has changed, but only if it was made here. Stamps are written last, so
# that an installation that was interrupted is made again. The CPU list is complete: --no-deps keeps out what it omits.
$(STAMP): $(REQUIREMENTS)
	@if cmp -s '$<' '$@'; then touch '$@'; exit 0; fi; set -e; \
	if [ ! -e '$(MARKER)' ] && [ -n "$$(ls -A '$(VENV)' 2>/dev/null)" ]; then \
	    echo '$(VENV) was not made by this Makefile: use it by PYTHON_ENV=$(VENV), name another place by VENV=dir, or remove it.' >&2; \
	    exit 1; \
	fi; \
	echo 'Creating the environment $(VENV) from $<; this takes a few minutes.'; \
	rm -rf '$(VENV)'; mkdir -p '$(VENV)'; touch '$(MARKER)'; $(PYTHON) -m venv '$(VENV)'; \
	$(PY) -m pip install -qq $(if $(filter requirements.txt,$<),,--no-deps) -r '$<' || { \
	    echo 'Installing $< failed. If torch was not found, see the head of that file.' >&2; exit 1; }; \
	$(if $(findstring cpu,$<),,$(PY) -c 'import torch; torch.version.cuda or exit("This torch has no CUDA: leave out PIP_EXTRA_INDEX_URL")';) \
	$(if $(findstring requirements-cpu,$<),$(PY) -m pip install -qq --no-deps --target '$(VENV)/vision' -r requirements-cpu-vision.txt;) \
	cp '$<' '$@'
# An old egg-info would stay, and its entry points come first where the checkout is on Python's path.
$(VENV)/.installed-project: pyproject.toml $(STAMP)
	@rm -rf hybrid_engine.egg-info
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e . && touch $@
