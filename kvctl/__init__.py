"""kvctl: run vLLM with a split KV cache safely."""

__version__ = "0.1.0"
