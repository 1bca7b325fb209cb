PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo reproduce smoke bench test test-newest test-slow test-browser lint format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

MINI := checkpoints/recurrent-gpt2-mini
PROGRAMS := checkpoints/recurrent-gpt2-programs

# Shows what exit policies do to the checkpoints that come with the project, and writes a report.
demo: $(INSTALLED)
	$(BIN)/python -m evaluation.demo $(MINI) --programs $(PROGRAMS)

# The whole study. Texts of your own: make reproduce SOURCES="a.parquet b.jsonl python-docs"
SOURCES ?= python-docs
reproduce: $(INSTALLED)
	$(BIN)/python -m evaluation.report $(MINI) --source $(SOURCES) --seeds 3 --blocks 8 --output results/reproduction

# Trains a tiny model, in two minutes.
smoke: $(INSTALLED)
	$(BIN)/python -m training.train training/recipes/smoke.yaml --resume

# Ratios on this machine, which should do nothing else meanwhile.
bench: $(INSTALLED)
	$(BIN)/python -m evaluation.benchmark --output results/benchmark.json

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# With the newest releases of what we depend on, in an environment of its own, to find what they break; torch stays as
# it is pinned. First, what differs from constraints.txt.
NEWEST := .venv-newest
test-newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager "$$(grep '^torch==' constraints.txt)" --editable '.[dev]'
	$(NEWEST)/bin/python -m pip list --format freeze | grep -vixFf constraints.txt || true
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --dist loadfile

# DeepSpeed (without its compiled kernels, which are for GPUs) and bitsandbytes are for these tests only.
test-slow: $(INSTALLED)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt deepspeed bitsandbytes
	$(BIN)/python -m pytest -m slow

# Opens the report in a headless Chromium, from the distribution's packages (apt) unless there is one already.
test-browser: $(INSTALLED)
	command -v chromium || (apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	$(BIN)/python -m pytest -m browser

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
