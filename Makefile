# make train   a trained model in some minutes, from nothing but Python and a package index
# make test    style and tests, in two processes: three minutes on two idle cores
# make lint    style alone
# make format  bring files into the style
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: train test lint format

train: .venv/.installed
	$(RUN) train_gpt2.py

test: lint
	$(RUN) -m pytest -n 2 --dist loadfile

lint: .venv/.test-tools
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: .venv/.test-tools
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

.venv/.installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@echo "installing requirements.txt: PyTorch is large, which can take some minutes"
	$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	touch $@

.venv/.test-tools: .venv/.installed requirements-test.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements-test.txt
	touch $@
