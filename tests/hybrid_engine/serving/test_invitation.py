"""Checks that a server makes of an invitation from any client: types, rendezvous file and proof."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from hybrid_engine.errors import ConfigError, MessageError, ServerError, StateError
from hybrid_engine.serving import clients
from hybrid_engine.serving import invitation as invitation_module
from hybrid_engine.serving.clients import API_KEY, HttpServer, named_server, silent_servers
from hybrid_engine.serving.invitation import (
    LOOPBACK,
    TOKEN,
    Invitation,
    Rendezvous,
    Update,
    require_address,
)
from hybrid_engine.serving.receiver import WeightReceiver
from tests.harness.errors import has_violations, refused, violated
from tests.harness.values import Values
from tests.hybrid_engine.serving.test_sides import NoWeights


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rendezvous]:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rendezvous = Rendezvous(None)
    yield rendezvous
    rendezvous.close()


def invitation_to(meeting: Rendezvous, **values: Any) -> Invitation:
    return Invitation(**{**fields_of(meeting), **values})


def fields_of(meeting: Rendezvous) -> Values:
    ranks = {"first_rank": 2, "num_workers": 1, "size": 3}
    return {"place": meeting.place, "name": meeting.name, **ranks, "settings": {}}


def test_both_sides_share_a_store_file(place: Rendezvous) -> None:
    first, second = (invitation_to(place).signed().store() for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"


@pytest.mark.parametrize(
    "name", ["hybrid_engine/x", "x\nssh-ed25519 AAAA somebody\n", "hybrid_engine/" + "0" * 33]
)
def test_a_name_of_another_form_is_refused(place: Rendezvous, name: str) -> None:
    with refused(MessageError, "invalid-job-name"):
        invitation_to(place, name=name).store()


def test_an_unrelated_file_is_never_written_to(place: Rendezvous, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    other_file = tmp_path / "authorized_keys"
    store = tmp_path / "hybrid-engine-x" / "store"
    other_file.write_text("mine")
    store.parent.mkdir(mode=0o700)
    with refused(MessageError, "not-a-rendezvous-file"):
        invitation_to(place, place=f"file:{other_file}").store()
    with refused(MessageError, "unreadable-rendezvous-file"):  # is not created
        invitation_to(place, place=f"file:{store}").store()
    store.symlink_to(other_file)
    with refused(MessageError, "not-a-rendezvous-file"):
        invitation_to(place, place=f"file:{store}").store()
    assert other_file.read_text() == "mine"


@pytest.mark.parametrize("level", [0, 1])
def test_a_directory_open_to_other_users_is_refused(place: Rendezvous, level: int) -> None:
    directory = Path(place.place.removeprefix("file:")).parents[level]
    directory.chmod(0o755)
    with refused(MessageError, "directory-not-private"):
        invitation_to(place).store()


def make_for_other_user(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, 12345, 12345)  # any other user


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)  # mkdir applies the umask


OCCUPATIONS = {"file": Path.touch, "link": lambda path: path.symlink_to("/"), "open": make_open}
OCCUPATIONS |= {"stranger": make_for_other_user} if os.geteuid() == 0 else {}


@pytest.mark.parametrize("kind", OCCUPATIONS)
def test_an_occupied_directory_name_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"hybrid-engine-{os.getuid()}"
    OCCUPATIONS[kind](usual)
    meeting = Rendezvous(None)
    invitation_to(meeting).store().set("key", "value")
    meeting.close()
    assert f"{usual} is not a directory that only this user can open" in caplog.text
    assert "set TMPDIR to a directory of this user" in caplog.text
    assert kind in ("file", "link") or list(usual.iterdir()) == []


def test_a_removed_store_cannot_be_recreated_by_other_users(place: Rendezvous) -> None:
    """A server's watch opens the store by name for a minute after trainers have removed it."""
    parent = Path(place.place.removeprefix("file:")).parents[1]
    place.close()
    assert list(parent.iterdir()) == []
    assert (parent.stat().st_uid, parent.stat().st_mode & 0o777) == (os.getuid(), 0o700)


