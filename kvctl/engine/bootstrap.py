"""Sets up what `make demo` and `make test` need, starting from nothing but a Python 3.

    python3 kvctl/engine/bootstrap.py [PART ...] [--folder DIR]

This file only makes sure that the Python is new enough, and hands over to `provision`. Nothing is
installed yet and the Python may be old: so the standard library alone, and no syntax that an old
Python 3 cannot read. It is to say what is wrong, not to end in a SyntaxError.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST, NEWEST = (3, 11), (3, 14)  # as in machine.py, which an old Python cannot import
OTHERS = ("python3.12", "python3.11", "python3.13", "python3.14")


def main() -> None:
    """Exits with a code of `kvctl.errors.Exit`."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        other = find_other_python()
        if other:
            say(sys.executable + " is Python " + version() + ", taking " + other)
            os.execv(other, [other, str(HERE / "bootstrap.py"), *sys.argv[1:]])
        say("Python 3.11 to 3.14 is needed; " + sys.executable + " is " + version())
        say("  install one, or name it: make PYTHON=/path/to/python3.12 …")
        sys.exit(4)
    # As a script, this folder is first on the path; kvctl itself is two folders above.
    sys.path[:] = [str(HERE.parent.parent), *(entry for entry in sys.path if entry != str(HERE))]
    from kvctl.engine.provision import main as provision

    sys.exit(provision(sys.argv[1:]))


def find_other_python() -> str:
    """The path of a Python that will do; empty if none is on the path."""
    for name in OTHERS:
        path = shutil.which(name)
        # Version managers put commands on the path that only say that they are switched off.
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return path
    return ""


def version() -> str:
    """This Python's version: 3.9.18."""
    return ".".join(str(part) for part in sys.version_info[:3])


def say(text: str) -> None:
    """To stderr: stdout belongs to the command that runs after set-up."""
    sys.stderr.write("kvctl set-up: " + text + "\n")


if __name__ == "__main__":
    main()
