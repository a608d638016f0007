"""Clients with which a publisher calls vLLM servers, over HTTP or as Ray actors.

HTTP requests carry the key in VLLM_API_KEY, and an HMAC of the request with the token of the job,
if this process has them.

Calls for weight transfer have the names of vLLM's `VLLMWeightSyncClient`, and the other calls the
names of its HTTP routes. To reach servers in another way, write a class with the methods of
`VllmServer`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from hybrid_engine.errors import (
    ConfigError,
    HybridEngineError,
    ServerError,
    Violation,
    Violations,
    clipped,
    needing_package,
    shortened,
)
from hybrid_engine.files.durable import system_error_behind
from hybrid_engine.ranks.background import in_background
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.invitation import (
    PROOF_HEADER,
    TOKEN,
    ServerMessage,
    proof_of_request,
    public_addresses,
    resolved_addresses,
)

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of requests in flight.

They end with the tokens so far, finish first, or continue after the pause.
"""


API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of servers.

Servers were started with --api-key or with this variable.
"""

MAX_NBYTES = 2**32
"""Limit of a response's body; a completion takes about 150 bytes a token."""

CORE_CALLS = ("describe", "probe")
"""Calls that the gate in a server's engine core answers (backends/vllm/server/gate.py)."""

_T = TypeVar("_T")


