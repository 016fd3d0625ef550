# Everything a fresh machine needs: Python, gcc, g++ and make.
PYTHON ?= python3
BIN := .venv/bin
DEMO := runs/demo

.PHONY: demo test test-all lint bench clean

demo: .venv/installed
	rm -rf $(DEMO)
	$(BIN)/flowshard tiny wan2.1-t2v-1.3b $(DEMO)/model
	$(BIN)/flowshard train examples/wan_lora.yaml model.path=$(DEMO)/model output=$(DEMO)/run train.steps=20 \
		'validation.prompts=["a fat grey rabbit yawns in the morning sun, animation"]' validation.every=10 \
		validation.steps=4 validation.height=96 validation.width=160 validation.frames=5
	$(BIN)/flowshard generate --model $(DEMO)/model --lora $(DEMO)/run --height 176 --width 320 --frames 25 --steps 8 \
		--prompt "a fat grey rabbit yawns in the morning sun, animation" --output $(DEMO)/rabbit.mp4
	$(BIN)/flowshard report $(DEMO)/run
	@echo
	@echo "tiny random model   $(DEMO)/model"
	@echo "run and its config  $(DEMO)/run"
	@echo "numbers of a step   $(DEMO)/run/metrics.jsonl"
	@echo "samples of training $(DEMO)/run/samples/grid.png"
	@echo "all as one page     $(DEMO)/run/report.html"
	@echo "trained LoRA        $(DEMO)/run/checkpoints/step-00000020/lora.safetensors"
	@echo "generated clip      $(DEMO)/rabbit.mp4 (noise: the model's weights are random)"

test: .venv/installed
	$(BIN)/pytest -m "not slow"

test-all: .venv/installed
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/job.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/sequence.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/data.py

clean:
	rm -rf .venv runs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed,dev]'
	touch $@
