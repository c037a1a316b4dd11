# Three commands are all: `make quickstart`, `make test` and `make slow`. They set up .venv when it
# is missing or when what it is made from has changed. Another Python: `make test PYTHON=python3.12`.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# The same line as everywhere else, so that no other build of torch is ever fetched.
TORCH := $(shell grep '^torch==' constraints.txt)

# Errors are shown, notices are not: pip's about its own releases and this machine's package
# indexes, the docs theme's about the future of mkdocs.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt
export NO_MKDOCS_2_WARNING := 1
EXTRAS := dev,docs
# What was installed is noted, so that `make optional` knows whether it has to add something.
INSTALL = $(PIP) -e '.[$(EXTRAS)]' && echo '$(EXTRAS)' > $(INSTALLED)
# Which tests `make test` runs, as pytest's -m has it.
MARK := not slow and not live

.DEFAULT_GOAL := help
.PHONY: help quickstart flower-demo test lint types tests docs docs-test slow live optional clean

help:
	@echo "make quickstart  run recipes/quickstart.yaml: record, detect, recover, report"
	@echo "make flower-demo record and recover with Flower: six processes over TLS on this machine"
	@echo "make test        lint, types, docs, tests, doctests"
	@echo "make lint | types | tests | docs   one of them"
	@echo "make slow        the tests that make test leaves out: many kills, many random modules"
	@echo "make live        federations of Flower whose processes are killed; ten minutes"
	@echo "make docs-test   run every command of README and docs in a fresh clone; see docs-test.log"
	@echo "make optional    add mlflow and ray to .venv (half a gigabyte), so that no test of theirs is skipped"
	@echo "make clean       remove .venv and whatever else can be made again"

quickstart: $(INSTALLED)
	@$(BIN)/fedrec run recipes/quickstart.yaml

flower-demo: $(INSTALLED)
	@$(BIN)/python fedrec/cli/templates/flower/start.py --folder runs/flower-demo

# Cheapest first; types and docs take a core each, and tests two. Tests of the site look at the one
# that was built, in place of building it once more.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j 2 --output-sync types docs
	@$(MAKE) --no-print-directory tests FEDREC_SITE=site

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy --strict fedrec

# Two processes: most tests use one core, and each process imports torch once.
tests: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist worksteal -m "$(MARK)"

slow: MARK := slow
slow: tests

# One after the other: each starts a dozen processes, whose answers have time limits.
live: $(INSTALLED)
	$(BIN)/pytest -m live tests/flower

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# A clone of what is committed, with an environment of its own, as a reader would have it.
docs-test:
	@rm -rf build/docs-test
	@git clone --quiet . build/docs-test
	@$(MAKE) --no-print-directory -C build/docs-test $(INSTALLED)
	@build/docs-test/$(BIN)/python build/docs-test/tests/docs/run_commands.py docs-test.log

optional: EXTRAS := $(EXTRAS),flower,loggers
optional: $(INSTALLED)
	@grep -q loggers $(INSTALLED) || { $(INSTALL); }

clean:
	rm -rf .venv site build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedrec needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". HINT: make PYTHON=/path/to/python3.11")'
	@echo "Setting up .venv (once, a few minutes) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(PIP) $(TORCH)
	@$(INSTALL)