@runtime_checkable
class VllmServer(Protocol):
    """Interface of a server.

    Every call raises ServerError if the server refuses or cannot be reached.
    """

    def num_workers(self) -> int:
        """Return the number of workers over all replicas."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weight_version(self, new_version: str) -> None: ...

    def pause(self, mode: PauseMode, clear_cache: bool) -> None: ...

    def resume(self) -> None: ...


def server_of(server: object, timeout_seconds: float, *, allow_public: bool) -> VllmServer:
    """Return the client of a server.

    Args:
        server: a name (see `named_server`); the handle of a Ray actor with the methods of a
            `VllmServer`, for example `backends.vllm.server.async_server.VllmActor`; or a
            `VllmServer`, which is returned.
        timeout_seconds: timeout of a response. Calls that wait for a switch have no timeout,
            because the switch has its own.
        allow_public: accept addresses outside this host and its private networks.

    Raises ConfigError for anything else.
    """
    if isinstance(server, str):
        return named_server(server, timeout_seconds, allow_public=allow_public)
    if hasattr(server, "_ray_actor_id"):
        return RayServer(server, timeout_seconds)
    if isinstance(server, VllmServer):
        return server
    raise ConfigError.of(
        "servers",
        f"got {shortened(server)}",
        "Give http://HOST:PORT, ray:NAME, a Ray actor, or a serving.clients.VllmServer",
        code="invalid-server",
    )


def require_servers(servers: Sequence[object], address: str | None, hosts: Sequence[str]) -> None:
    """Raise ConfigError for no or duplicate servers, or several `hosts` without an address."""
    if not servers:
        raise ConfigError.of("servers", "none", "Name at least one", code="no-server")
    if len({str(server).rstrip("/") for server in servers}) < len(servers):
        # A server that is invited twice would wait for itself to join.
        raise ConfigError.of(
            "servers",
            f"duplicate server: {shortened(servers)}",
            "Name each server once",
            code="duplicate-server",
        )
    if address is None and len(set(hosts)) > 1:
        raise ConfigError.of(
            "address",
            "trainers are on several hosts, but there is no address at which servers can reach "
            "them",
            "Give the address of a network interface of the first trainer",
            code="missing-address",
        )


def named_server(name: str, timeout_seconds: float, *, allow_public: bool = False) -> Server:
    """Return the client of the server at `http://HOST:PORT`, or of the Ray actor `ray:NAME`.

    Raises ConfigError for other names and unknown actors, DependencyError if Ray is not installed.
    """
    kind, _, actor = name.partition(":")
    if kind != "ray":
        return HttpServer(name, timeout_seconds, allow_public=allow_public)
    with needing_package(f"servers: {name} needs Ray: pip install '.[ray]'"):
        import ray
    try:
        if not ray.is_initialized():
            ray.init(address="auto")  # without an address Ray would start a cluster
        return RayServer(ray.get_actor(actor), timeout_seconds)
    except (ConnectionError, ValueError) as error:
        raise ConfigError.of(
            "servers",
            f"{name}: {clipped(str(error))}",
            "Start the cluster and the actor first, with options(name=...), in the namespace of "
            "this process",
            code="unknown-actor",
        ) from None


def silent_servers(
    servers: Sequence[object],
    timeout_seconds: float,
    *,
    allow_public: bool = False,
) -> Violations:
    """Yield a violation for every server, as of `server_of`, that does not respond to a request."""
    for server in servers:
        try:
            server_of(server, timeout_seconds, allow_public=allow_public).num_workers()
        except ServerError as error:
            yield Violation(
                "generate_config.servers",
                clipped(str(error), 500),
                "Start it before the trainers",
                code="silent-server",
            )
        except ConfigError as error:
            yield from error.findings


class Server(ABC):
    """Base class of clients: implements each method of a `VllmServer` by one `_call`."""

    @abstractmethod
    def num_workers(self) -> int:
        """Return the number of workers over all replicas."""

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call vLLM's /v1/completions with this body and no timeout, and return the response."""
        answer: Mapping[str, Any] = self._call("complete", has_timeout=False, body=body)
        return answer

    def describe(self) -> str:
        """Return the server's `comparison.ServerDescription` as JSON."""
        return str(self._call("describe"))

    def probe(self, tokens: list[list[int]]) -> str:
        """Return the `comparison.ServerAnswer` to `tokens` [B, L] as JSON.

        The server must be paused.
        """
        return str(self._call("probe", tokens=tokens))

    @abstractmethod
    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        """Make the call `name` with these arguments. Raises ServerError."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", has_timeout=False, init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", has_timeout=False, update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version=weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._call("update_weight_version", new_version=new_version)

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        # With mode "wait" the response comes only after the requests in flight, which may take any
        # time.
        self._call("pause", has_timeout=mode != "wait", mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self._call("resume")


class _NoRouteError(ServerError):
    """The server can be reached, but has no such route."""


class HttpServer(Server):
    """Client of `vllm serve`.

    Without VLLM_SERVER_DEV_MODE=1 in its environment, vLLM has no routes for weights.

    Args:
        url: http://HOST:PORT.
        timeout_seconds: timeout of a response, except for calls that wait for a switch.
        allow_public: accept addresses outside this host and its private networks. vLLM's routes for
            weights have no authentication.

    Raises ConfigError for an invalid URL or key, and for a public address without `allow_public`.
    """

    def __init__(self, url: str, timeout_seconds: float, *, allow_public: bool = False) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout_seconds
        public = _public_addresses(self.url, allow_public=allow_public)
        if public:
            raise ConfigError.of(
                "servers",
                f"{url} is at {', '.join(public)}, and vLLM's routes "
                "for weights have no authentication",
                "Bind the server to the loopback or a private address, "
                "or set allow_public behind a firewall",
                code="public-address",
            )

    def num_workers(self) -> int:
        response = self.get("get_world_size")
        return _read(_WorldSize, response, f"{self.url}/get_world_size").world_size

    def get(self, route: str) -> Any:
        """Return the response of any route of the server to GET, as JSON has it."""
        return self._request("GET", route, self._timeout)

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the response of any route of the server to POST, without a timeout."""
        return self._request("POST", route, None, json=body)

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.post("v1/completions", body)
        return answer

    def update_weight_version(self, new_version: str) -> None:
        """Set the reported version.

        Does nothing on vLLM 0.26, which has no such route and reports no version.
        """
        with contextlib.suppress(_NoRouteError):
            super().update_weight_version(new_version)

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        if name in CORE_CALLS:
            method = f"hybrid_engine_{name}"
            answer = self._call("collective_rpc", method=method, args=[*fields.values()])
            (text,) = _read(_Results, answer, f"{self.url}/collective_rpc, {method}").results
            return text
        seconds = self._timeout if has_timeout else None
        if name == "pause":
            query = {key: str(value).lower() for key, value in fields.items()}
            return self._request("POST", name, seconds, params=query)
        # An object even if it is empty: vLLM 0.24 reads one in every call.
        return self._request("POST", name, seconds, json=fields)

    def _request(self, method: str, route: str, seconds: float | None, **options: Any) -> Any:
        """Return a response as JSON has it. Raises ServerError.

        `seconds`: time for the whole response; None: no limit.
        """
        import requests
        from urllib3.exceptions import HTTPError

        where = f"{self.url}/{route}"
        # A redirect would send the body, the API key and the proof to another host.
        # Seconds to connect, and for each piece of the response.
        options |= {"allow_redirects": False, "timeout": (self._timeout, seconds), "stream": True}
        # A compressed body may be a thousand times as long as what was sent.
        options["headers"] = {"Accept-Encoding": "identity"}

        def exchange() -> Any:
            # A new session per call: sessions are not thread-safe, and a server closes connections
            # that were idle for 5 s, possibly while the next request is in flight.
            with requests.Session() as session:
                session.trust_env = False  # requests must not pass through a proxy
                session.auth = _authenticated
                adapter = _keep_alive_adapter()()
                for prefix in ("http://", "https://"):
                    session.mount(prefix, adapter)
                response = session.request(method, where, **options)
                # One byte more tells a response at the limit from a longer one.
                content = response.raw.read(MAX_NBYTES + 1)
                if len(content) > MAX_NBYTES:
                    raise ValueError(f"a response of more than {MAX_NBYTES:,} bytes")
                if response.status_code == requests.codes.not_found:
                    raise _NoRouteError(
                        f"{where}: no such route: start the server with VLLM_SERVER_DEV_MODE=1",
                        code="no-route",
                    )
                if response.status_code // 100 != 2:  # includes redirects
                    # A proxy may send the request's headers back.
                    # Without a key only NUL bytes are replaced.
                    key = os.environ.get(API_KEY) or "\0"
                    text = clipped(content.decode(errors="replace").replace(key, "…"), 2000)
                    raise ServerError(
                        f"{where}: {response.status_code}: {text}", code="request-failed"
                    )
                return json.loads(content) if content else None

        try:
            # In a thread, because the timeout of a socket is that of each piece that arrives.
            return in_background(exchange, "request").result(seconds)
        # JSON raises the last two.
        except (NotDone, requests.RequestException, HTTPError, ValueError, RecursionError) as error:
            # Not requests' own text, which is long, and may have headers.
            cause = system_error_behind(error)
            problem = clipped(str(cause.strerror if cause else error))
            problem = problem or f"no whole response within {seconds} s"
            if isinstance(cause, ConnectionRefusedError):
                problem += ": start the server, and wait until GET /health answers"
            raise ServerError(f"{where}: {problem}", code="request-failed") from None


