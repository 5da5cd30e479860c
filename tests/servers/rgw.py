"""A throw-away single-node Ceph cluster (one mon, one OSD in memory) with its S3 gateway.

Nothing outside one temporary directory is read or written: own ceph.conf, keyring, monmap and
ports, so clusters do not see each other, nor a real one that this machine may belong to. There is
no mgr: RGW does not need it. Up in about 2 s.

Found with RGW 16.2 (pacific): error answers carry no <Message>; PutObject honours If-None-Match: *, but If-Match only
without the quotes around the ETag; Complete and DeleteObject ignore preconditions; x-amz-checksum-* is neither verified
nor stored; Complete returns no ETag.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from .process import ServerProcess, ServerStartError, accepts, free_port
from .server import S3Server, ServerUnavailable

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "ceph-authtool", "monmaptool", "radosgw-admin")
MEMSTORE_BYTES = 4 << 30
COMMAND_TIMEOUT = 60.0
DAEMON_TIMEOUT = 60.0

_CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {dir}/keyring
run dir = {dir}
admin socket = {dir}/$name.asok
pid file =
log file = {dir}/$name.log
mon cluster log file = {dir}/cluster.log
crash dir = {dir}/crash

# One OSD, so no replicas; RGW makes seven pools or more, and one PG each is plenty.
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd crush chooseleaf type = 0
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 1

mon data = {dir}/mon
# How full this machine's disk is must not decide whether the mon starts.
mon data avail crit = 0
mon data avail warn = 0
# There is nobody to wait for before a change is proposed (default: up to 1 s each).
paxos propose interval = 0.1
paxos min wait = 0.01

osd data = {dir}/osd
osd objectstore = memstore
memstore device bytes = {memstore_bytes}
# A busy machine starves heartbeats; nothing takes over from a single OSD anyway.
osd heartbeat grace = 300

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
rgw override bucket index max shards = 1
rgw dynamic resharding = false
"""


def _keyring() -> str:
    capabilities = {
        "mon.": {"mon": "allow *"},
        "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
        "client.rgw": {"mon": "allow rwx", "osd": "allow rwx"},
    }
    lines = []
    for name, caps in capabilities.items():
        lines += [f"[{name}]", f"\tkey = {_cephx_key()}"]
        lines += [f'\tcaps {service} = "{cap}"' for service, cap in caps.items()]
    return "\n".join(lines) + "\n"


def _cephx_key() -> str:
    """A new secret in CryptoKey's encoding: type AES (1), time of creation, length, bytes."""
    return base64.b64encode(struct.pack("<HIIH", 1, int(time.time()), 0, 16) + os.urandom(16)).decode()


class _Cluster:
    """The daemons of one cluster, and the means to run Ceph's programs against it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "ceph.conf"
        self._daemons: list[ServerProcess] = []
        # CEPH_ARGS or CEPH_CONF of the caller would point the programs at another cluster.
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("CEPH_")}

    def run(self, program: str, *args: str) -> str:
        """Stdout of a program that ran to its end with status 0; ServerStartError otherwise."""
        line = [program, "-c", str(self.conf), *args]
        done = subprocess.run(
            line, env=self._env, cwd=self.directory, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_TIMEOUT,
        )  # fmt: skip
        if done.returncode:
            raise ServerStartError(f"{' '.join(line)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def start(self, program: str, *args: str) -> ServerProcess:
        line = [program, "-c", str(self.conf), "--foreground", *args]
        daemon = ServerProcess(program, line, self.directory / f"{program}.out", env=self._env)
        self._daemons.append(daemon)
        return daemon

    def stop(self) -> None:
        # The gateway first: it does not end while it waits for an OSD.
        for daemon in reversed(self._daemons):
            daemon.stop()


def _start(cluster: _Cluster) -> S3Server:
    directory = cluster.directory
    fsid = str(uuid.uuid4())
    mon_port, rgw_port = free_port(), free_port()
    ports = {"mon_port": mon_port, "rgw_port": rgw_port}
    cluster.conf.write_text(_CONF.format(fsid=fsid, dir=directory, memstore_bytes=MEMSTORE_BYTES, **ports))
    keyring = directory / "keyring"
    keyring.touch(mode=0o600)
    keyring.write_text(_keyring())
    for name in ("mon", "osd", "crash"):
        (directory / name).mkdir()

    monmap = str(directory / "monmap")
    mon_address = f"[v2:127.0.0.1:{mon_port}]"
    cluster.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", mon_address, monmap)
    cluster.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", str(keyring))
    mon = cluster.start("ceph-mon", "-i", "a")
    mon.wait_until(lambda: accepts(mon_port), DAEMON_TIMEOUT)

    osd_uuid = str(uuid.uuid4())
    cluster.run("ceph", "osd", "new", osd_uuid, "0")
    osd_caps = ["mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd"]
    osd_key = cluster.run("ceph", "auth", "get-or-create", "osd.0", *osd_caps)
    with keyring.open("a") as f:
        f.write(osd_key)
    cluster.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
    osd = cluster.start("ceph-osd", "-i", "0")

    def osd_is_up() -> bool:
        up: int = json.loads(cluster.run("ceph", "osd", "stat", "-f", "json"))["num_up_osds"]
        return up == 1

    osd.wait_until(osd_is_up, DAEMON_TIMEOUT)
    gateway = cluster.start("radosgw", "-n", "client.rgw")
    gateway.wait_until(lambda: accepts(rgw_port), DAEMON_TIMEOUT)
    created = cluster.run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test")
    key = json.loads(created)["keys"][0]
    return S3Server("rgw", f"http://127.0.0.1:{rgw_port}", key["access_key"], key["secret_key"])


@contextlib.contextmanager
def rgw() -> Iterator[S3Server]:
    missing = [p for p in PROGRAMS if shutil.which(p) is None]
    if missing:
        raise ServerUnavailable(f"Ceph RGW is not installed ({', '.join(missing)})")
    # Not pytest's tmp_path, which is too long: a unix socket's path has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="dcp-s3-rgw-", ignore_cleanup_errors=True) as directory:
        cluster = _Cluster(Path(directory))
        try:
            yield _start(cluster)
        finally:
            cluster.stop()
