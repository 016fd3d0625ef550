#!/usr/bin/env bash
# LoRA of FLUX.2-klein-base-9B.
# With a picture to edit, in the column edit_image: --data_file_keys image,edit_image --extra_inputs edit_image
# DATASET is a folder of your own; options given to this script are added to the command, where the last one counts.
set -eu

data=${DATASET:-data/diffsynth_example_dataset/flux2/FLUX.2-klein-base-9B}
[ -e "$data" ] || modelscope download --dataset DiffSynth-Studio/diffsynth_example_dataset \
  --include "flux2/FLUX.2-klein-base-9B/*" --local_dir data/diffsynth_example_dataset

models="black-forest-labs/FLUX.2-klein-base-9B:transformer/*.safetensors"
models+=",black-forest-labs/FLUX.2-klein-9B:text_encoder/*.safetensors"
models+=",black-forest-labs/FLUX.2-klein-9B:vae/diffusion_pytorch_model.safetensors"
targets="to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,linear_in,linear_out"
targets+=",to_qkv_mlp_proj"
targets+=$(printf ',single_transformer_blocks.%d.attn.to_out' $(seq 0 23))

accelerate launch examples/flux2/model_training/train.py \
  --model_id_with_origin_paths "$models" \
  --tokenizer_path black-forest-labs/FLUX.2-klein-9B:tokenizer/ \
  --dataset_base_path "$data" --dataset_metadata_path "$data/metadata.csv" --dataset_repeat 50 \
  --max_pixels 1048576 --use_gradient_checkpointing \
  --lora_base_model dit --lora_rank 32 --lora_target_modules "$targets" \
  --remove_prefix_in_ckpt pipe.dit. \
  --learning_rate 1e-4 --num_epochs 5 \
  --output_path models/train/FLUX.2-klein-base-9B_lora "$@"
