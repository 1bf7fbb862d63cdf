# make train   train a model in a few minutes; needs Python and a package index, but no GPU
# make test    check style and types, and run the tests: three to four minutes on two idle cores
# make lint    check style and types only
# make format  reformat all files
# make site    build the course as a site in site/: README, the notebook's chapters, docs/, a model to try
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: train test lint format site

# status 75: Ctrl-C saved the run and stopped it
train: .venv/.installed
	@echo "$(RUN) train_gpt2.py --preset laptop"; $(RUN) train_gpt2.py --preset laptop || [ $$? -eq 75 ]

test: lint
	$(RUN) -m pytest -n 2 --dist loadfile

lint: .venv/.test-tools
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m basedpyright --pythonpath $(RUN)

format: .venv/.test-tools
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

site: .venv/.site-tools
	$(RUN) website/build.py

# On Linux without an NVIDIA driver, PyTorch's CPU build saves gigabytes of CUDA libraries. If its index
# cannot be reached, the default build is installed. macOS and Windows have only one build.
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check
CPU_TORCH = $(shell grep ^torch== requirements.txt) --index-url https://download.pytorch.org/whl/cpu

.venv/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@echo "installing requirements.txt; PyTorch is large, so this may take a few minutes, without further output"
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
		$(PIP) --retries 0 --timeout 15 $(CPU_TORCH) 2> /dev/null || echo "no CPU build found; installing the default one"; fi
	$(PIP) --requirement requirements.txt
	@touch $@

.venv/.test-tools: .venv/.installed requirements-test.txt
	$(PIP) --requirement requirements-test.txt
	@touch $@

.venv/.site-tools: .venv/.installed requirements-site.txt
	$(PIP) --requirement requirements-site.txt
	@touch $@