def test_a_proof_covers_the_whole_invitation(
    place: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = invitation_to(place).signed()
    monkeypatch.setenv(TOKEN, "secret")
    signed = invitation_to(place).signed()
    signed.store()
    for other in (
        unsigned,
        replace(signed, first_rank=1),
        replace(signed, settings={"bucket_mb": 1}),
    ):
        with refused(MessageError, "wrong-token", TOKEN):
            other.store()
    for proof in ("é", "\u2028", signed.proof.upper()):
        with refused(MessageError, "wrong-token", TOKEN):
            replace(signed, proof=proof).store()
    monkeypatch.setenv(TOKEN, "another")
    with refused(MessageError, "wrong-token", TOKEN):
        signed.store()


def make_place(address: str | None, orphan_end: Any, invitations: Any) -> None:
    """Create a rendezvous, and fork a child that outlives this process."""
    os.environ[TOKEN] = "secret"
    place = Rendezvous(address)
    if os.fork() == 0:
        orphan_end.recv()
        os._exit(0)
    invitations.send(invitation_to(place))
    signal.pause()  # until killed


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_trainers_end_with_their_process(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """A child that inherits the open files does not keep them alive."""
    monkeypatch.setattr(invitation_module, "_ANSWER_TIMEOUT", timedelta(seconds=2))
    invitations, invitations_end = multiprocessing.Pipe(duplex=False)
    orphan_end, orphans = multiprocessing.Pipe(duplex=False)
    trainers = multiprocessing.get_context("fork").Process(
        target=make_place, args=(address, orphan_end, invitations_end)
    )
    trainers.start()
    try:
        invitation = invitations.recv()
        assert [invitation.has_ended() for _ in range(2)] == [False, False]
        assert replace(invitation, name="hybrid_engine/" + "0" * 32).has_ended() is (
            address is not None
        )
        trainers.kill()
        trainers.join()
        assert invitation.has_ended()
    finally:
        trainers.kill()
        orphans.send("end")


def test_an_invitation_sets_its_address_and_ends_with_the_rendezvous(place: Rendezvous) -> None:
    invitation = invitation_to(place, address=LOOPBACK)
    assert invitation.world(0).address == LOOPBACK
    place.close()
    assert invitation.has_ended()


def test_the_lock_can_be_checked_by_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    path.touch()
    program = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.lockf(file, "
        "fcntl.LOCK_SH); print(flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert invitation_module._is_unlocked(path)
        other.communicate(b"\n")
        assert other.returncode == 0


def test_a_server_accepts_another_job_after_its_trainers_have_ended(place: Rendezvous) -> None:
    """Earlier, another job must take the server over; its current trainers may always invite it."""
    receiver = WeightReceiver(NoWeights(), NoWeights(), 0, torch.device("cpu"))
    with closing(Rendezvous(None)) as other, closing(Rendezvous(None)) as third:
        settings = {"timeout_seconds": 60, "release_weights": False}
        ranks = {"first_rank": 0, "size": 1, "settings": settings}
        invitation = invitation_to(place, job="a", **ranks)
        other_job = invitation_to(other, job="b", **ranks)
        take_over = invitation_to(third, job="c", takes_over=True, **ranks)
        receiver.join(replace(invitation, job="host/1/a"))
        with refused(StateError, "server-is-taken", "host/1/a", "same process"):
            receiver.join(replace(other_job, job="host/1/b"))
        with refused(StateError, "server-is-taken", "host/2/b"):
            receiver.join(replace(other_job, job="host/2/b"))
        receiver.leave()
        receiver._owner = None
        receiver.join(invitation)
        receiver.switch(Update(name=invitation.name, to="infer", version=3))
        with refused(StateError, "server-is-taken", "job a", "job b"):
            receiver.join(other_job)
        receiver.switch(Update(name=invitation.name, to="infer", version=4))
        receiver.leave()
        with refused(StateError, "server-is-taken", "job a"):  # even while it is in no job
            receiver.join(other_job)
        receiver.join(take_over)
        assert (receiver.job, receiver.version, receiver.obstacle()) == ("a", 4, "")
        place.close()
        with refused(StateError, "server-is-taken", "job c"):
            receiver.join(other_job)
        third.close()
        receiver.join(other_job)
        receiver.switch(Update(name=other_job.name, to="infer", version=1, is_compared=True))
        assert "not compared" in receiver.obstacle()
        receiver.finish()
        assert (receiver.job, receiver.version, receiver.obstacle()) == ("b", 1, "")
        receiver.leave()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_both_sides_need_the_token_across_hosts(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with violated(ConfigError, (TOKEN, "missing-token")):
        Rendezvous(address)
    monkeypatch.setenv(TOKEN, "secret")
    place = Rendezvous(address)
    signed = invitation_to(place).signed()
    signed.store().set("key", "value")
    monkeypatch.delenv(TOKEN)
    with violated(ConfigError, (TOKEN, "missing-token")):
        signed.store()


def test_ranks_listen_at_the_address_that_reaches_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many hosts resolve their own name to the loopback address."""
    monkeypatch.setenv(TOKEN, "secret")
    place = Rendezvous("127.0.0.5")
    # Linux connects to any loopback address from 127.0.0.1.
    assert invitation_to(place).signed().world(0).address == "127.0.0.1"
    monkeypatch.delenv(TOKEN)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"more": 1}, "more"),
        ({"first_rank": "2"}, "first_rank"),
        ({"size": None}, "size"),
        ({"first_rank": -1}, "ranks -1 to 0"),
        ({"size": 10**9}, "of a job of 1000000000"),
        ({"settings": []}, "settings"),
        ({"proof": "\ud800"}, "surrogates"),
        ({"place": "file:\ud800"}, "surrogates"),
        ({"settings": {"transport": "\ud800"}}, "surrogates"),
    ],
)
def test_a_malformed_field_is_refused(place: Rendezvous, values: Values, problem: str) -> None:
    fields = fields_of(place)
    assert Invitation.read(fields).size == 3
    with refused(MessageError, "malformed-message", problem):
        Invitation.read({**fields, **values})


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"timeout_seconds": -1}},
        {"place": "file:\0"},
        {"place": "tcp:"},
        {"place": "tcp:127.0.0.1:99999999"},
        {"place": "tcp:127.0.0.1:1", "settings": {"timeout_seconds": 1}},  # nobody listens there
    ],
)
def test_invalid_settings_and_places_are_malformed_messages(
    place: Rendezvous, monkeypatch: pytest.MonkeyPatch, values: Values
) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    invitation = Invitation.read({**fields_of(place), **values}).signed()
    with refused(MessageError, "malformed-message"):
        invitation.store()
        invitation.config()


@pytest.mark.parametrize(
    "url",
    ["http://8.8.8.8:8000", "http://[2001:4860:4860::8888]:8000", "http://[::ffff:8.8.8.8]:1"],
)
def test_a_public_server_address_is_refused(url: str) -> None:
    with violated(ConfigError, ("servers", "public-address")):
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
def test_trainers_listen_at_a_private_address(
    monkeypatch: pytest.MonkeyPatch, address: str, code: str
) -> None:
    with violated(ConfigError, (TOKEN, "missing-token")):
        require_address("127.0.0.1", allow_public=False)
    monkeypatch.setenv(TOKEN, "secret")
    with violated(ConfigError, ("server_address", code)):
        require_address(address, allow_public=False)
    for private in ("127.0.0.1", "::1", "100.64.0.1"):
        require_address(private, allow_public=False)
    require_address("8.8.8.8", allow_public=True)


def test_ports_must_contain_the_kernels_range(
    place: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest, highest = invitation_module._EPHEMERAL_PORTS.read_text().split()
    for ports in (None, f"{lowest}-{highest}", f"1-{highest}", f"{lowest}-65535"):
        invitation_module.require_ports(ports)
    refused = has_violations(("generate_config.server_ports", "port-range-of-kernel"))
    worker = WeightReceiver(None, None, 0, torch.device("cpu"))
    with pytest.raises(ConfigError, check=refused):
        worker.join(invitation_to(place, settings={"server_ports": f"1-{lowest}"}))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace, which needs root")
def test_gloo_and_the_store_listen_in_the_kernels_port_range() -> None:
    setting = 'ip link set lo up && echo "29600 29700" > /proc/sys/net/ipv4/ip_local_port_range'
    command = [
        "unshare",
        "--net",
        "sh",
        "-c",
        f'{setting} && exec "$0" -c "$1"',
        sys.executable,
        PRINT_PORTS,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    ports = [int(port) for port in ended.stdout.split()]
    assert len(ports) == 3
    assert all(29600 <= port <= 29700 for port in ports), ports


PRINT_PORTS = """
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


def test_a_call_without_timeout_notices_a_lost_host() -> None:
    """The kernel probes a silent connection (TCP keep-alive)."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(HttpServer(f"http://127.0.0.1:{port}", 10).complete, {})
            connection, (_, its_port) = silent.accept()
            with connection:
                connection.recv(1)  # the call waits for its response
                ((kind, seconds),) = timers_of(its_port)
                assert kind == "02"
                assert seconds <= 60
            with pytest.raises(ServerError):
                call.result()


def timers_of(port: int) -> list[tuple[str, float]]:
    """Return the timers of this host's IPv4 connections from a port, from /proc/net/tcp.

    A timer is its kind (02: keep-alive) and the seconds until it expires.
    """
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    timers = [line[5].split(":") for line in lines if line[1].endswith(f":{port:04X}")]
    return [(kind, int(ticks, 16) / os.sysconf("SC_CLK_TCK")) for kind, ticks in timers]


@contextmanager
def answering(respond: Callable[[Any], object], **settings: str) -> Iterator[str]:
    """Serve HTTP in the block, and yield the address: `respond` answers a request by its handler.

    `settings`: attributes of the handlers.
    """
    answers = dict.fromkeys(("do_GET", "do_POST"), lambda handler: respond(handler))
    handler = type(
        "Handler",
        (BaseHTTPRequestHandler,),
        {**answers, "log_message": lambda *_: None, **settings},
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True  # a handler that sleeps must not delay the end
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def begin(handler: Any, status: int = 200, **headers: str) -> None:
    """Send the head of a response."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def drip(handler: Any) -> None:
    """Send a byte of a head every tenth of a second."""
    with suppress(OSError):  # the client leaves
        for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.1)


def drip_body(handler: Any) -> None:
    begin(handler)
    drip(handler)


def send_long(handler: Any) -> None:
    """Send a body of 1,000 bytes, and the encoding that the request accepts."""
    begin(handler)
    accepted = handler.headers["Accept-Encoding"]
    handler.wfile.write(f'{{"accepted": "{accepted}"}}'.ljust(1000).encode())


def echo_key(handler: Any) -> None:
    begin(handler, 500)
    handler.wfile.write(handler.headers["Authorization"].encode())


@pytest.mark.parametrize("respond", [drip, drip_body])
def test_a_time_limit_is_one_of_the_whole_response(respond: Callable[[Any], None]) -> None:
    started = time.monotonic()
    with answering(respond) as url:
        with refused(ServerError, "request-failed", "no whole response within 1.0 s"):
            HttpServer(url, 1.0).num_workers()
        assert [violation.code for violation in silent_servers([url], 1.0)] == ["silent-server"]
    assert time.monotonic() - started < 15


def test_a_response_is_plain_and_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(send_long) as url:
        assert HttpServer(url, 5).complete({}) == {"accepted": "identity"}
        monkeypatch.setattr(clients, "MAX_NBYTES", 999)
        with refused(ServerError, "request-failed", "more than 999 bytes"):
            HttpServer(url, 5).complete({})


def test_an_error_has_the_cause_alone() -> None:
    with pytest.raises(ServerError) as caught:
        HttpServer("http://127.0.0.1:1", 5).resume()
    assert str(caught.value).startswith(
        "http://127.0.0.1:1/resume: Connection refused: start the server"
    )


@pytest.mark.parametrize(
    ("address", "key", "code"),
    [
        ("http://user:SECRET@127.0.0.1:1", "", "unresolved-address"),
        ("user:SECRET@host", "", "unresolved-address"),
        ("http://user:SECRET@[::1", "", "unresolved-address"),
        ("http://127.0.0.1:1", "SECRET\n", "invalid-api-key"),
        ("http://127.0.0.1:1", "SECRETé", "invalid-api-key"),
    ],
)
def test_an_error_has_no_secret(
    monkeypatch: pytest.MonkeyPatch, address: str, key: str, code: str
) -> None:
    monkeypatch.setenv(API_KEY, key)
    with pytest.raises(ConfigError, match=r"(?s)^(?!.*SECRET)") as caught:
        HttpServer(address, 5, allow_public=True).resume()
    assert [finding.code for finding in caught.value.findings] == [code]


def test_headers_that_a_proxy_sends_back_hide_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "SECRET")
    with (
        answering(echo_key) as url,
        pytest.raises(ServerError, match=r"(?s)^(?!.*SECRET).*500: Bearer …"),
    ):
        HttpServer(url, 5).complete({})


def test_the_name_of_an_actor_starts_no_cluster() -> None:
    ray = mock.MagicMock(spec=["is_initialized", "init", "get_actor"])
    ray.is_initialized.return_value = False
    ray.init.side_effect = ConnectionError("could not find any running Ray instance")
    with mock.patch.dict(sys.modules, {"ray": ray}):
        with violated(ConfigError, ("servers", "unknown-actor")):
            named_server("ray:x", 5)
        assert ray.init.call_args == mock.call(address="auto")
        assert not ray.get_actor.called


def test_a_redirect_is_not_followed() -> None:
    elsewhere = {"Location": "http://127.0.0.1:1/elsewhere"}
    with (
        answering(lambda handler: begin(handler, 307, **elsewhere)) as url,
        refused(ServerError, "request-failed", "307"),
    ):
        HttpServer(url, 5).start_weight_update()


def test_a_missing_version_route_is_tolerated() -> None:
    """An older server lacks the route."""
    with answering(lambda handler: handler.send_error(404)) as url:
        HttpServer(url, 5).update_weight_version("none")
        with refused(ServerError, "no-route"):
            HttpServer(url, 5).start_weight_update()


def test_calls_do_not_reuse_connections() -> None:
    num_requests = Counter[Any]()

    def close_kept(handler: Any) -> None:
        """Close a kept connection when it receives the next request."""
        num_requests[handler.client_address] += 1
        handler.close_connection = num_requests[handler.client_address] > 1
        if not handler.close_connection:
            begin(handler, **{"Content-Length": "0"})

    with answering(close_kept, protocol_version="HTTP/1.1") as url:
        server = HttpServer(url, 5)
        for _ in range(2):
            server.start_weight_update()
    assert len(num_requests) == 2
