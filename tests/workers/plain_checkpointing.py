"""What a plain script does: ZeRO-3, a frozen model with a LoRA, and the models' own gradient checkpointing.

python -m tests.workers.plain_checkpointing TRANSFORMER_FOLDER
"""

import os
import sys

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from flowshard.libraries import quiet_libraries
from tests.launch import free_port

quiet_libraries()
os.environ.update(
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=os.environ.get("MASTER_PORT", str(free_port())),
)

import deepspeed  # noqa: E402 - reads the environment

from flowshard.parallel.strategies.deepspeed import _skip_shared_memory_build  # noqa: E402

_skip_shared_memory_build()
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
model = WanTransformer3DModel.from_pretrained(sys.argv[1])
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=8, target_modules=["to_q"]))
model.enable_gradient_checkpointing()
engine, _, _, _ = deepspeed.initialize(
    model=model.train(),
    optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
    },
    dist_init_required=False,
)
prediction = engine(
    hidden_states=torch.randn(1, 16, 2, 4, 4),
    timestep=torch.tensor([500.0]),
    encoder_hidden_states=torch.randn(1, 8, model.config.text_dim),
    return_dict=False,
)[0]
engine.backward(prediction.square().mean())
engine.step()
sys.stdout.write("one update made\n")
