"""Train the small UMT5 encoder of this folder: `python examples/shapes/train_text.py --output runs/shapes/text`.

Its tokenizer knows the words below, and characters for all others. The encoder learns to fill in words of captions that were
taken out, and to tell those that were left, so that what it gives for a word depends on its neighbours. Takes a minute.
"""

import argparse
import random
import re
import string
from pathlib import Path

import torch
from scenes import COLOURS, CONCEPT, SHAPES, all_scenes
from torch.nn import functional
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

NOUNS = ("heart", "cross", "ring", "line", "cloud", "rabbit", "tree", "tunnel", "meadow", "sun", "hole", "grass")
MORE = (
    "an",
    "the",
    "of",
    "in",
    "on",
    "and",
    "with",
    "its",
    "out",
    "fat",
    "large",
    "grey",
    "dark",
    "bright",
    "animation",
)
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
TAKEN_OUT = 0.25
"""Share of the words that the encoder has to fill in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder that gets text_encoder and tokenizer")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    tokenizer = make_tokenizer()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **SIZES))
    words = torch.nn.Linear(encoder.config.d_model, len(tokenizer))
    trained = [*encoder.parameters(), *words.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01, fused=True)
    for step in range(1, options.steps + 1):
        texts = tokenizer([sentence(rng) for _ in range(64)], return_tensors="pt", padding=True)
        whole, mask = texts.input_ids, texts.attention_mask
        out = (torch.rand(whole.shape) < TAKEN_OUT) & mask.bool()
        states = encoder(
            input_ids=whole.masked_fill(out, tokenizer.unk_token_id), attention_mask=mask
        ).last_hidden_state
        loss = functional.cross_entropy(words(states)[mask.bool()], whole[mask.bool()])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0:
            print(f"step {step}/{options.steps}: loss {loss.item():.3f}", flush=True)
    encoder.eval().save_pretrained(options.output / "text_encoder")
    tokenizer.save_pretrained(options.output / "tokenizer")
    print(f"wrote {options.output}")


def vocabulary() -> list[str]:
    """All words of captions, and some more."""
    captions = [scene.caption for scene in all_scenes((*SHAPES, CONCEPT))]
    others = [*NOUNS, *(f"{noun}s" for noun in NOUNS), *MORE]
    return sorted({word for text in [*captions, *others] for word in text.split()})


def make_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer whose pieces are words, and printable characters for other text."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    characters = [(character, -9.0) for character in string.ascii_letters + string.digits + string.punctuation]
    words = [(f"▁{word}", -3.0) for word in vocabulary() if len(word) > 1]
    return T5Tokenizer(vocab=[*special, ("▁", -9.0), ("▁a", -3.0), *words, *characters], extra_ids=0)


def sentence(rng: random.Random) -> str:
    """A caption, sometimes of other things, one time in ten words in any order."""
    text = rng.choice(all_scenes()).caption
    kind = rng.random()
    if kind < 0.35:
        noun = rng.choice((*NOUNS, CONCEPT))
        text = re.sub("|".join(SHAPES), noun, text)
    elif kind < 0.45:
        text = " ".join(rng.choices(vocabulary(), k=rng.randint(2, 8)))
    return text if kind < 0.9 else text.replace(f"{rng.choice(list(COLOURS))} ", "")


if __name__ == "__main__":
    main()
