#!/usr/bin/env bash
# Full training of Wan 2.1 text to video, 1.3B.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.1-T2V-1.3B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.1-T2V-1.3B/*" --local_dir data/diffsynth_example_dataset

models="Wan-AI/Wan2.1-T2V-1.3B:diffusion_pytorch_model*.safetensors"
models+=",Wan-AI/Wan2.1-T2V-1.3B:models_t5_umt5-xxl-enc-bf16.pth"
models+=",Wan-AI/Wan2.1-T2V-1.3B:Wan2.1_VAE.pth"

accelerate launch examples/wanvideo/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 100 \
  --height 480 --width 832 \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Wan2.1-T2V-1.3B_full "$@"
