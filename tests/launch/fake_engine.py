"""A stand-in for vLLM, router or relay: a process that behaves as it is told.

It serves ``GET /health`` and nothing else. It is not vLLM: no model, no KV, no connector.
"""

import argparse
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--port", type=int)
options.add_argument("--say", default="", help="a file whose text is written first")
options.add_argument("--loading", action="store_true", help="say that the model is loaded")
options.add_argument("--ready-after", type=float, default=0.0, help="s; negative: never")
options.add_argument("--exit-after", type=float, help="s after which it ends by itself")
options.add_argument("--exit-code", type=int, default=1)
options.add_argument("--when", default="", help="a file: exit only once it is there")
options.add_argument("--ignore-term", action="store_true")
options.add_argument("--children", type=int, default=0, help="children that ignore SIGTERM")
options.add_argument("--shm", default="", help="a file in /dev/shm to map and to leave behind")
options.add_argument("--feed", default="", help="a socket to listen on and to leave behind")
options.add_argument("--order", default="", help="a file that start and end are appended to")
options.add_argument("--linger", type=float, default=0.0, help="s between SIGTERM and the end")
options.add_argument("--beat", type=float, default=0.0, help="s between two lines of output")
told, _ = options.parse_known_args()  # vLLM's own flags are passed over
name = os.environ.get("KVCTL_PROCESS", "").rpartition(":")[2]


def note(what: str) -> None:
    if told.order:
        with Path(told.order).open("a") as file:
            file.write(f"{what} {name}\n")


def end(*_: object) -> None:
    time.sleep(told.linger)
    note("end")
    os._exit(0)


note("start")
signal.signal(signal.SIGTERM, signal.SIG_IGN if told.ignore_term else end)
print("INFO 11-30 19:24:13 [fake.py:1] this is a fake engine", flush=True)
if told.say:
    print(Path(told.say).read_text(), flush=True)
if told.loading:
    print("(Worker pid=1) INFO 11-30 19:24:14 [x.py:1] Starting to load model", flush=True)
for _ in range(told.children):
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: signal.pause()"
    subprocess.Popen([sys.executable, "-S", "-c", stubborn])
if told.shm:
    # A new one as sem_open makes it: mapped under another name than the one that stays.
    target = Path("/dev/shm", told.shm)
    draft = target if target.exists() else target.with_name(f"{told.shm}-draft")
    with draft.open("a+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
    if draft != target:
        draft.rename(target)
if told.feed:
    feed = socket.socket(socket.AF_UNIX)
    feed.bind(told.feed)
    feed.listen()
server = None
began = time.monotonic()
while True:
    now = time.monotonic() - began
    due = told.exit_after is not None and now >= told.exit_after
    if due and (not told.when or Path(told.when).exists()):
        print("the end", flush=True)
        sys.exit(told.exit_code)
    if server is None and told.port and 0 <= told.ready_after <= now:
        server = socket.create_server(("127.0.0.1", told.port))
        server.settimeout(0.02)
    if told.beat:
        print(f"beat {now:.2f}", flush=True)
    if server is None:
        time.sleep(told.beat or 0.02)
        continue
    try:
        client, _ = server.accept()
        client.recv(4096)
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        client.close()
    except OSError:
        time.sleep(told.beat)
