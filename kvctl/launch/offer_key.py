"""The key by which prefill signs what it offers: one a topology, made at its first launch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvctl.errors import UnreachableError
from kvctl.launch.state import run_folder

NAME = "offer.key"


def offer_key_path(topology: str) -> Path:
    """Where a topology's own key lies; it need not exist yet."""
    return run_folder(topology) / NAME


def lay_offer_key(path: Path) -> None:
    """Makes the key unless it is there. It stays over launches, as offers may outlive one.

    Raises:
        UnreachableError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole under another name: an engine never reads half a key.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    except OSError as error:
        raise UnreachableError(
            f"the key for prefill's offers cannot be written: {path}: {error.strerror}",
            hint="make the folder writable, or set KVCTL_STATE_DIR to one that is",
        ) from error
