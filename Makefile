PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo explore reproduce smoke bench bench-serve leaderboard test test-newest test-slow test-browser test-serve lint format clean

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

# A page to watch the checkpoints think, on this machine; it prints its address. Others: make explore CHECKPOINTS="a b/c"
CHAINS := checkpoints/recurrent-gpt2-chains
CHECKPOINTS ?= $(MINI) $(CHAINS) $(PROGRAMS)
explore: $(VENV)/.explore
	$(BIN)/python -m evaluation.explore $(CHECKPOINTS)

$(VENV)/.explore: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[explore]'
	touch $@

# The whole study. Texts of your own: make reproduce SOURCES="a.parquet b.jsonl python-docs"
SOURCES ?= python-docs
reproduce: $(INSTALLED)
	$(BIN)/python -m evaluation.report $(MINI) --source $(SOURCES) --seeds 3 --blocks 8 --output results/reproduction

# Trains a tiny model, in two minutes.
smoke: $(INSTALLED)
	$(BIN)/python -m training.train training/recipes/smoke.yaml --resume

# Ratios on this machine, which should do nothing else meanwhile, and what less precision costs. After a stop:
# make bench RESUME=--resume. For the tables of the documents: make bench BENCH=docs
BENCH ?= results
bench: $(INSTALLED)
	$(BIN)/python -m evaluation.benchmark --output $(BENCH)/benchmark.json $(RESUME)
	$(BIN)/python -m evaluation.precision --output $(BENCH)/precision.json
	test $(BENCH) != docs || $(BIN)/python -m evaluation.study.documents

# Exit rules beside each other on the checkpoints that come with the project, into docs/leaderboard.md.
leaderboard: $(INSTALLED)
	$(BIN)/python -m evaluation.leaderboard --output results/leaderboard
	cp results/leaderboard/leaderboard.json docs/
	$(BIN)/python -m evaluation.study.documents

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

# DeepSpeed (without its compiled kernels, which are for GPUs), what fine-tuning needs, reasoning-gym and ONNX are for
# these tests only.
test-slow: $(INSTALLED)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt deepspeed onnxruntime onnxscript \
	    --editable '.[finetune,tasks]'
	$(BIN)/python -m pytest -m slow

# Opens the report and the page in a headless Chromium, from the distribution's packages (apt) unless there is one
# already.
test-browser: $(VENV)/.explore
	command -v chromium || (apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	$(BIN)/python -m pytest -m browser

# vLLM pins other versions, so it has an environment of its own; its list is whole, hence no dependencies are looked up.
SERVE := .venv-serve
# An old *.egg-info would hide the entry point by which vLLM finds the package.
$(SERVE)/.installed: constraints-serve.txt pyproject.toml
	test -x $(SERVE)/bin/python || $(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python -m pip install --quiet --no-deps --requirement constraints-serve.txt
	rm -rf *.egg-info
	$(SERVE)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-serve: $(SERVE)/.installed
	$(SERVE)/bin/python -m pytest -m serve tests/serving

# Tokens per second of vLLM and of `generate`, for docs/serving.md, in some minutes; the machine should do nothing else.
bench-serve: $(SERVE)/.installed $(INSTALLED)
	$(SERVE)/bin/python -m evaluation.serving $(MINI) --output docs/serving.json
	$(BIN)/python -m evaluation.study.documents

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(NEWEST) $(SERVE) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
