"""Writes the demo's model: a byte-level tokenizer and a small Llama with random weights.

Run by the engine's Python, which has torch and transformers; kvctl's own need not. The weights
come from a fixed seed, so every machine with the same torch gets the same model.

Usage: python write_tiny_model.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
# Four times what a Llama starts its training with. At 0.02 the next tokens are nearly equally
# likely, whatever the prompt: KV of another prompt in 16 of 1 500 positions moved the largest of
# eight logprobs by 0.005, less than kernels of two kinds may differ. At 0.08 it moves by 0.15 and
# more, while matrix products with inputs rounded to TF32 stay within 0.01 (bench/wrong_block.py).
WEIGHT_DEVIATION = 0.08
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 256, 257
VOCABULARY = 258


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token ids 0 to 255 are the bytes, without any merge."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {BOS: BOS_ID, EOS: EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def random_llama() -> LlamaForCausalLM:
    """2.5 million parameters in float32, and 4 KiB of KV a token: 4 layers, 2 KV heads of 64."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=WEIGHT_DEVIATION,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def main() -> None:
    (folder,) = sys.argv[1:]
    byte_tokenizer().save_pretrained(folder)
    random_llama().save_pretrained(folder)


if __name__ == "__main__":
    main()
