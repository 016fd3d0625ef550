#!/usr/bin/env bash
# LoRA of Qwen-Image-Edit-2511.
# The model takes its reference pictures at noise level 0, which --zero_cond_t says.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/qwen_image/Qwen-Image-Edit-2511}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "qwen_image/Qwen-Image-Edit-2511/*" --local_dir data/diffsynth_example_dataset

models="Qwen/Qwen-Image-Edit-2511:transformer/diffusion_pytorch_model*.safetensors"
models+=",Qwen/Qwen-Image:text_encoder/model*.safetensors"
models+=",Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
targets="to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2"
targets+=",img_mod.1,txt_mlp.net.2,txt_mod.1"

accelerate launch examples/qwen_image/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.json" --dataset_repeat 50 \
  --data_file_keys image,edit_image --extra_inputs edit_image \
  --max_pixels 1048576 --dataset_num_workers 8 \
  --lora_base_model dit --lora_rank 32 --lora_target_modules "$targets" \
  --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-4 --num_epochs 5 \
  --use_gradient_checkpointing --find_unused_parameters --zero_cond_t \
  --output_path models/train/Qwen-Image-Edit-2511_lora "$@"
