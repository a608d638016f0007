"""What a server takes of whoever reaches it: typed, of a meeting place, and by proof where there is a token."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from hybrid_engine.errors import ConfigError, MessageError, ServerError, StateError
from hybrid_engine.serving import invitation as invitation_module
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.invitation import LOOPBACK, TOKEN, Invitation, Rendezvous, Update, require_address
from hybrid_engine.serving.receiver import WeightReceiver
from tests.harness.errors import has_code, has_violations
from tests.hybrid_engine.serving.test_sides import NoWeights


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rendezvous]:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Rendezvous(None)
    yield made
    made.close()


def invitation_to(meeting: Rendezvous, **values: Any) -> Invitation:
    given = {"place": meeting.place, "name": meeting.name, "first_rank": 2, "num_workers": 1, "size": 3, "settings": {}}
    return Invitation(**{**given, **values})


def test_both_sides_meet_in_a_file(place: Rendezvous) -> None:
    one, other = (invitation_to(place).signed().store() for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"


@pytest.mark.parametrize("name", ["hybrid_engine/x", "x\nssh-ed25519 AAAA somebody\n", "hybrid_engine/" + "0" * 33])
def test_a_name_that_nobody_draws_is_refused(place: Rendezvous, name: str) -> None:
    with pytest.raises(MessageError, check=has_code("invalid-job-name")):
        invitation_to(place, name=name).store()


def test_a_file_of_something_else_is_never_written_to(place: Rendezvous, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    own, like = tmp_path / "authorized_keys", tmp_path / "hybrid-engine-x" / "store"
    own.write_text("mine")
    like.parent.mkdir(mode=0o700)
    with pytest.raises(MessageError, check=has_code("not-a-rendezvous-file")):
        invitation_to(place, place=f"file:{own}").store()
    with pytest.raises(MessageError, check=has_code("unreadable-rendezvous-file")):  # nothing is made
        invitation_to(place, place=f"file:{like}").store()
    like.symlink_to(own)
    with pytest.raises(MessageError, check=has_code("not-a-rendezvous-file")):
        invitation_to(place, place=f"file:{like}").store()
    assert own.read_text() == "mine"


@pytest.mark.parametrize("above", [0, 1])
def test_a_directory_that_others_can_open_is_refused(place: Rendezvous, above: int) -> None:
    directory = Path(place.place.removeprefix("file:")).parents[above]
    directory.chmod(0o755)
    with pytest.raises(MessageError, check=has_code("directory-not-private")):
        invitation_to(place).store()


def taken_by_a_stranger(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, 12345, 12345)


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


TAKEN = {"file": Path.touch, "link": lambda path: path.symlink_to("/"), "open": open_to_others}
TAKEN |= {"stranger": taken_by_a_stranger} if os.geteuid() == 0 else {}


@pytest.mark.parametrize("kind", TAKEN)
def test_whoever_takes_the_name_of_the_directory_keeps_nobody_from_meeting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"hybrid-engine-{os.getuid()}"
    TAKEN[kind](usual)
    meeting = Rendezvous(None)
    invitation_to(meeting).store().set("key", "value")
    meeting.close()
    assert f"{usual} is not a directory that only this user can open" in caplog.text
    assert "set TMPDIR to a directory of this user" in caplog.text
    assert kind in ("file", "link") or list(usual.iterdir()) == []


def test_nobody_else_can_make_a_place_that_is_gone(place: Rendezvous) -> None:
    """A server's watch opens the store's file by its name for a minute after the trainers have removed it."""
    above = Path(place.place.removeprefix("file:")).parents[1]
    place.close()
    assert list(above.iterdir()) == []
    assert (above.stat().st_uid, above.stat().st_mode & 0o777) == (os.getuid(), 0o700)


def test_a_proof_is_of_the_whole_invitation(place: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    unsigned = invitation_to(place).signed()
    monkeypatch.setenv(TOKEN, "secret")
    signed = invitation_to(place).signed()
    signed.store()
    for other in (unsigned, replace(signed, first_rank=1), replace(signed, settings={"bucket_mb": 1})):
        with pytest.raises(MessageError, check=has_code("wrong-token", TOKEN)):
            other.store()
    for proof in ("é", "\u2028", signed.proof.upper()):
        with pytest.raises(MessageError, check=has_code("wrong-token", TOKEN)):
            replace(signed, proof=proof).store()
    monkeypatch.setenv(TOKEN, "another")
    with pytest.raises(MessageError, check=has_code("wrong-token", TOKEN)):
        signed.store()


def make_place(address: str | None, orphans: Any, told: Any) -> None:
    """Make a meeting place, and have a child that outlives this process."""
    os.environ[TOKEN] = "secret"
    place = Rendezvous(address)
    if os.fork() == 0:
        orphans.recv()
        os._exit(0)
    told.send(invitation_to(place))
    signal.pause()


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_trainers_live_until_their_process_ends_or_closes_the_place(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """Not as long as a child of theirs does, which has inherited the open files."""
    monkeypatch.setattr(invitation_module, "_SECONDS_FOR_AN_ANSWER", timedelta(seconds=2))
    (hears, tells), (waits, ends) = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
    trainers = multiprocessing.get_context("fork").Process(target=make_place, args=(address, waits, tells))
    trainers.start()
    try:
        invitation = hears.recv()
        assert [invitation.has_ended() for _ in range(2)] == [False, False]
        assert replace(invitation, name="hybrid_engine/" + "0" * 32).has_ended() is (address is not None)
        trainers.kill()
        trainers.join()
        assert invitation.has_ended()
    finally:
        trainers.kill()
        ends.send("end")


def test_a_place_that_was_closed_is_no_longer_lived_in(place: Rendezvous) -> None:
    invitation = invitation_to(place)
    place.close()
    assert invitation.has_ended()


def test_others_may_ask_at_the_same_time_whether_trainers_live(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    path.touch()
    asks = "import fcntl, sys; file = open(sys.argv[1]); fcntl.lockf(file, fcntl.LOCK_SH); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", asks, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert invitation_module._is_unlocked(path)
        other.communicate(b"\n")
        assert other.returncode == 0


def test_a_server_takes_the_invitation_of_others_once_its_trainers_have_ended(place: Rendezvous) -> None:
    """Before, only where these take it over; its own trainers may invite it whenever they like."""
    receiver = WeightReceiver(NoWeights(), NoWeights(), 0, torch.device("cpu"))
    with closing(Rendezvous(None)) as other, closing(Rendezvous(None)) as third:
        settings = {"timeout_seconds": 60, "release_weights": False}
        own, others, taking = (
            invitation_to(each, first_rank=0, size=1, settings=settings, job=job, takes_over=takes_over)
            for each, job, takes_over in ((place, "a", False), (other, "b", False), (third, "c", True))
        )
        receiver.join(replace(own, job="host/1/a"))
        with pytest.raises(StateError, check=has_code("server-is-taken", "host/1/a", "same process")):
            receiver.join(replace(others, job="host/1/b"))
        with pytest.raises(StateError, check=has_code("server-is-taken", "host/2/b")):
            receiver.join(replace(others, job="host/2/b"))
        receiver.leave()
        receiver._owner = None
        receiver.join(own)
        receiver.switch(Update(name=own.name, to="infer", version=3))
        with pytest.raises(StateError, check=has_code("server-is-taken", "job a", "job b")):
            receiver.join(others)
        receiver.switch(Update(name=own.name, to="infer", version=4))
        receiver.leave()
        with pytest.raises(StateError, check=has_code("server-is-taken", "job a")):  # though it is in no job
            receiver.join(others)
        receiver.join(taking)
        assert (receiver.job, receiver.version, receiver.obstacle()) == ("a", 4, "")
        place.close()
        with pytest.raises(StateError, check=has_code("server-is-taken", "job c")):
            receiver.join(others)
        third.close()
        receiver.join(others)
        receiver.switch(Update(name=others.name, to="infer", version=1, is_compared=True))
        assert "not compared" in receiver.obstacle()
        receiver.finish()
        assert (receiver.job, receiver.version, receiver.obstacle()) == ("b", 1, "")
        receiver.leave()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_across_hosts_both_sides_have_the_token(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, check=has_violations((TOKEN, "missing-token"))):
        Rendezvous(address)
    monkeypatch.setenv(TOKEN, "secret")
    place = Rendezvous(address)
    signed = invitation_to(place).signed()
    signed.store().set("key", "value")
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, check=has_violations((TOKEN, "missing-token"))):
        signed.store()


def test_across_hosts_each_rank_listens_where_it_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the address of its host's name, which is the loopback's on many hosts."""
    monkeypatch.setenv(TOKEN, "secret")
    place = Rendezvous("127.0.0.5")
    assert invitation_to(place).signed().world(0).address == "127.0.0.1"  # whence Linux speaks to its own loopback
    monkeypatch.delenv(TOKEN)


