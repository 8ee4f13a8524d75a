"""The Python of vLLM releases: fetched once from the package index, kept in kvctl's cache.

A release's sdist is looked up on the index that pip is configured with, checked against the hash
in ``pins.json``, and only the folder that is asked for is kept: ``vllm/`` (no egg-info, it would
hide the installed distribution's version; no sources of kernels) or ``tests/``. ``make clean``
leaves the cache.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

from pip._internal.commands import create_command

from kvctl.demo import cache
from kvctl.errors import UnreachableError

PINS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("pins.json").read_text())
RELEASES = tuple(PINS)  # oldest first
TIMEOUT = 60.0  # seconds, for one answer of the index


def release(version: str) -> Path:
    """The folder that holds the ``vllm/`` of a release; fetched the first time.

    Raises:
        UnreachableError: the index cannot be reached, does not have it, or has another one.
    """
    return _part(version, "vllm")


def own_tests(version: str) -> Path:
    """The folder that holds the ``tests/`` of a release, away from its sources: `vllm` is then
    whatever is installed. Raises as `release` does."""
    return _part(version, "tests")


def _part(version: str, part: str) -> Path:
    name = f"vllm-{version}.tar.gz"
    sha256 = PINS[version]["sha256"]

    def make(folder: Path) -> None:
        with tempfile.TemporaryFile() as archive:
            _download(name, sha256, archive)
            _unpack(archive, f"{part}/", folder)

    kind = "vllm" if part == "vllm" else f"vllm-{part}"
    return cache.entry(kind, f"{version}-{sha256[:8]}", make)


def search_path(version: str) -> list[Path]:
    """What goes in front of the path so that a release is imported instead of the installed one.

    Besides the release, the packages that its Python imports and the installed one does not.

    Raises:
        UnreachableError: something of it can be had neither from the cache nor from the index.
    """
    needs = PINS[version].get("needs", [])
    return [release(version), *(_package(requirement) for requirement in needs)]


def _package(requirement: str) -> Path:
    """A folder with one package, without what that requires."""

    def make(folder: Path) -> None:
        pinned = folder.with_suffix(".txt")
        pinned.write_text(requirement)
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run(
            [sys.executable, *install, "--target", folder, "--requirement", pinned],
            capture_output=True,
            text=True,
        )
        pinned.unlink()
        if done.returncode:
            raise UnreachableError(
                f"pip could not install {requirement.split()[0]}:\n{done.stderr.strip()}",
                hint=_remedy(),
            )

    return cache.entry("package", requirement.split()[0], make)


def _index() -> str:
    """The index that pip would ask: its environment, its files, else its own default."""
    return str(create_command("download").parser.get_default_values().index_url)


def _download(name: str, sha256: str, to: IO[bytes]) -> None:
    page = f"{_index().rstrip('/')}/vllm/"
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT) as answer:
            listed = re.search(rf'href="([^"#]*/{re.escape(name)})[#"]', answer.read().decode())
        if listed is None:
            raise UnreachableError(f"{page} does not list {name}", hint=_remedy())
        link = urllib.parse.urljoin(page, html.unescape(listed[1]))
        with urllib.request.urlopen(link, timeout=TIMEOUT) as answer:
            while part := answer.read(1 << 20):
                digest.update(part)
                to.write(part)
    except (urllib.error.URLError, TimeoutError) as error:
        why = getattr(error, "reason", error)
        raise UnreachableError(f"cannot fetch {name} by {page}: {why}", hint=_remedy()) from error
    if digest.hexdigest() != sha256:
        raise UnreachableError(
            f"{link} has sha256 {digest.hexdigest()}, pinned is {sha256}",
            hint="what the index serves is not vLLM's release: do not use it",
        )


def _unpack(archive: IO[bytes], part: str, folder: Path) -> None:
    """Only that part, without the ``vllm-<version>/`` in front."""
    archive.seek(0)
    with tarfile.open(fileobj=archive, mode="r:gz") as tar:
        for member in tar:
            inside = member.name.partition("/")[2]
            if inside.startswith(part):
                tar.extract(member.replace(name=inside), folder, filter="data")


def _remedy() -> str:
    return (
        "name an index that has it (PIP_INDEX_URL, or pip's configuration), or copy the folder "
        f"{cache.cache_dir()} from a machine that was online"
    )


if __name__ == "__main__":
    for known in RELEASES:
        print(known, *search_path(known))