class _WorldSize(msgspec.Struct, frozen=True):
    world_size: Annotated[int, msgspec.Meta(ge=1)]


class _Results(msgspec.Struct, frozen=True):
    results: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]


def _read(kind: type[_T], answer: object, where: str) -> _T:
    """Convert a response to type `kind`. Raises ServerError if it does not match."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ServerError(f"{where}: {error}", code="unexpected-response") from None


def _authenticated(request: Any) -> Any:
    """Add the API key and the token's proof to a prepared request, if this process has them.

    Raises ConfigError, without the key, for one that cannot be sent.
    """
    key = os.environ.get(API_KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError.of(
            API_KEY,
            "has a line break, or another character that HTTP headers cannot have",
            "Write the secret without it",
            code="invalid-api-key",
        )
    if key:
        request.headers["Authorization"] = f"Bearer {key}"
    if TOKEN in os.environ:
        body = request.body or b""
        if isinstance(body, str):
            body = body.encode()
        request.headers[PROOF_HEADER] = proof_of_request(request.method, request.path_url, body)
    return request


@functools.cache
def _keep_alive_adapter() -> type[Any]:
    """Return an adapter class whose connections detect a lost host after two minutes.

    Some responses have no timeout. The class is created by the first call, so that requests is
    imported lazily.
    """
    from requests.adapters import HTTPAdapter

    class KeepAliveAdapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **settings: Any) -> None:
            super().init_poolmanager(*args, socket_options=_SOCKET_OPTIONS, **settings)

    return KeepAliveAdapter


# A lost host is noticed after 60 + 4 * 15 = 120 s of silence.
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # urllib3's default, which these options replace
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    # Milliseconds without acknowledgement of sent data.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)


class RayServer(Server):
    """Client of a Ray actor with the methods of a `Server`, for example a `VllmActor`.

    Not tested on several nodes. If Ray restarts the actor (`max_restarts`), the handle stays valid.
    """

    def __init__(self, actor: Any, timeout_seconds: float) -> None:
        self._actor = actor
        self._timeout = timeout_seconds

    def num_workers(self) -> int:
        return int(self._call("num_workers"))

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        import ray

        try:
            method = getattr(self._actor, name)
            return ray.get(method.remote(**fields), timeout=self._timeout if has_timeout else None)
        except Exception as error:
            raise ServerError(
                f"actor.{name}: {type(error).__name__}: {clipped(str(error), 2000)}",
                code="request-failed",
            ) from error


def call_while_switching(
    call: Callable[[dict[str, Any]], None],
    message: ServerMessage,
    world: World,
) -> Future[None]:
    """Call a server in the background, while all ranks take part in the requested operation.

    If it fails, the ranks that wait in the next meeting of `world` learn why.

    Args:
        call: method of the server.
        message: its argument.
    """
    meeting = world.meeting

    def notify(future: Future[None]) -> None:
        if error := future.exception():
            world.refuse(str(error), meeting)

    future = in_background(lambda: call(message.as_json()), "call of a server")
    future.add_done_callback(notify)
    return future


def failures_of(calls: Iterable[Future[None]]) -> str:
    """Return the text of each call that has failed so far, on a new line."""
    errors = [call.exception() for call in calls if call.done()]
    return "".join(f"\n{error}" for error in errors if error)


def _public_addresses(url: str, *, allow_public: bool) -> list[str]:
    """Return the public addresses of a URL's host, none if they are allowed.

    Raises ConfigError for an invalid URL, without a password in it.
    """
    _, has_user, shown = url.rpartition("@")
    try:
        if has_user:
            raise ValueError("it has a user before @; the key of servers is in " + API_KEY)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected http://HOST:PORT")
        _ = parts.port  # raises ValueError for an invalid port
        return [] if allow_public else public_addresses(resolved_addresses(parts.hostname))
    except (ValueError, OSError) as error:
        raise ConfigError.of(
            "servers",
            f"{shortened(shown)}: {error}",
            "Give the address at which the server listens",
            code="unresolved-address",
        ) from None


def with_server_error(phase: str, call: Callable[[], _T]) -> _T:
    """Run `call`, and convert errors of other packages to ServerError."""
    try:
        return call()
    except HybridEngineError:
        raise
    except BaseException as error:
        raise ServerError(
            f"{phase}: {type(error).__name__}: {error}", code="server-call-failed"
        ) from error


def weak_call(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method while its object lives, not keeping it alive.

    A trainer keeps its hooks, and so would keep a publisher that was closed.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def refuse_meeting(
    world: World,
    meeting: str,
    kind: type[BaseException] | None,
    error: BaseException | None,
    *_: object,
) -> None:
    """If there is an error, notify the ranks that wait in `meeting` that this rank will not come.

    After the first two arguments it has those of `__exit__`, for `ExitStack.push`.
    """
    if error is not None:
        world.refuse(f"rank {world.rank}: {type(error).__name__}: {error}", meeting)
