"""Whether this machine has an NVIDIA GPU, without any library of NVIDIA's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """True if the driver made a device file for a GPU, or ``nvidia-smi`` lists one (WSL has no
    such files)."""
    if any(file.name[len("nvidia") :].isdigit() for file in devices.glob("nvidia*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU 0" in listed.stdout
