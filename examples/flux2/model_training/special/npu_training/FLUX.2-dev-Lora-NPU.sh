#!/usr/bin/env bash
# LoRA of FLUX.2-dev, with ZeRO-3, on Ascend NPUs; docs/npu.md.
# The samples are encoded first, then the transformer is trained without the encoders.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/flux2/FLUX.2-dev}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux2/FLUX.2-dev/*" --local_dir data/diffsynth_example_dataset

targets="to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_qkv_mlp_proj,to_out.0,to_add_out"
targets+=",linear_in,linear_out"
targets+=$(printf ',single_transformer_blocks.%d.attn.to_out' $(seq 0 47))
options=(
  --max_pixels 1048576 --dataset_num_workers 8 --use_gradient_checkpointing --initialize_model_on_cpu
  --lora_base_model dit --lora_rank 32 --remove_prefix_in_ckpt pipe.dit.
  --lora_target_modules "$targets"
  --learning_rate 1e-4 --num_epochs 5
  "$@"
)

encoders="black-forest-labs/FLUX.2-dev:text_encoder/*.safetensors"
encoders+=",black-forest-labs/FLUX.2-dev:vae/diffusion_pytorch_model.safetensors"

accelerate launch examples/flux2/model_training/train.py \
  --task sft:data_process --model_id_with_origin_paths "$encoders" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 1 \
  --output_path models/train/FLUX.2-dev-LoRA-splited-cache "${options[@]}"

accelerate launch --config_file examples/flux2/model_training/full/accelerate_config_zero3.yaml \
  examples/flux2/model_training/train.py \
  --task sft:train --model_id_with_origin_paths "black-forest-labs/FLUX.2-dev:transformer/*.safetensors" \
  --dataset_base_path models/train/FLUX.2-dev-LoRA-splited-cache --dataset_repeat 50 \
  --output_path models/train/FLUX.2-dev-LoRA-splited "${options[@]}"
