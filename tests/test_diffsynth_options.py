"""The options of DiffSynth-Studio's scripts: honoured or refused by name, and the config that they make."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowshard.cli import main as flowshard
from flowshard.compat import model_files
from flowshard.compat.arguments import describe, parse
from flowshard.compat.command_line import read_command
from flowshard.compat.diffsynth import main
from flowshard.compat.mapping import Translation, translate
from flowshard.compat.names import lora_targets
from flowshard.compat.options import OPTIONS, SCRIPTS
from flowshard.errors import UserError
from flowshard.families import find_variant
from tests import diffsynth_lines as lines
from tests.diffsynth_lines import FLF2V, QWEN, RECIPES, WAN, TinyModels

# As `diffsynth/diffusion/parsers.py` and the five scripts have them, with whether they take a value.
GENERAL = [
    "dataset_base_path",
    "dataset_metadata_path",
    "dataset_repeat",
    "dataset_num_workers",
    "data_file_keys",
    "model_paths",
    "model_id_with_origin_paths",
    "extra_inputs",
    "fp8_models",
    "offload_models",
    "resume_from_checkpoint",
    "quant_options",
    "learning_rate",
    "num_epochs",
    "trainable_models",
    "weight_decay",
    "task",
    "customized_optimizer",
    "output_path",
    "remove_prefix_in_ckpt",
    "save_steps",
    "lora_base_model",
    "lora_target_modules",
    "lora_rank",
    "lora_checkpoint",
    "preset_lora_path",
    "preset_lora_model",
    "gradient_accumulation_steps",
    "template_model_id_or_path",
    "cpu_offload_split_threshold",
    "swanlab_project",
    "wandb_project",
    "height",
    "width",
    "max_pixels",
]
FLAGS = [
    "find_unused_parameters",
    "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload",
    "enable_lora_hot_loading",
    "enable_model_cpu_offload",
    "enable_optimizer_cpu_offload",
    "enable_tensorboard_log",
    "enable_swanlab_log",
    "enable_wandb_log",
    "enable_csv_log",
]
OWN = {
    "wan": (
        ["num_frames", "tokenizer_path", "audio_processor_path", "max_timestep_boundary", "min_timestep_boundary"],
        ["initialize_model_on_cpu", "framewise_decoding"],
    ),
    "qwen-image": (["tokenizer_path", "processor_path"], ["zero_cond_t", "initialize_model_on_cpu"]),
    "flux": (["tokenizer_1_path", "tokenizer_2_path"], ["align_to_opensource_format"]),
    "flux2": (["tokenizer_path"], ["initialize_model_on_cpu"]),
    "z-image": (["tokenizer_path"], ["enable_npu_patch"]),
}
OURS = {"sp_size", "seed", "layout", "extend"}
REFUSED = [
    "quant_options",
    "template_model_id_or_path",
    "enable_lora_hot_loading",
    "framewise_decoding",
    "cpu_offload_split_threshold",
]


@pytest.mark.parametrize("series", SCRIPTS)
def test_every_option_of_the_scripts_is_known(series: str) -> None:
    valued, flags = OWN[series]
    script = SCRIPTS[series]
    known = {option.name: option for option in OPTIONS if series in option.scripts}
    expected = {*GENERAL, *FLAGS, *valued, *flags}
    assert {name for name in known if not name.startswith("dmd2_")} == expected | OURS
    for name in expected:
        assert (known[name].kind is bool) == (name in {*FLAGS, *flags}), name
        assert known[name].becomes or known[name].refused, name
        assert f"--{name}" in describe(script)


@pytest.mark.parametrize("name", [*REFUSED, "dmd2_gan_loss_weight"])
def test_options_that_are_not_honoured_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = next(one for one in OPTIONS if one.name == name)
    value = [] if option.kind is bool else ["3"]
    assert main("wan", ["--dataset_base_path", "data", f"--{name}", *value]) == 2
    assert f"--{name}: not honoured here: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ("wan", ["--lora_targets_modules", "q"], "--lora_targets_modules: unknown option; did you mean --lora_target_modules?"),
        ("wan", ["--lora_rank"], "--lora_rank: expected one argument"),
        ("wan", ["--lora_rank", "many"], "--lora_rank: invalid int value: 'many'"),
        ("wan", ["--zero_cond_t"], "--zero_cond_t: examples/wanvideo/model_training/train.py has no such option; it belongs to examples/qwen_image"),
        ("flux", ["--num_frames", "5"], "--num_frames: examples/flux/model_training/train.py has no such option"),
        ("wan", ["a", "prompt"], "'a': an argument that belongs to no option"),
        ("wan", ["--task", "direct_distill"], "--task: 'direct_distill' is not honoured here; use sft, "),
        ("z-image", ["--task", "trajectory_imitation"], "--task: 'trajectory_imitation' is not honoured here"),
        ("wan", [], "--dataset_metadata_path: must be given"),
        ("wan", ["--dataset_metadata_path", "m.csv"], "--lora_base_model or --trainable_models must be given"),
        ("wan", ["--dataset_metadata_path", "m.csv", "--lora_base_model", "text_encoder"], "--lora_base_model: 'text_encoder' is not trained here"),
        ("wan", ["--dataset_metadata_path", "m.csv", "--trainable_models", "dit,vae"], "--trainable_models: 'vae' is not trained here"),
        ("wan", ["--dataset_metadata_path", "m.csv", "--lora_base_model", "dit"], "--model_paths or --model_id_with_origin_paths must be given"),
        ("flux", ["--dataset_metadata_path", "m.csv", "--trainable_models", "dit", "--align_to_opensource_format"], "--align_to_opensource_format: is a format of LoRA files"),
        ("wan", ["--dataset_metadata_path", "m.csv", "--lora_base_model", "dit", "--model_paths", "a.safetensors"], "--model_paths: is not JSON"),
        ("wan", ["--dataset_metadata_path", "m.csv", "--lora_base_model", "dit", "--model_paths", '["a.safetensors"]'], "a.safetensors does not exist"),
    ],
)  # fmt: skip
def test_mistakes_are_named(series: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(series, ["--dataset_base_path", "data", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_base_path_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("wan", []) == 2
    assert "--dataset_base_path must be given" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, clips: Path, tiny_models: TinyModels, originals: TinyModels
) -> Path:
    place = tmp_path_factory.mktemp("scripts")
    lines.prepare(place, clips, tiny_models, originals, WAN, FLF2V, QWEN)
    return place


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFSYNTH_SKIP_DOWNLOAD", "True")


def _translated(
    recipe: lines.Recipe, *options: str, full: bool = False, environment: dict[str, str] | None = None
) -> Translation:
    script = SCRIPTS[recipe.series]
    return translate(script, parse(script, recipe.line("out", *options, full=full)), environment or {})


def _tree(
    recipe: lines.Recipe, *options: str, full: bool = False, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    translation = _translated(recipe, *options, full=full, environment=environment)
    translation.config()  # is one
    return translation.tree


def test_a_recipe_for_lora_makes_this_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    tree = _tree(
        WAN, "--gradient_accumulation_steps", "2", "--sp_size", "2", "--seed", "3", environment={"WORLD_SIZE": "8"}
    )
    blocks = [f"blocks.*.{layer}" for layer in ("ffn.net.0.proj", "ffn.net.2")]
    attention = [f"blocks.*.attn{number}.to_{name}" for number in "12" for name in ("q", "k", "v", "out.0")]
    assert sorted(tree.pop("lora").pop("targets")) == sorted(blocks + attention)
    assert tree == {
        "seed": 3,
        "output": "out/flowshard",
        "model": {"variant": "wan2.1-t2v-1.3b", "path": WAN.entries.split(",")},
        "data": {
            "metadata": "data/clips/metadata.csv",
            "root": "data/clips",
            "columns": ["video"],
            "height": 32,
            "width": 32,
            "repeat": 1,
            "frames": 5,
            "short": "trim",
        },
        "train": {
            "method": "lora",
            "epochs": 1,
            "global_batch": 8,
            "learning_rate": 1e-4,
            "weight_decay": 0.01,
            "clip_norm": None,
        },
        "objective": {"preset": "diffsynth", "index_range": [0.0, 1.0], "stratified": False},
        "layout": {"sequence": 2},
        "memory": {"activations": "recompute"},
        "save": {"every_epochs": 1, "keep": 1},
    }


def test_other_options_of_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    options = "--use_gradient_checkpointing_offload --save_steps 500 --weight_decay 0.1 --max_timestep_boundary 0.417"
    more = "--customized_optimizer torch.optim.Adam --enable_wandb_log --wandb_project mine --extend a.py:f"
    tree = _tree(WAN, *options.split(), *more.split(), "--resume_from_checkpoint", "w.safetensors", full=True)
    assert tree["memory"] == {"activations": "offload"}
    assert tree["save"] == {"every": 500, "keep": 1}
    assert tree["objective"]["index_range"] == [0.0, 0.417]
    assert tree["model"]["weights"] == "w.safetensors"
    assert tree["model"]["extend"] == "a.py:f"
    assert tree["train"]["optimizer"] == "torch.optim.Adam"
    assert tree["train"]["groups"] == [{"pattern": "*", "weight_decay": 0.1}]  # norms and biases as well
    assert tree["log"] == {"trackers": ["wandb"], "project": "mine"}
    assert "lora" not in tree
    preset = _tree(WAN, "--preset_lora_path", "a.safetensors", "--preset_lora_model", "dit", full=True)
    assert preset["lora"] == {"preset": ["a.safetensors"]}
    assert _tree(WAN, "--lora_checkpoint", "b.safetensors")["lora"]["init_from"] == "b.safetensors"
    image = _tree(QWEN)
    assert image["memory"] == {"activations": "recompute"}
    assert "short" not in image["data"]
    assert image["data"]["columns"] == ["image"]


def test_what_the_launcher_is_configured_for_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    zero3 = {
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }
    tree = _tree(WAN, environment=zero3)
    assert tree["layout"] == {"offload_optimizer": True, "offload_parameters": True}
    assert tree["train"]["clip_norm"] == 1.0
    assert tree["train"]["global_batch"] == 8
    zero2 = {**zero3, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    assert _tree(WAN, environment=zero2)["layout"] == {"offload_optimizer": True}  # parameters are not divided
    assert _tree(WAN, "--enable_model_cpu_offload")["layout"] == {"offload_parameters": True, "strategy": "fsdp2"}
    case = _translated(WAN, "--layout", "fsdp2:2,sequence=2,activations=keep", environment={"WORLD_SIZE": "2"})
    assert case.config().layout.sequence == 2
    assert case.config().memory.activations == "keep"
    assert case.config().train.global_batch == 1
    with pytest.raises(UserError, match="--layout: zero3:4 is of 4 processes, but 2 were started"):
        _tree(WAN, "--layout", "zero3:4", environment={"WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="--sp_size: 4 does not divide the 6 processes"):
        _tree(WAN, "--sp_size", "4", environment={"WORLD_SIZE": "6"})


def test_what_the_model_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that need frames of the clip, in a command line of text to video."""
    monkeypatch.chdir(folder)
    plain = lines.Recipe("wan", "wanvideo", FLF2V.variant, FLF2V.repository, FLF2V.files, FLF2V.targets)
    translation = _translated(plain)
    assert translation.tree["model"]["variant"] == FLF2V.variant
    assert [note.split(",")[0] for note in translation.notes] == [
        "--extra_inputs: wan2.1-flf2v-14b-720p needs input_image",
        "--extra_inputs: wan2.1-flf2v-14b-720p needs end_image",
    ]
    assert _translated(FLF2V).notes == []
    assert _tree(FLF2V)["data"]["columns"] == ["video"]  # from the clip, whatever columns there are
    with pytest.raises(
        UserError, match=r"--extra_inputs: 'end_image' is no input of wan2.1-t2v-1.3b; its inputs: none"
    ):
        _tree(WAN, "--extra_inputs", "end_image")
    with pytest.raises(
        UserError, match=r"the files are of wan2.1-t2v-1.3b, which .*z_image.* does not train; use examples/wanvideo"
    ):
        script = SCRIPTS["z-image"]
        options = [one for one in WAN.line("out") if one not in ("--num_frames", "5")]
        translate(script, parse(script, options), {})


