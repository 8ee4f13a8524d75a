"""Files by which tests have their engines misbehave; ``planting_spec`` looks for them there.

A module of its own, so that naming one does not import vLLM.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = "KVCTL_TEST_FOLDER"  # variable of the engines: where the files are
PLANT = "plant"  # the next load gets one wrong block
SLOW_COPIES = "slow-copies"  # while it exists, each copy takes 0.3 s longer
LOADS_HANG = "loads-hang"  # while it exists, no load from host memory ends
NO_LEASE_GUARD = "no-lease-guard"  # while it exists, late reads are believed
NO_OFFER_CHECK = "no-offer-check"  # while it exists, any offer is
FAIL = {"store": "fail-store", "load": "fail-load"}  # how the next one fails is in the file
HERE = Path(__file__).parent  # on the engines' PYTHONPATH
