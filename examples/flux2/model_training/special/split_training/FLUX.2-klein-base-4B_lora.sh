#!/usr/bin/env bash
# LoRA of FLUX.2-klein-base-4B: the samples are encoded first, then the transformer is trained without the encoders.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/flux2/FLUX.2-klein-base-4B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux2/FLUX.2-klein-base-4B/*" --local_dir data/diffsynth_example_dataset

targets="to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,linear_in,linear_out"
targets+=",to_qkv_mlp_proj"
targets+=$(printf ',single_transformer_blocks.%d.attn.to_out' $(seq 0 19))
options=(
  --tokenizer_path black-forest-labs/FLUX.2-klein-4B:tokenizer/
  --max_pixels 1048576 --use_gradient_checkpointing
  --lora_base_model dit --lora_rank 32 --remove_prefix_in_ckpt pipe.dit.
  --lora_target_modules "$targets"
  --learning_rate 1e-4 --num_epochs 5
  "$@"
)

encoders="black-forest-labs/FLUX.2-klein-4B:text_encoder/*.safetensors"
encoders+=",black-forest-labs/FLUX.2-klein-4B:vae/diffusion_pytorch_model.safetensors"

accelerate launch examples/flux2/model_training/train.py \
  --task sft:data_process --model_id_with_origin_paths "$encoders" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 1 \
  --output_path models/train/FLUX.2-klein-base-4B_lora_cache "${options[@]}"

accelerate launch examples/flux2/model_training/train.py \
  --task sft:train --model_id_with_origin_paths "black-forest-labs/FLUX.2-klein-base-4B:transformer/*.safetensors" \
  --dataset_base_path models/train/FLUX.2-klein-base-4B_lora_cache --dataset_repeat 50 \
  --output_path models/train/FLUX.2-klein-base-4B_lora "${options[@]}"