def test_missing_files_and_downloads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=r"--model_id_with_origin_paths: models/Wan-AI/Wan2.1-T2V-1.3B has no diffusion_pytorch_model\*.safetensors, and DIFFSYNTH_SKIP_DOWNLOAD is true",
    ):
        _tree(WAN)
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(folder / "models"))
    assert _tree(WAN)["model"]["path"][0].startswith("Wan-AI/")
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("DIFFSYNTH_SKIP_DOWNLOAD", "False")
    asked: list[tuple[str, list[str]]] = []

    def snapshot(repository: str, place: Path, patterns: list[str]) -> None:
        asked.append((repository, patterns))
        if not place.exists() or len(asked) > 3:
            raise OSError("no network")
        source = folder / "models" / repository
        for file in {found for pattern in patterns for found in source.glob(pattern)}:
            if not (place / file.name).exists():
                (place / file.name).symlink_to(file)

    monkeypatch.setattr(model_files, "_snapshot", snapshot)
    with pytest.raises(
        UserError, match=r"--tokenizer_path: .*has no google/umt5-xxl, and Wan-AI/Wan2.1-T2V-1.3B cannot be downloaded"
    ):
        _tree(WAN)
    assert [(repository, patterns[0]) for repository, patterns in asked] == [
        *((WAN.repository, file) for file in WAN.files),
        ("Wan-AI/Wan2.1-T2V-1.3B", "google/umt5-xxl"),
    ]


