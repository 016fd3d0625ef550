#!/usr/bin/env bash
# LoRA of FLUX.1-Kontext-dev.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/flux/FLUX.1-Kontext-dev}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux/FLUX.1-Kontext-dev/*" --local_dir data/diffsynth_example_dataset

models="black-forest-labs/FLUX.1-Kontext-dev:flux1-kontext-dev.safetensors"
models+=",black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors"
models+=",black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors"
models+=",black-forest-labs/FLUX.1-dev:ae.safetensors"
targets="a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear"
targets+=",norm1_a.linear,norm1_b.linear,to_qkv_mlp"

accelerate launch examples/flux/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 400 \
  --data_file_keys image,kontext_images --extra_inputs kontext_images \
  --max_pixels 1048576 --use_gradient_checkpointing \
  --lora_base_model dit --lora_rank 32 --lora_target_modules "$targets" \
  --remove_prefix_in_ckpt pipe.dit. --align_to_opensource_format \
  --learning_rate 1e-4 --num_epochs 5 \
  --output_path models/train/FLUX.1-Kontext-dev_lora "$@"
