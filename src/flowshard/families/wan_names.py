"""Names of the layers of Wan's transformers in the publisher's files (wan/modules/{model,vace_model}.py) and diffusers'."""

from flowshard.weights.names import Pair, Vocabulary


def _blocks(name: str) -> list[Pair]:
    return [
        (f"{name}.*.norm2", f"{name}.*.norm3"),
        (f"{name}.*.scale_shift_table", f"{name}.*.modulation"),
        (f"{name}.*.ffn.net.0.proj", f"{name}.*.ffn.0"),
        (f"{name}.*.ffn.net.2", f"{name}.*.ffn.2"),
        *(
            (f"{name}.*.{ours}.{layer}", f"{name}.*.{theirs}.{original}")
            for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
            for layer, original in (
                ("to_q", "q"),
                ("to_k", "k"),
                ("to_v", "v"),
                ("to_out.0", "o"),
                ("norm_q", "norm_q"),
                ("norm_k", "norm_k"),
            )
        ),
    ]


NAMES = Vocabulary(
    [
        ("patch_embedding", "patch_embedding"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        *_blocks("blocks"),
        ("scale_shift_table", "head.modulation"),
        ("proj_out", "head.head"),
        # Of models that attend to the CLIP embedding of pictures as well.
        ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
        ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
        ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
        ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
        ("blocks.*.attn2.add_k_proj", "blocks.*.cross_attn.k_img"),
        ("blocks.*.attn2.add_v_proj", "blocks.*.cross_attn.v_img"),
        ("blocks.*.attn2.norm_added_k", "blocks.*.cross_attn.norm_k_img"),
        # Of models with the branch of VACE.
        ("vace_patch_embedding", "vace_patch_embedding"),
        *_blocks("vace_blocks"),
        ("vace_blocks.*.proj_in", "vace_blocks.*.before_proj"),
        ("vace_blocks.*.proj_out", "vace_blocks.*.after_proj"),
    ]
)
"""Of all kinds, so that a file of any of them says which it is."""
