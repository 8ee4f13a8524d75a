"""The connector where an engine of another environment finds it: a copy of it, alone.

An engine gets this folder on its ``PYTHONPATH``. It must hold nothing but ``kvctl_connector``:
a whole site-packages there would put kvctl's own dependencies before the engine's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

from kvctl import __version__
from kvctl.errors import KvctlError, UnreachableError
from kvctl.launch.state import state_dir

PACKAGE = "kvctl_connector"


def connector_path() -> Path:
    """The folder of the copy, named by version and content; it need not exist yet."""
    digest = hashlib.sha256()
    for name, content in _files():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return state_dir() / "connector" / f"{__version__}-{digest.hexdigest()[:12]}"


def source_path() -> Path:
    """The package in the environment that kvctl itself runs in."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise KvctlError(
            f"the package {PACKAGE} is missing beside kvctl", hint="install kvctl again"
        )
    return Path(spec.submodule_search_locations[0])


def lay_connector() -> Path:
    """Makes the copy unless it is there, and returns the folder to put on ``PYTHONPATH``.

    The name depends on the content, so an engine that runs keeps the code it was started with.

    Raises:
        UnreachableError: the state folder cannot be written.
    """
    target = connector_path()
    if (target / PACKAGE).is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Made under another name and renamed: there is never a half copy of the right name.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as fresh:
            package = Path(fresh) / "copy" / PACKAGE
            for name, content in _files():
                (package / name).parent.mkdir(parents=True, exist_ok=True)
                (package / name).write_bytes(content)
            try:
                os.rename(package.parent, target)  # noqa: PTH104 - must fail on a full folder
            except OSError:
                if not (target / PACKAGE).is_dir():  # else another launch was faster
                    raise
    except OSError as error:
        raise UnreachableError(
            f"the connector cannot be copied to {target}: {error}",
            hint="make the folder writable, or set KVCTL_STATE_DIR to one that is",
        ) from error
    return target


def _files() -> list[tuple[str, bytes]]:
    """Relative name and content of every file of the package, in a fixed order."""
    source = source_path()
    return [
        (str(path.relative_to(source)), path.read_bytes())
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
