# The two commands of the README are `make demo` and `make test`; both set everything up themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := . $(sort $(dir $(wildcard plugins/*/*/pyproject.toml)))
# Where there is a torch already (a GPU machine, often without a network) it is used as it is.
HAVE_TORCH := $(shell $(PYTHON) -c "import torch, transformers" 2>/dev/null && echo yes)
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5.17,<6
TESTS ?= tests plugins examples
JOBS ?= 3
# Hundreds of processes import the same modules: what the first one compiled is kept, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test storm budgets faults coverage planned mutants random-plans kernelbench lint setup wheels results reference docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: scripts/setup_environment.py pyproject.toml $(wildcard plugins/*/*/pyproject.toml)
	$(PYTHON) scripts/setup_environment.py --venv $(VENV) $(if $(HAVE_TORCH),--use-system,--torch "$(TORCH)") --transformers "$(TRANSFORMERS)"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

# Each process computes on a thread of its own: operators of tiny models take longer to deal out than to run. Threads that wait for each
# other give the core to others; torch asks for huge pages. Slow files come first. A fifth of the time a test waits, mostly for a child:
# on two cores and from a fresh clone three processes of 1.5 GB took 15:30 to 17:50, where two took 15:54 once: a gain is not shown.
test: setup
	AGENTCOMPILE_STRICT=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE THP_MEM_ALLOC_ENABLE=1 $(BIN)/python -m pytest $(TESTS) -q -p no:cacheprovider -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Ten minutes of SIGKILL, and every fault that somebody thought of; results below benchmarks/results/cpu.
storm: setup
	$(BIN)/python benchmarks/storm.py

faults: setup
	$(BIN)/python benchmarks/inject_faults.py $(if $(TIER),--tier $(TIER))

# Task files in KernelBench's form: ours, or a checkout of others (TASKS=folder); results below benchmarks/results.
kernelbench: setup
	$(BIN)/python benchmarks/kernelbench.py $(if $(TASKS),$(TASKS),benchmarks/kernelbench_tasks) $(KERNELBENCH)

# Random plans of all families, lowered and built for six architectures; 1,800 builds.
random-plans: setup
	$(BIN)/python benchmarks/random_plans.py --jobs $(JOBS)
	$(BIN)/python benchmarks/tables.py

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	cd benchmarks && $(abspath $(BIN))/python -m mypy --config-file mypy.ini
	$(BIN)/lint-imports

wheels:
	$(PYTHON) scripts/build_wheels.py --out dist

coverage: setup
	$(BIN)/python benchmarks/coverage.py $(COVERAGE)
	$(BIN)/python benchmarks/tables.py

# Every type at its real size, captured and planned without weights: nothing is built.
planned: setup
	$(BIN)/python benchmarks/planned.py $(PLANNED)
	$(BIN)/python benchmarks/tables.py

results: setup
	$(BIN)/python benchmarks/tables.py

# Error budgets against what the framework really errs, 2,000 draws of each row: an hour or two on one core.
budgets: setup
	$(BIN)/python scripts/budget_table.py

# Wrong kernels made on purpose, judged as candidates are; about half an hour of two processors.
mutants: setup
	PYTHONPATH=scripts $(BIN)/python -m mutants
	$(BIN)/python benchmarks/tables.py

reference: setup
	$(BIN)/python scripts/write_reference.py
	$(BIN)/python scripts/write_generate_page.py

docs: setup
	@$(BIN)/python -c "import mkdocs" 2>/dev/null || $(BIN)/python -m pip install --quiet "mkdocs>=1.6,<2"
	$(BIN)/python -m mkdocs build --strict --site-dir site

clean:
	rm -rf dist build site $(VENV)