def test_on_one_host_the_invitation_says_where_ranks_listen(place: Rendezvous) -> None:
    assert invitation_to(place, address=LOOPBACK).world(0).address == LOOPBACK


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"more": 1}, "more"),
        ({"first_rank": "2"}, "first_rank"),
        ({"size": None}, "size"),
        ({"settings": []}, "settings"),
        ({"proof": "\ud800"}, "surrogates"),
        ({"place": "file:\ud800"}, "surrogates"),
        ({"settings": {"transport": "\ud800"}}, "surrogates"),
    ],
)
def test_what_is_told_is_typed(place: Rendezvous, values: dict[str, Any], problem: str) -> None:
    told = {"place": place.place, "name": place.name, "first_rank": 2, "num_workers": 1, "size": 3, "settings": {}}
    assert Invitation.read(told).size == 3
    with pytest.raises(MessageError, check=has_code("malformed-message", problem)):
        Invitation.read({**told, **values})


@pytest.mark.parametrize(
    "url", ["http://8.8.8.8:8000", "http://[2001:4860:4860::8888]:8000", "http://[::ffff:8.8.8.8]:1"]
)
def test_an_address_that_anybody_reaches_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, check=has_violations(("servers", "public-address"))):
        HttpServer(url, 1)
    HttpServer(url, 1, allow_public=True)
    HttpServer("http://10.0.0.1:8000", 1)


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("0.0.0.0", "unspecified-address"),
        ("::", "unspecified-address"),
        ("no.such.host.invalid", "unresolved-address"),
        ("8.8.8.8", "public-address"),
        ("::ffff:8.8.8.8", "public-address"),
    ],
)
def test_trainers_listen_where_strangers_do_not_come(monkeypatch: pytest.MonkeyPatch, address: str, code: str) -> None:
    with pytest.raises(ConfigError, check=has_violations((TOKEN, "missing-token"))):
        require_address("127.0.0.1", allow_public=False)
    monkeypatch.setenv(TOKEN, "secret")
    with pytest.raises(ConfigError, check=has_violations(("server_address", code))):
        require_address(address, allow_public=False)
    for private in ("127.0.0.1", "::1", "100.64.0.1"):
        require_address(private, allow_public=False)
    require_address("8.8.8.8", allow_public=True)


