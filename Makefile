# `make check` is what "done" means: lint, types, tests.
.PHONY: check lint types test slow docs reference
PYTHON ?= python

check: lint types test

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

reference:
	$(PYTHON) -m areno.cli.reference docs

docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
