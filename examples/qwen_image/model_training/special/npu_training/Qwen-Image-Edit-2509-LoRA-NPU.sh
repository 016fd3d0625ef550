#!/usr/bin/env bash
# LoRA of Qwen-Image-Edit-2509 on Ascend NPUs; docs/npu.md.
# The samples are encoded first, then the transformer is trained without the encoders.
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

data=${DATASET:-data/diffsynth_example_dataset/qwen_image/Qwen-Image-Edit-2509}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "qwen_image/Qwen-Image-Edit-2509/*" --local_dir data/diffsynth_example_dataset

targets="to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out"
targets+=",img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"
options=(
  --data_file_keys image,edit_image --extra_inputs edit_image
  --max_pixels 1048576 --dataset_num_workers 8 --use_gradient_checkpointing --find_unused_parameters
  --lora_base_model dit --lora_rank 32 --remove_prefix_in_ckpt pipe.dit.
  --lora_target_modules "$targets"
  --learning_rate 1e-4 --num_epochs 5
  "$@"
)

encoders="Qwen/Qwen-Image-Edit-2509:text_encoder/model*.safetensors"
encoders+=",Qwen/Qwen-Image-Edit-2509:vae/diffusion_pytorch_model.safetensors"

accelerate launch examples/qwen_image/model_training/train.py \
  --task sft:data_process --model_id_with_origin_paths "$encoders" \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.json" --dataset_repeat 1 \
  --output_path models/train/Qwen-Image-Edit-2509-LoRA-splited-cache "${options[@]}"

accelerate launch examples/qwen_image/model_training/train.py \
  --task sft:train \
  --model_id_with_origin_paths "Qwen/Qwen-Image-Edit-2509:transformer/diffusion_pytorch_model*.safetensors" \
  --dataset_base_path models/train/Qwen-Image-Edit-2509-LoRA-splited-cache --dataset_repeat 50 \
  --output_path models/train/Qwen-Image-Edit-2509-LoRA-splited "${options[@]}"
