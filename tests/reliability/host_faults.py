"""Two hosts as network namespaces, joined by a switch that is a third: both train, and the link is cut."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.jobs import Job, job, wait_until
from tests.reliability.faults import Fault

LAUNCHER = Path(__file__).parents[2] / "launch" / "multi_node.sh"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "wire"
PORT = 29400
TIMEOUT_S = 10
"""Seconds of distributed.timeout."""
SOON_S = 4 * TIMEOUT_S
LOST = re.compile(r"(RuntimeError|DistNetworkError|cannot \w+ .*lost contact with another rank)")
"""What a rank prints that has lost the other one."""
TINY = [
    *("task=text", "text.width=16", "text.layers=1", "text.heads=2", "text.context=16", "text.heldout_windows=8"),
    *("batch_size=4", "threads=1", "wandb_name=run", "optimizer.name=adamw", "optimizer.lr=0.003", "steps=100000"),
    *("optimizer.sharded=true", "checkpoint.every=20", f"distributed.timeout={TIMEOUT_S}", "evaluate_every=100000"),
]


def why_not() -> str:
    """Return why no two hosts can be made here; "" where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@dataclass(frozen=True)
class Hosts:
    """The names of two namespaces, and of the switch between them."""

    names: tuple[str, str]
    switch: str

    def cut(self) -> None:
        """Let the switch drop all frames of the second host. No link goes down: nobody is told."""
        _ip("-n", self.switch, "link", "set", "port1", "nomaster")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two namespaces with an address each, and remove them at the end. Raises CalledProcessError."""
    mark = uuid.uuid4().hex[:8]
    hosts = Hosts((f"host0-{mark}", f"host1-{mark}"), f"switch-{mark}")
    made = []
    try:
        for name in (hosts.switch, *hosts.names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hosts.switch, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(hosts.names, ADDRESSES, strict=True)):
            port = f"port{number}"
            _ip("-n", hosts.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", hosts.switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def start(hosts: Hosts, number: int, folder: Path) -> contextlib.AbstractContextManager[Job]:
    """Start launch/multi_node.sh on a host, with one rank."""
    options = [f"--local-addr={ADDRESSES[number]}", f"--rdzv-conf=is_host={int(number == 0)}"]
    command = [str(LAUNCHER), "2", "1", f"{ADDRESSES[0]}:{PORT}", *options, *TINY, f"output_dir={folder}"]
    variables = {"PYTHON": sys.executable, "INTERFACE": INTERFACE}
    return job(["ip", "netns", "exec", hosts.names[number], *command], variables)


def cut_link(folder: Path) -> Iterator[Fault]:
    """Cut the link between two hosts that train. Both end within the timeout, with the backend's error or a save's."""
    with two_hosts() as hosts, start(hosts, 0, folder) as first, start(hosts, 1, folder) as second:
        wait_until(lambda: list(folder.glob("run/checkpoints/step_*")), first, second)
        hosts.cut()
        cut = time.monotonic()
        seconds: dict[int, float] = {}
        while len(seconds) < len(ADDRESSES) and time.monotonic() - cut < 10 * TIMEOUT_S:
            for number, host in enumerate((first, second)):
                if number not in seconds and LOST.search(host.output):
                    seconds[number] = time.monotonic() - cut
            time.sleep(0.1)
        outputs = [first.output, second.output]
    for number, output in enumerate(outputs):
        told = LOST.findall(output)
        held = bool(told) and seconds[number] < SOON_S
        seen = told[0] if told else f"after {seconds.get(number)} s: {output[-2000:]}"
        yield Fault("hosts", f"the link is cut; on host {number}", seen, held)
