"""Command lines of DiffSynth-Studio's recipes with tiny models in the places of the published ones."""

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tests.conftest import REPOSITORY
from tests.launch import environment

TinyModels = Callable[[str], Path]
SIZE, FRAMES, RANK = 32, 5, 4
EXACT = ("--set", "model.dtype=float32", "--set", "log.flops=false")


@dataclass(frozen=True)
class Recipe:
    """A published model as the recipes name it."""

    series: str
    folder: str
    """Below `examples`."""
    variant: str
    repository: str
    files: tuple[str, ...]
    targets: str
    original: bool = False
    """Whether the repository has the publisher's own files; else it is in the diffusers layout."""
    more: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        return REPOSITORY / "examples" / self.folder / "model_training" / "train.py"

    @property
    def entries(self) -> str:
        """Of `--model_id_with_origin_paths`."""
        return ",".join(f"{self.repository}:{file}" for file in self.files)

    def line(self, output: Path | str, *options: str, full: bool = False) -> list[str]:
        """The options of the recipe for LoRA or full training, with a few more."""
        is_video = self.series == "wan"
        data = "data/clips" if is_video else "data/pictures"
        frames = ["--num_frames", str(FRAMES)] if is_video else ["--use_gradient_checkpointing"]
        trained = ["--trainable_models", "dit"]
        if not full:
            trained = ["--lora_base_model", "dit", "--lora_target_modules", self.targets, "--lora_rank", str(RANK)]
        return [
            *("--dataset_base_path", data, "--dataset_metadata_path", f"{data}/metadata.csv"),
            *("--height", str(SIZE), "--width", str(SIZE), *frames, "--dataset_repeat", "1"),
            *("--model_id_with_origin_paths", self.entries, "--learning_rate", "1e-4", "--num_epochs", "1"),
            *("--remove_prefix_in_ckpt", "pipe.dit.", "--output_path", str(output), *trained, *self.more, *options),
        ]


WAN_FILES = ("diffusion_pytorch_model*.safetensors", "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth")
WAN_TARGETS = "q,k,v,o,ffn.0,ffn.2"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
_KLEIN = "black-forest-labs/FLUX.2-klein-4B"
_HUB_FILES = ("transformer/*.safetensors", "text_encoder/*.safetensors", "vae/diffusion_pytorch_model.safetensors")

WAN = Recipe("wan", "wanvideo", "wan2.1-t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B", WAN_FILES, WAN_TARGETS, original=True)
FLF2V = Recipe(
    *("wan", "wanvideo", "wan2.1-flf2v-14b-720p", "Wan-AI/Wan2.1-FLF2V-14B-720P", (*WAN_FILES, CLIP), WAN_TARGETS),
    original=True,
    more=("--extra_inputs", "input_image,end_image"),
)
BRANCH = Recipe(
    *("wan", "wanvideo", "wan2.1-vace-1.3b", "Wan-AI/Wan2.1-VACE-1.3B", WAN_FILES, WAN_TARGETS),
    original=True,
    more=(
        *("--dataset_metadata_path", "data/clips/metadata_vace.csv", "--extra_inputs", "vace_video,vace_video_mask"),
        *("--data_file_keys", "video,vace_video,vace_video_mask"),
    ),
)
QWEN = Recipe(
    *("qwen-image", "qwen_image", "qwen-image", "Qwen/Qwen-Image"),
    files=(
        "transformer/diffusion_pytorch_model*.safetensors",
        "text_encoder/model*.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    ),
    targets="to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1",
    more=("--dataset_num_workers", "8", "--find_unused_parameters"),
)
FLUX = Recipe(
    *("flux", "flux", "flux.1-dev", "black-forest-labs/FLUX.1-dev"),
    files=("flux1-dev.safetensors", "text_encoder/model.safetensors", "text_encoder_2/*.safetensors", "ae.safetensors"),
    targets="a_to_qkv,b_to_qkv,ff_a.0,ff_a.2,ff_b.0,ff_b.2,a_to_out,b_to_out,proj_out,norm.linear,norm1_a.linear,"
    "norm1_b.linear,to_qkv_mlp",
    original=True,
)
FLUX2 = Recipe(
    *("flux2", "flux2", "flux.2-klein-4b", _KLEIN),
    files=_HUB_FILES,
    targets="to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,linear_in,linear_out,to_qkv_mlp_proj,"
    "single_transformer_blocks.0.attn.to_out,single_transformer_blocks.1.attn.to_out",
    more=("--tokenizer_path", f"{_KLEIN}:tokenizer/"),
)
Z_IMAGE = Recipe(
    *("z-image", "z_image", "z-image-turbo", "Tongyi-MAI/Z-Image-Turbo", _HUB_FILES),
    targets="to_q,to_k,to_v,to_out.0,w1,w2,w3",
    more=("--dataset_num_workers", "8"),
)
RECIPES = {recipe.series: recipe for recipe in (WAN, QWEN, FLUX, FLUX2, Z_IMAGE)}


def prepare(folder: Path, clips: Path, tiny_models: TinyModels, originals: TinyModels, *recipes: Recipe) -> None:
    """A folder to run in: `models/` with a tiny model for each recipe, `data/clips` and `data/pictures`."""
    for recipe in recipes:
        place = folder / "models" / recipe.repository
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to((originals if recipe.original else tiny_models)(recipe.variant))
    data = folder / "data"
    if data.exists():
        return
    data.mkdir()
    (data / "clips").symlink_to(clips)
    (data / "pictures").mkdir()
    with (data / "pictures" / "metadata.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(("image", "prompt", "edit_image", "remark"))
        for number in range(3):
            Image.new("RGB", (64, 48), (40 * number, 100, 200 - 30 * number)).save(data / "pictures" / f"{number}.png")
            table.writerow((f"{number}.png", f"picture {number}", f"{(number + 1) % 3}.png", "none"))


def run(folder: Path, recipe: Recipe, line: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """`python examples/.../train.py` with that folder as the current one."""
    return launch(folder, [sys.executable, str(recipe.script), *line])


def launch(folder: Path, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """A whole command line with that folder as the current one."""
    path = f"{REPOSITORY / 'src'}"
    return subprocess.run(
        command, cwd=folder, env=environment(PYTHONPATH=path), capture_output=True, text=True, check=False, timeout=600
    )
