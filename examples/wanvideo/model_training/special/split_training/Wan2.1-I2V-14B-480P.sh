#!/usr/bin/env bash
# LoRA of Wan 2.1 image to video, 14B, 480P: the samples are encoded first, then the transformer is trained alone.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/wanvideo/Wan2.1-I2V-14B-480P}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "wanvideo/Wan2.1-I2V-14B-480P/*" --local_dir data/diffsynth_example_dataset

repository=Wan-AI/Wan2.1-I2V-14B-480P
transformer="$repository:diffusion_pytorch_model*.safetensors"
encoders="$repository:models_t5_umt5-xxl-enc-bf16.pth,$repository:Wan2.1_VAE.pth"
encoders+=",$repository:models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
options=(
  --model_id_with_origin_paths "$transformer,$encoders"
  --height 480 --width 832 --extra_inputs input_image
  --lora_base_model dit --lora_rank 32 --lora_target_modules "q,k,v,o,ffn.0,ffn.2" --remove_prefix_in_ckpt pipe.dit.
  --learning_rate 1e-4 --num_epochs 5
  "$@"
)

accelerate launch examples/wanvideo/model_training/train.py \
  --task sft:data_process --offload_models "$transformer" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 1 \
  --output_path models/train/Wan2.1-I2V-14B-480P_lora_split_cache "${options[@]}"

accelerate launch examples/wanvideo/model_training/train.py \
  --task sft:train --offload_models "$encoders" \
  --dataset_base_path models/train/Wan2.1-I2V-14B-480P_lora_split_cache --dataset_repeat 100 \
  --output_path models/train/Wan2.1-I2V-14B-480P_lora_split "${options[@]}"
