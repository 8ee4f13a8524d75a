"""Writes a small Gemma 3 with random weights: five layers of a sliding window, and a full one.

vLLM makes a KV group of each of its layers (6 of them, block ids of their own), or one group of
all where the hybrid manager is off. Run by the engine's Python, with the demo's scripts on its
module path: the tokenizer is the demo's.

Usage: python write_hybrid_model.py FOLDER
"""

import sys

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from write_tiny_model import BOS_ID, EOS_ID, SEED, VOCABULARY, WEIGHT_DEVIATION, byte_tokenizer

WINDOW = 256  # tokens: two blocks


def random_gemma() -> Gemma3ForCausalLM:
    """3.6 million parameters in float32, and 6 KiB of KV a token: 6 layers, 2 KV heads of 64."""
    torch.manual_seed(SEED)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        initializer_range=WEIGHT_DEVIATION,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return Gemma3ForCausalLM(config).to(torch.float32)


def main() -> None:
    (folder,) = sys.argv[1:]
    byte_tokenizer().save_pretrained(folder)
    random_gemma().save_pretrained(folder)


if __name__ == "__main__":
    main()
