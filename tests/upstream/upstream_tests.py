"""vLLM's own tests, fetched at test time: none of them is in this repository.

The sdist lands in ``${XDG_CACHE_HOME:-~/.cache}/kvctl/releases/`` under its own file name, checked
against its pinned hash. What runs is its ``tests`` folder alone, copied out, so that ``vllm`` is
the installed package and not the source tree next to the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
URL = (
    "https://files.pythonhosted.org/packages/d5/df/"
    "5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33/vllm-0.32.0.tar.gz"
)
TIMEOUT = 60.0  # seconds without a byte
MODEL = "facebook/opt-125m"  # the model that vLLM's tests name where they load no weights
# The shape of that model, as its makers publish it; the numbers are all that the tests need.
OPT_125M = {
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


def sdist() -> Path:
    """The source distribution, from the cache or from PyPI.

    Raises:
        AssertionError: what was fetched is not the file that is pinned.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "kvctl" / "releases" / f"vllm-{VERSION}.tar.gz"
    if not file.exists() or _sha256(file) != SHA256:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as response, part.open("wb") as out:
            shutil.copyfileobj(response, out)
        found = _sha256(part)
        assert found == SHA256, f"{URL} has the hash {found}, not the pinned one: {part}"
        part.replace(file)
    return file


def unpack_tests(folder: Path) -> None:
    """Puts the ``tests`` folder of the sdist into `folder`."""
    with tarfile.open(sdist()) as archive:
        top = f"vllm-{VERSION}/"
        for member in archive:
            if member.name.startswith(f"{top}tests/"):
                member.name = member.name.removeprefix(top)
                archive.extract(member, folder, filter="data")


def write_hub_cache(home: Path, tokenizer: Path) -> None:
    """A hub cache (``HF_HOME``) that holds the shape of `MODEL` and a tokenizer, and no weights.

    Args:
        tokenizer: a folder with ``tokenizer.json``.
    """
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps(OPT_125M))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, snapshot)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
