# Everything below sets itself up: Python 3.10 or newer and make are all that is needed.
SHELL := /bin/bash
PYTHON ?= python3
SPECULATORS ?= 0.3.0
VENV ?= .venv-speculators-$(SPECULATORS)
LOCK := requirements/cpu-speculators-$(SPECULATORS).txt
UV := .tools/bin/uv
RUN := $(VENV)/bin/python
CACHE ?= $(CURDIR)/.cache
# An engine on this machine's CPU: 1 GiB of KV cache, no model hub.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export HF_HUB_OFFLINE ?= 1
export SPEC_VLLM_COMPAT_CACHE := $(CACHE)
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH

include matrix.mk bench.mk

PYTHONS ?= 3.10 3.11 3.12 3.13

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs site env model lock wheel-check clean
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | sed -E 's/:.*## /\t/' | expand -t 12

demo: env model ## the main job on a real model, compared with Transformers layer by layer
	$(RUN) examples/demo.py $(CACHE)/SmolLM2-135M-Instruct

test: env model ## all tests on the real vLLM and speculators (SPECULATORS=0.4.0.1 for the other line)
	$(RUN) -m pytest $(ARGS)

lint: $(UV) ## ruff and mypy
	$(UV) run --quiet --isolated --only-group lint ruff check .
	$(UV) run --quiet --isolated --only-group lint ruff format --check .
	$(UV) run --quiet --isolated --group lint mypy

docs: env ## generated pages (tables of patch sets)
	$(RUN) tools/render_docs.py

site: $(UV) ## the documentation site, into site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(UV) run --quiet --isolated --only-group docs sh -c "mkdocs build --quiet && python tools/site_gate.py"

env: $(VENV)/ready
model: $(CACHE)/SmolLM2-135M-Instruct/config.json

$(UV):
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet "uv>=0.9"

# Compiled at once: every worker process imports all of vLLM.
$(VENV)/ready: $(LOCK) pyproject.toml | $(UV)
	@echo "setting up $(VENV): vLLM for CPU, torch, speculators $(SPECULATORS) (some minutes at first, 8 GB on disk)"
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip sync --compile-bytecode --python $(RUN) $(LOCK)
	$(UV) pip install --quiet --no-deps --python $(RUN) --editable .
	@touch $@

$(CACHE)/SmolLM2-135M-Instruct/config.json: | $(VENV)/ready
	$(RUN) tools/smollm2.py $(CACHE)

# The wheel is built from the sdist, and its tests are those that the sdist holds.
wheel-check: $(UV) ## sdist and wheel in clean environments, with the newest and the oldest dependencies
	rm -rf dist && $(UV) build --quiet
	$(UV) tool run --quiet 'twine==6.2.0' check --strict dist/*
	mkdir dist/sdist && tar -xzf dist/*.tar.gz -C dist/sdist --strip-components 1
	@export PATH=$$PATH:$$(echo $$HOME/.pyenv/versions/3.1[0-3]*/bin | tr ' ' :); for resolution in highest lowest-direct; do for python in $(PYTHONS); do \
	  if ! $(UV) python find --no-python-downloads $$python >/dev/null 2>&1; then echo "NOT RUN: python $$python is not on this machine"; continue; fi; \
	  echo "python $$python, $$resolution" && \
	  $(UV) venv --quiet --clear --no-python-downloads --python $$python .venv-wheel && \
	  $(UV) pip install --quiet --python .venv-wheel/bin/python --resolution $$resolution dist/*.whl 'pytest>=8' && \
	  $(UV) pip check --quiet --python .venv-wheel/bin/python && \
	  (cd dist/sdist/tests && $(CURDIR)/.venv-wheel/bin/python -m pytest -q -p no:cacheprovider test_versions.py test_registry.py) || exit 1; done; done
	@echo "from the sdist" && $(UV) venv --quiet --clear --python $(PYTHON) .venv-wheel && \
	  $(UV) pip install --quiet --python .venv-wheel/bin/python dist/*.tar.gz --group test && \
	  $(UV) pip check --quiet --python .venv-wheel/bin/python && \
	  (cd dist/sdist && $(CURDIR)/.venv-wheel/bin/python -m pytest -q -p no:cacheprovider -m "not stack")

lock: $(UV) ## resolve the environments anew
	for version in 0.3.0 0.4.0.1; do \
	  echo "speculators==$$version" | $(UV) pip compile --quiet --universal --python-version 3.10 --no-header \
	    --override requirements/cpu-overrides.txt requirements/cpu.in - -o requirements/cpu-speculators-$$version.txt; done

clean: ## remove what this file has made
	rm -rf .venv-* .tools .cache
