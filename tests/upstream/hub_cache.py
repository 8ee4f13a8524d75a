"""A hub cache that holds what vLLM's own tests ask the hub for, and no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MODEL = "facebook/opt-125m"  # what vLLM's tests name where they load no weights
# The shape of that model, as its makers publish it.
SHAPE = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}


def write_hub_cache(home: Path, tokenizer: Path) -> None:
    """Makes the cache.

    Args:
        home: what ``HF_HOME`` is to name.
        tokenizer: a folder with ``tokenizer.json``.
    """
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, snapshot)
