#!/usr/bin/env bash
# LoRA of Z-Image-Turbo.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/z_image/Z-Image-Turbo}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "z_image/Z-Image-Turbo/*" --local_dir data/diffsynth_example_dataset

models="Tongyi-MAI/Z-Image-Turbo:transformer/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:text_encoder/*.safetensors"
models+=",Tongyi-MAI/Z-Image-Turbo:vae/diffusion_pytorch_model.safetensors"

accelerate launch examples/z_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 50 \
  --max_pixels 1048576 --dataset_num_workers 8 --use_gradient_checkpointing \
  --lora_base_model dit --lora_rank 32 --lora_target_modules "to_q,to_k,to_v,to_out.0,w1,w2,w3" \
  --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-4 --num_epochs 5 \
  --output_path models/train/Z-Image-Turbo_lora "$@"
