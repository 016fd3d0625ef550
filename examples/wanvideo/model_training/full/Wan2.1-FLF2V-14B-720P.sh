#!/usr/bin/env bash
# Full training of Wan 2.1 first and last frame to video, 14B, 720P.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.1-FLF2V-14B-720P}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.1-FLF2V-14B-720P/*" --local_dir data/diffsynth_example_dataset

models="Wan-AI/Wan2.1-FLF2V-14B-720P:diffusion_pytorch_model*.safetensors"
models+=",Wan-AI/Wan2.1-FLF2V-14B-720P:models_t5_umt5-xxl-enc-bf16.pth"
models+=",Wan-AI/Wan2.1-FLF2V-14B-720P:Wan2.1_VAE.pth"
models+=",Wan-AI/Wan2.1-FLF2V-14B-720P:models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"

accelerate launch --config_file examples/wanvideo/model_training/full/accelerate_config_14B.yaml \
  examples/wanvideo/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 100 \
  --extra_inputs input_image,end_image \
  --height 480 --width 832 --initialize_model_on_cpu \
  --trainable_models dit --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-5 --num_epochs 2 \
  --output_path models/train/Wan2.1-FLF2V-14B-720P_full "$@"
