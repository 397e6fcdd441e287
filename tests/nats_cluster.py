"""Three NATS servers in a cluster, each a process that can be killed and started again."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from shared.cli.mesh import bound
from shared.cli.mesh.nats_server import find_nats_server, nats_address
from shared.cli.mesh.ports import free_port

NUM_NODES: Final = 3
_UP_WITHIN_S: Final = 30.0


class Node:
    """One server of the cluster, on ports of its own that stay the same over restarts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.port, self.route_port, self.monitor_port = free_port(), free_port(), free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return nats_address(self.port)

    def start(self, routes: list[int]) -> None:
        """Start it; `routes` are the ports at which the servers find each other."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "nats.conf"
        config.write_text(
            f"""
            server_name: {self.name}
            listen: "127.0.0.1:{self.port}"
            http: "127.0.0.1:{self.monitor_port}"
            jetstream {{ store_dir: "{self._folder}" }}
            cluster {{
              name: test
              listen: "127.0.0.1:{self.route_port}"
              routes: [{", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)}]
            }}
            """
        )
        with (self._folder / "nats.log").open("ab") as log:
            command = bound.command([str(find_nats_server()), "--config", str(config)])
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def is_healthy(self) -> bool:
        """Whether it takes clients and is up to date with the others."""
        return self._process is not None and self._monitor("healthz").get("status") == "ok"

    def has_leader(self) -> bool:
        """Whether the cluster, as it sees it, has somebody who decides about streams."""
        return bool(self._monitor("jsz").get("meta_cluster", {}).get("leader"))

    def leader_of(self, stream: str) -> str | None:
        """The name of the node that leads a stream of JetStream, as this one sees it."""
        accounts = self._monitor("jsz?accounts=true&streams=true").get("account_details", [])
        details = [detail for account in accounts for detail in account.get("stream_detail", [])]
        leaders = [detail.get("cluster", {}).get("leader") for detail in details if detail["name"] == stream]
        return leaders[0] if leaders else None

    def num_clients(self) -> int:
        """How many are connected to it."""
        return int(self._monitor("varz").get("connections", 0))

    def _monitor(self, page: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor_port}/{page}", timeout=2) as answer:
                parsed: dict[str, Any] = json.load(answer)
                return parsed
        except (urllib.error.URLError, OSError):
            return {}


class NatsCluster:
    """All of them."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [Node(f"node-{number}", folder / f"node-{number}") for number in range(1, NUM_NODES + 1)]

    @property
    def url(self) -> str:
        """All addresses, as `SHOAL_NATS_URL` takes them."""
        return ",".join(node.url for node in self.nodes)

    def named(self, name: str) -> Node:
        """The node of this name."""
        return next(node for node in self.nodes if node.name == name)

    def leader_of(self, stream: str) -> Node:
        """The node whose word counts for a stream of JetStream."""
        for node in self.nodes:
            if (leader := node.leader_of(stream)) is not None:
                return self.named(leader)
        raise AssertionError(f"the stream {stream} has no leader")

    def start(self) -> None:
        """Start those that do not run, and return when all of them work together."""
        for node in self.nodes:
            if not node.is_healthy():
                node.start([each.route_port for each in self.nodes])
        deadline = time.monotonic() + _UP_WITHIN_S
        while not all(node.is_healthy() and node.has_leader() for node in self.nodes):
            assert time.monotonic() < deadline, "the cluster does not come up"
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill all."""
        for node in self.nodes:
            node.kill()
