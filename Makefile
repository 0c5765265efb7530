# make demo   the main job, free, on this machine: plan, train, collect, destroy, receipt
# make mac-ish  the demo, a view, a kill and a resume in a namespace that resembles a Mac; Linux, as root
# make quick  the tests that start no process, within a minute
# make test   style, types and all tests that are not slow; what CI runs
# make full   everything, by hand before an issue counts as resolved: real engines, whole rentals, 10,000 simulated runs
PYTHON ?= python3
BIN := .venv/bin
# If it were set, every command that a test starts would compile gpurun again: a quarter of the suite's time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick venv venv-demo style types full mac-ish house mutants bench-pack bench-rental bench-transfer bench-trainer bench-gpu bench-plan bench-prepare bench-dedupe bench-presets bench-sweep catalog picture docs clean

demo: venv-demo
	@$(BIN)/gpurun train --gpu 8xA100 --max-cost 25 --dry-run

test: venv style types
	@$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow"

quick: venv
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not process and not torch and not sshd and not boto and not plots" tests/house tests/golden tests/unit

full: test docs
	@GPURUN_SOAK=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m "slow or hypothesis"
	@$(BIN)/python -m pytest tests/simulation/test_state_machine.py --hypothesis-profile soak
	@$(BIN)/python -m tests.simulation --runs 10000 --seed 1
	@$(BIN)/python -m tests.simulation --voyages --runs 3000 --seed 1

mac-ish: venv
	@$(BIN)/python -m pytest -n 0 -v -m slow tests/mac

venv:
	@$(PYTHON) .ci/venv.py

venv-demo:
	@$(PYTHON) .ci/venv.py demo

style: venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check -q .

types: venv
	@$(BIN)/mypy

# Prints what a reader of gpurun meets: the table of docs/dev/ARCHITECTURE.md, with its current figures.
house: venv
	@$(BIN)/python -m tests.journeys.house

# Removes each fsync, lock, digest check and read-back, one at a time: some test must fail.
mutants: venv
	@$(BIN)/python -m tests.simulation.mutants

bench-pack: venv
	@$(BIN)/python tests/bench/bench_pack.py

bench-rental: venv
	@$(BIN)/python tests/bench/bench_rental.py

bench-sweep: venv
	@$(BIN)/python tests/bench/bench_sweep.py

# Measures all rows of "Uploads and downloads" in docs/dev/BENCHMARKS.md, at full size, and what is lost or sent twice.
bench-transfer: venv
	@$(BIN)/python tests/bench/bench_transfer.py --full
	@$(BIN)/python tests/bench/bench_rental.py
	@GPURUN_SOAK=1 $(BIN)/python -m pytest -v tests/unit/machine/test_tails_over_cuts.py tests/clouds/test_staged_rental.py

bench-trainer: venv
	@$(BIN)/python tests/bench/bench_trainer.py

# For a machine with a card: measures every figure of the trainer that needs a card.
bench-gpu: venv
	@$(BIN)/python tests/bench/bench_gpu.py

bench-plan: venv
	@$(BIN)/python tests/bench/bench_plan.py

bench-dedupe: venv
	@$(BIN)/python tests/bench/bench_dedupe.py

# The comparison with the usual script needs: .venv/bin/pip install datasets
bench-prepare: venv
	@$(BIN)/python tests/bench/bench_prepare.py

# Takes hours on two cores; build/ keeps what is done, and the same command continues.
bench-presets: venv
	@$(BIN)/python tests/bench/bench_presets.py

# Reads the prices of the packaged catalogue again from every cloud with a key: look at the difference, then commit it.
catalog: venv
	@$(BIN)/python docs/dev/refresh_catalog.py

# Draws the README's pictures from the records in tests/golden/pictures; for any run: make -s picture RUN=~/.local/share/gpurun/runs/fox-41 STEP=30
picture: venv
	@$(BIN)/python docs/dev/draw_live.py $(RUN) $(STEP)

# Builds the pages as a site that needs no network, in build/site; a dead link fails it.
docs: venv
	@$(BIN)/python -c "import material" 2>/dev/null || $(BIN)/python -m pip install -q "mkdocs-material>=9.6,<10"
	@$(BIN)/python docs/dev/site.py && echo "build/site/index.html"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
