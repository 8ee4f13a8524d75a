"""One engine with a connector, all in this process, that answers prompts as they come.

Run by the engine's Python, with the demo's scripts on its module path. ``ENGINE.json`` holds the
arguments of ``vllm.LLM``; each line of the input is a prompt's token ids, and each line written to
the descriptor is its answer, in the form of the demo's script. The first line says that it is
ready. It ends with its input.

Usage: python one_engine.py ENGINE.json MAX_TOKENS TOP DESCRIPTOR
"""

import json
import os
import sys
from pathlib import Path

from answer_prompts import answer
from vllm import LLM


def main() -> None:
    arguments, max_tokens, top, descriptor = sys.argv[1:]
    engine = LLM(**json.loads(Path(arguments).read_text()))
    with os.fdopen(int(descriptor), "w", buffering=1) as said:
        said.write("ready\n")
        for line in sys.stdin:
            (answered,) = answer(engine, [json.loads(line)], int(max_tokens), int(top))
            said.write(json.dumps(answered) + "\n")


if __name__ == "__main__":
    main()
