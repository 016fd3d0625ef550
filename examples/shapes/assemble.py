"""Put the parts of this folder's model together as a diffusers pipeline.

`python examples/shapes/assemble.py --vae runs/shapes/vae --text runs/shapes/text --output runs/shapes/untrained` gives it a
transformer with random weights to train; with `--transformer FOLDER` a trained one. Weights are written in `--dtype`.
"""

import argparse
from pathlib import Path

import diffusers
import torch
from transformers import AutoTokenizer, UMT5EncoderModel

SIZES = {"num_attention_heads": 12, "attention_head_dim": 16, "num_layers": 5, "ffn_dim": 768, "freq_dim": 128}
"""Of the transformer: 3.3 M parameters; heads, patches and latent channels of Wan 2.1 T2V 1.3B."""
SHIFT = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True, help="folder that train_vae.py wrote")
    parser.add_argument("--text", type=Path, required=True, help="folder that train_text.py wrote")
    parser.add_argument("--transformer", type=Path, help="folder of a trained transformer")
    parser.add_argument("--output", type=Path, required=True, help="folder that gets the pipeline")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args()

    text_encoder = UMT5EncoderModel.from_pretrained(options.text / "text_encoder")
    if options.transformer is None:
        torch.manual_seed(options.seed)
        transformer = diffusers.WanTransformer3DModel(text_dim=text_encoder.config.d_model, **SIZES)
    else:
        transformer = diffusers.WanTransformer3DModel.from_pretrained(options.transformer)
    pipeline = diffusers.WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(options.text / "tokenizer"),
        text_encoder=text_encoder,
        vae=diffusers.AutoencoderKLWan.from_pretrained(options.vae),
        transformer=transformer,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
        ),
    )
    pipeline.to(getattr(torch, options.dtype)).save_pretrained(options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
