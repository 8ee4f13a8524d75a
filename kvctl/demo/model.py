"""The demo's model: generated once, by the engine's Python, and kept in the cache."""

from __future__ import annotations

from pathlib import Path

from kvctl.demo.cache import entry, key_of
from kvctl.demo.engine_script import FOLDER, run_script

SCRIPT = "write_tiny_model.py"
SERVED_NAME = "tiny"
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, bytes of float32
TIMEOUT = 300.0  # seconds: on a cold disk the import of torch alone takes a minute


def model_key() -> str:
    """Changes with the script, so a changed script makes another model."""
    return key_of((FOLDER / SCRIPT).read_text())


def tiny_model(python: Path, *, log: Path) -> Path:
    """The folder of the model, in the form that transformers writes.

    Args:
        python: of the engine's environment.
        log: where the output of the generation goes, when it has to be generated.

    Raises:
        InstanceError: the script failed.
        UnreachableError: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        run_script(python, SCRIPT, [folder], env={"HF_HUB_OFFLINE": "1"}, log=log, timeout=TIMEOUT)

    return entry("tiny-model", model_key(), make)