def test_ports_are_those_that_the_kernel_chooses_from(place: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest, highest = invitation_module._EPHEMERAL_PORTS.read_text().split()
    for ports in (None, f"{lowest}-{highest}", f"1-{highest}", f"{lowest}-65535"):
        invitation_module.require_ports(ports)
    refused = has_violations(("generate_config.server_ports", "port-range-of-kernel"))
    worker = WeightReceiver(None, None, 0, torch.device("cpu"))
    with pytest.raises(ConfigError, check=refused):
        worker.join(invitation_to(place, settings={"server_ports": f"1-{lowest}"}))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace, which needs root")
def test_gloo_and_the_store_listen_at_ports_of_the_kernels_range() -> None:
    setting = 'ip link set lo up && echo "29600 29700" > /proc/sys/net/ipv4/ip_local_port_range'
    command = ["unshare", "--net", "sh", "-c", f'{setting} && exec "$0" -c "$1"', sys.executable, LISTENS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    ports = [int(port) for port in ended.stdout.split()]
    assert len(ports) == 3
    assert all(29600 <= port <= 29700 for port in ports), ports


LISTENS = """
from pathlib import Path
import torch.distributed as dist
from hybrid_engine.ranks.world import store_at
from hybrid_engine.serving.invitation import require_ports
require_ports("29600-29700")
store = store_at("127.0.0.1")
devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1") for _ in range(2)]
for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
    words = line.split()
    if words[3] == "0A":
        print(int(words[1].partition(":")[2], 16))
"""


def test_a_call_without_end_notices_a_host_that_is_gone() -> None:
    """Which only the kernel can: it asks, on a connection that is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(HttpServer(f"http://127.0.0.1:{port}", 10).complete, {})
            connection, (_, its_port) = silent.accept()
            with connection:
                connection.recv(1)  # it has asked, and waits
                ((kind, seconds),) = timers_of(its_port)
                assert kind == "02"
                assert seconds <= 60
            with pytest.raises(ServerError):
                call.result()


def timers_of(port: int) -> list[tuple[str, float]]:
    """Of this host's IPv4 connections from a port, as /proc/net/tcp has them: which timer (02: of keep-alive), and
    the seconds until it ends."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    timers = [line[5].split(":") for line in lines if line[1].endswith(f":{port:04X}")]
    return [(kind, int(ticks, 16) / os.sysconf("SC_CLK_TCK")) for kind, ticks in timers]


class Elsewhere(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(307)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is written."""


class Impatient(Elsewhere):
    """Closes a connection that is kept, as it receives the next request."""

    protocol_version, num_requests = "HTTP/1.1", 0
    num_connections = 0

    def setup(self) -> None:
        super().setup()
        type(self).num_connections += 1

    def do_POST(self) -> None:
        self.num_requests += 1
        self.close_connection = self.num_requests > 1
        if self.num_requests == 1:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()


class Older(Elsewhere):
    """Has no such route."""

    def do_POST(self) -> None:
        self.send_error(404)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[HttpServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield HttpServer(f"http://127.0.0.1:{server.server_port}", 5)
        server.shutdown()


def test_a_redirect_takes_nothing_elsewhere() -> None:
    with answering(Elsewhere) as server, pytest.raises(ServerError, check=has_code("request-failed", "307")):
        server.start_weight_update()


def test_a_version_is_not_said_to_a_server_that_has_no_route_for_it() -> None:
    with answering(Older) as server:
        server.update_weight_version("none")
        with pytest.raises(ServerError, check=has_code("no-route")):
            server.start_weight_update()


def test_no_call_goes_over_a_connection_that_a_server_may_close() -> None:
    before = Impatient.num_connections
    with answering(Impatient) as server:
        for _ in range(2):
            server.start_weight_update()
    assert Impatient.num_connections == before + 2
