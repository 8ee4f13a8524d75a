"""The requirement files that engines, router and tool are installed from; shipped in the wheel."""

from __future__ import annotations

from pathlib import Path

PINS = Path(__file__).parent / "pins"
VLLM_METADATA = Path(__file__).parent / "vllm-metadata"  # its pyproject.toml says what it is for


def requirements(name: str) -> list[str]:
    """The lines of the pin file `name` without comments: ``["vllm==0.32.0"]``."""
    lines = ((PINS / name).read_text()).splitlines()
    return [line for line in (text.partition("#")[0].strip() for text in lines) if line]
