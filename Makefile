# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint types unit slow soak fuzz audit bench test-gpu bench-gpu docs docs-check results results-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "schoenbat needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)  ## install, then show error, speed and a small training run (three minutes)
	$(BIN)/schoenbat demo

test: lint types unit  ## lint, type check and unit tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -n 2

slow: $(READY)  ## the statistical tests that take minutes
	$(BIN)/python -m pytest -m slow

bench: $(READY)  ## speed on this machine's CPU, beside SDPA, into benchmarks/results/
	$(BIN)/python benchmarks/cpu.py

soak: $(READY)  ## kill and continue a sweep at random for ten minutes, then compare it with an undisturbed one
	$(BIN)/python tests/soak.py

fuzz: $(READY)  ## 10,000 random cases of every public function; again with: make fuzz SEED=7 CASES=500
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(or $(CASES),10000) --seed $(or $(SEED),0)

audit: $(READY)  ## bandit on the source, pip-audit on everything that constraints.txt pins
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[audit]'
	$(BIN)/python tests/audit.py

test-gpu: $(READY)  ## the tests that need a CUDA device (JOBS= at once), a check of memory and random shapes; their summary goes into benchmarks/results/
	rm -f out/test-gpu.xml out/memcheck.xml out/shapes.xml
	-$(BIN)/python -m pytest -n $(or $(JOBS),8) -m gpu --junitxml=out/test-gpu.xml
	-$(BIN)/python tests/memcheck.py out/memcheck.xml
	-$(BIN)/python tests/gpu_shapes.py out/shapes.xml --seed $(or $(SEED),0)
	$(BIN)/python tests/gpu_summary.py $$(ls out/test-gpu.xml out/memcheck.xml out/shapes.xml 2>/dev/null)

bench-gpu: $(READY)  ## speed on this machine's GPU beside SDPA and the memory floor, into benchmarks/results/
	$(BIN)/python benchmarks/gpu.py

docs: $(READY)  ## the documentation as a site, into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-check: docs  ## the site and the page of results in a real browser; needs the packages chromium and chromium-driver
	$(BIN)/python tests/check_site.py
	$(BIN)/python tests/check_report.py

results: $(READY)  ## RESULTS.md, as HTML in out/ too, and the README's tables, from the result files that are there
	$(BIN)/schoenbat report --html out/results.html
	$(BIN)/python benchmarks/gpu_page.py
	$(BIN)/python benchmarks/cpu_page.py

results-check: $(READY)  ## every figure of README.md and RESULTS.md comes from a result file
	$(BIN)/python tests/check_results.py

clean:  ## remove the virtual environment and what tools cached
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist site