def test_tokenizers_are_found_or_given(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "parts" not in _tree(WAN)["model"]  # it lies beside the files
    assert _tree(WAN, "--tokenizer_path", "data")["model"]["parts"] == {"tokenizer": "data"}
    named = _tree(WAN, "--tokenizer_path", f"{WAN.repository}:google/umt5-xxl/")["model"]["parts"]["tokenizer"]
    assert Path(named) == Path("models", WAN.repository, "google/umt5-xxl")
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in WAN.files:
        for found in (folder / "models" / WAN.repository).glob(file):
            (alone / found.name).symlink_to(found)
    paths = str(sorted(str(file) for file in alone.iterdir())).replace("'", '"')
    recipe = WAN.line("out")
    at = recipe.index("--model_id_with_origin_paths")
    recipe[at : at + 2] = ["--model_paths", paths]
    script = SCRIPTS["wan"]
    found = translate(script, parse(script, [*recipe, "--set", "model.variant=wan2.1-t2v-1.3b"]), {}).tree["model"]
    assert Path(found["parts"]["tokenizer"]) == Path("models/Wan-AI/Wan2.1-T2V-1.3B/google/umt5-xxl")


def test_encoders_alone_are_known_by_their_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--task sft:data_process` needs no transformer."""
    monkeypatch.chdir(folder)

    def tree(recipe: lines.Recipe, *options: str) -> dict[str, Any]:
        entries = ",".join(
            f"{recipe.repository}:{file}" for file in recipe.files if "diffusion_pytorch_model*" not in file
        )
        line = recipe.line("encoded", "--task", "sft:data_process", "--model_id_with_origin_paths", entries, *options)
        translation = translate(SCRIPTS[recipe.series], parse(SCRIPTS[recipe.series], line), {})
        assert translation.encode
        translation.config()
        return translation.tree

    found = tree(WAN)
    assert found["model"]["variant"] == "wan2.1-t2v-1.3b"
    assert found["data"]["cache"] == "encoded"
    assert "lora" not in found
    assert tree(QWEN)["model"]["variant"] == "qwen-image"
    with pytest.raises(UserError, match="no file of the transformer is given, so which model it is cannot be told"):
        tree(QWEN, "--extra_inputs", "edit_image")  # whose name another repository has


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("a_to_qkv", [f"transformer_blocks.*.attn.to_{name}" for name in "qkv"]),
        ("proj_out", ["single_transformer_blocks.*.proj_out"]),  # not the last projection, which is final_proj_out there
        ("blocks.1.ff_a.0", ["transformer_blocks.1.ff.net.0.proj"]),
        ("norm1_b.linear", ["transformer_blocks.*.norm1_context.linear"]),
        ("to_qkv_mlp", ["single_transformer_blocks.*.proj_mlp", *(f"single_transformer_blocks.*.attn.to_{name}" for name in "qkv")]),
    ],
)  # fmt: skip
def test_targets_mean_the_layers_that_end_with_them(targets: str, expected: list[str]) -> None:
    family = find_variant("flux.1-dev", option="")[0]
    names = [
        *(f"transformer_blocks.{block}.{layer}" for block in "01" for layer in (
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")),
            "norm1.linear", "norm1_context.linear", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        )),
        *(f"single_transformer_blocks.{block}.{layer}" for block in "01" for layer in (
            "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out", "norm.linear",
        )),
        "proj_out",
    ]  # fmt: skip
    layers = dict.fromkeys(names, (3072, 3072))
    found, unknown = lora_targets([targets, "nothing"], family, layers, "dit")
    assert sorted(found) == sorted(expected)
    assert unknown == ["nothing"]
    with pytest.raises(
        UserError, match="--lora_target_modules: nothing names no layer of the model; it has for example"
    ):
        lora_targets(["nothing"], family, layers, "dit")


def test_without_targets_the_large_layers_of_the_blocks_are_found() -> None:
    family = find_variant("wan2.1-vace-1.3b", option="")[0]
    layers = {
        "blocks.0.attn1.to_q": (1536, 1536),
        "blocks.0.ffn.net.2": (1536, 8960),
        "blocks.0.small": (256, 1536),
        "vace_blocks.0.attn1.to_q": (1536, 1536),
        "condition_embedder.time_proj": (9216, 1536),
        "patch_embedding": (1536, 16, 1, 2, 2),
    }
    assert lora_targets([], family, layers, "dit") == (["blocks.*.attn1.to_q", "blocks.*.ffn.net.2"], [])
    assert lora_targets([], family, layers, "vace") == (["vace_blocks.*.attn1.to_q"], [])
    with pytest.raises(UserError, match="--lora_target_modules: is empty, and no linear layer"):
        lora_targets([], family, {"blocks.0.attn1.to_q": (64, 64)}, "dit")


def test_recipes_cover_the_scripts() -> None:
    assert RECIPES.keys() == SCRIPTS.keys()
    for series, script in SCRIPTS.items():
        assert RECIPES[series].script.as_posix().endswith(script.path)
        assert RECIPES[series].script.is_file()


def test_settings_that_were_not_downloaded_are_added(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiffSynth-Studio downloads a text encoder without its config."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "models" / QWEN.repository / "text_encoder"
    place.mkdir(parents=True)
    published = folder / "models" / QWEN.repository / "text_encoder"
    (place / "model.safetensors").symlink_to(published / "model.safetensors")
    asked: list[list[str]] = []

    def snapshot(repository: str, to: Path, patterns: list[str]) -> None:
        asked.append(patterns)
        (to / "text_encoder" / "config.json").symlink_to(published / "config.json")

    monkeypatch.setattr(model_files, "_snapshot", snapshot)
    fetch = model_files.fetch
    assert len(fetch(QWEN.repository, "text_encoder/*.safetensors", option="--x")) == 1
    assert asked == []  # not to be downloaded
    monkeypatch.setenv("DIFFSYNTH_SKIP_DOWNLOAD", "False")
    for _ in range(2):
        assert fetch(QWEN.repository, "text_encoder/*.safetensors", option="--x") == [
            Path("models", QWEN.repository, "text_encoder/model.safetensors")
        ]
    assert asked == [["text_encoder/*.json"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python", {"WORLD_SIZE": "1"}),
        ("torchrun --nproc-per-node 4 --nnodes 2", {"WORLD_SIZE": "8"}),
        ("python -m torch.distributed.run --nproc_per_node=3", {"WORLD_SIZE": "3"}),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch", {"WORLD_SIZE": "2"}),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 4 --multi_gpu", {"WORLD_SIZE": "4"}),
        (
            "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 --offload_param_device cpu",
            {
                "WORLD_SIZE": "2",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
        ),
        (
            "accelerate launch --config_file {config}",
            {
                "WORLD_SIZE": "8",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "ACCELERATE_MIXED_PRECISION": "bf16",
            },
        ),
    ],
)
def test_launchers_of_command_lines_are_read(tmp_path: Path, words: str, expected: dict[str, str]) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n",
        encoding="utf-8",
    )
    line = [*words.format(config=config).split(), "./examples/flux/model_training/train.py", "--seed", "1"]
    command = read_command(line)
    assert command.environment == expected
    assert command.script.series == "flux"
    assert command.arguments == ["--seed", "1"]
    assert command.assumed is None


def test_migrate_says_what_it_cannot_know(capsys: pytest.CaptureFixture[str]) -> None:
    command = read_command(["accelerate", "launch", "examples/flux/model_training/train.py"])
    assert command.assumed is not None
    assert flowshard(["migrate", "--", "python", "train.py"]) == 2
    assert "COMMAND LINE: starts none of the scripts that are known here: examples/wanvideo" in capsys.readouterr().err
    assert flowshard(["migrate", "--", "python", "examples/flux/model_training/train.py", "--lora_rnk", "3"]) == 2
    assert "--lora_rnk: unknown option; did you mean --lora_rank?" in capsys.readouterr().err


def test_migrate_keeps_what_the_launcher_asks_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    launcher = [
        "accelerate",
        "launch",
        "--use_deepspeed",
        "--zero_stage",
        "3",
        "--num_processes",
        "2",
        "--offload_optimizer_device",
        "cpu",
    ]
    line = WAN.line("out")
    assert flowshard(["migrate", "--", *launcher, WAN.script.as_posix(), *line, "--sp_size", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# torchrun --nproc-per-node 2 -m flowshard train THIS_FILE\n")
    tree = yaml.safe_load(text)
    assert tree["layout"] == {"sequence": 2, "offload_optimizer": True, "strategy": "zero3"}
    assert tree["train"]["global_batch"] == 1
