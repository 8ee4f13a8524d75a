"""The NVIDIA GPUs of this machine, without any library of NVIDIA's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """True if the driver made a device file for a GPU, or ``nvidia-smi`` lists one (WSL has no
    such files)."""
    if any(file.name[len("nvidia") :].isdigit() for file in devices.glob("nvidia*")):
        return True
    return _listed() > 0


def visible_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA counts them: by number, or as
    ``CUDA_VISIBLE_DEVICES`` names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    count = _listed() or len(list(devices.glob("nvidia[0-9]*")))
    return tuple(map(str, range(count)))


def _listed() -> int:
    """How many GPUs nvidia-smi lists; 0 where it is missing or does not answer."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return 0
    try:
        done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
