# Everything runs in .venv, which `bootstrap.py` sets up first (docs/setup.md). Set-up speaks on
# stderr, so `make demo ARGS=--json` prints JSON alone on stdout.
PYTHON ?= python3
ARGS ?=
SETUP = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info[0] < 3)' 2>/dev/null || { \
	echo "make: there is no $(PYTHON), or it is no Python 3; install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.12" >&2; exit 3; }; \
	$(PYTHON) kvctl/engine/bootstrap.py

# Those that test-vllm knows.
RELEASES = $(shell sed -n 's/^    "\([0-9.]*\)": Rel.*/\1/p' tests/other_release/environments.py)

.PHONY: help demo test test-e2e test-soak test-vllm lint setup clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/make \1	\2/p' Makefile | expand -t 16

demo: ## prefill + decode + router on the built-in tiny model, real KV moved; ARGS="--json", "--keep", …
	$(SETUP) engine tool router
	@.venv/bin/kvctl demo $(ARGS)

test: ## lint, unit tests, and one pair of real engines; ARGS goes to pytest
	$(SETUP) engine tool router dev
	@$(MAKE) --no-print-directory lint
	@.venv/bin/python -m pytest $(ARGS)

test-e2e: ## pairs of other shapes, one after the other: KV groups, tensor parallel, chunks; ARGS goes to pytest
	$(SETUP) engine tool router dev
	@.venv/bin/python -m pytest -m 'shapes or last' $(ARGS)

test-soak: ## two thousand requests in a row: no block, file or memory that is not given back; ARGS goes to pytest
	$(SETUP) engine tool router dev
	@.venv/bin/python -m pytest -m 'soak or last' $(ARGS)

test-vllm: ## a real pair on another vLLM release, in an environment made for it: VERSION=0.33.0; ARGS goes to pytest
	@[ -n "$(filter $(VERSION),$(RELEASES))" ] || { \
		echo "make test-vllm: name a release: $(RELEASES:%=VERSION=%)" >&2; exit 2; }
	$(SETUP) engine tool router dev
	@KVCTL_TEST_RELEASE=$(VERSION) .venv/bin/python -m pytest --session-timeout=480 $(ARGS) tests/other_release

lint: ## ruff, mypy and the import rules
	$(SETUP) tool dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup: ## install all that the other targets need, and run nothing
	$(SETUP) engine tool router dev

clean: ## remove .venv and every cache
	rm -rf .venv .cache dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache connector/.ruff_cache
	find kvctl connector tests bench -name __pycache__ -prune -exec rm -rf {} +
