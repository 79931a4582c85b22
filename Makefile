# Two commands for a newcomer: `make train` and `make test`. Both set everything up on the first call.
PYTHON := .venv/bin/python
TENANTS ?= libero,maniskill
ARGS ?=
export MUJOCO_GL ?= osmesa
# Bytecode must be kept: without it every simulator process compiles the same 10 s of imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test learning lint doctor lock clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup:  ## Python 3.12, .venv, requirements.lock and system packages; does nothing when all is there
	@bash scripts/setup.sh

train: setup  ## the quickstart run (TENANTS=libero,maniskill; more overrides in ARGS="...")
	$(PYTHON) train.py '+tenants=[$(TENANTS)]' $(ARGS)

test: setup lint  ## lint, types, doctests and the tests (ARGS="-m 'not sim and not slow'" for less)
	$(PYTHON) -m pytest --doctest-modules nexus_lightning tests -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

learning: setup  ## the slow tests, learning runs among them: many minutes
	$(PYTHON) -m pytest tests -m slow $(ARGS)

lint: setup  ## ruff, pyright and the floors of imports
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/pyright

doctor: setup  ## what works on this machine, with the fix for what does not
	$(PYTHON) scripts/doctor.py

lock: setup  ## compile requirements.lock again from pyproject.toml (keeps the versions it can keep)
	.venv/bin/uv pip compile pyproject.toml --all-extras --python-version 3.12 \
		--python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-index-url -q -o requirements.lock

clean:  ## remove .venv, caches and build output (keeps outputs/ and data/)
	rm -rf .venv .uv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
