"""``kvctl`` with a hand-made plan instead of one that a topology file gives.

``fake_plan.py PLAN.json ARGUMENTS...``: everything but the plan is the real command.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import kvctl.cli.launch
from kvctl.cli.app import main
from kvctl.launch.offer_key import offer_key_path

given = json.loads(Path(sys.argv[1]).read_text())
given["processes"] = tuple(SimpleNamespace(**each) for each in given["processes"])
given["offer_key"] = Path(given.get("offer_key") or offer_key_path(given["name"]))
given["engine"] = SimpleNamespace(**{**given["engine"], "python": Path(sys.executable)})
kvctl.cli.launch._plan = lambda *_, **__: SimpleNamespace(**given)
sys.argv[1:] = sys.argv[2:]
main()
