"""How a publisher calls a server: vLLM's own requests, over HTTP or of a Ray actor.

A request over HTTP has the key of VLLM_API_KEY, where this process has one, and the proof that it has the token.

vLLM's calls for weights have the names of its `VLLMWeightSyncClient`; those that a publisher needs beside them have the
names of its HTTP routes. Whoever has another way to reach a server writes a class of this shape.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from hybrid_engine.errors import ConfigError, DependencyError, ServerError, Violation, clipped, shortened
from hybrid_engine.serving.addresses import addresses_of, public_ones
from hybrid_engine.serving.invitation import PROOF_HEADER, TOKEN, proof_of_request

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight: they end with the tokens so far, are finished first, or go on after it."""


API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of servers that were started with --api-key, or with this variable."""

_T = TypeVar("_T")


@runtime_checkable
class VllmServer(Protocol):
    """A server, as a publisher calls it. Each call raises ServerError where the server refuses, or is not there."""

    def num_workers(self) -> int:
        """Of all its replicas."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weight_version(self, new_version: str) -> None: ...

    def pause(self, mode: PauseMode, clear_cache: bool) -> None: ...

    def resume(self) -> None: ...


def server_of(given: object, timeout_seconds: float, *, allow_public: bool = False) -> VllmServer:
    """A server of its name, a Ray actor, or what is one already.

    Args:
        given: a name as `named_server` takes it; the handle of a Ray actor with the methods of a `VllmServer`, for
            example `backends.vllm.server.async_server.VllmActor`; or any `VllmServer`.
        timeout_seconds: longest wait for an answer; for a switch, which has waits of its own, there is none.
        allow_public: take addresses that others than this host and its private network can reach.

    Raises ConfigError for anything else.
    """
    if isinstance(given, str):
        return named_server(given, timeout_seconds, allow_public=allow_public)
    if hasattr(given, "_ray_actor_id"):
        return RayServer(given, timeout_seconds)
    if isinstance(given, VllmServer):
        return given
    remedy = "Give http://HOST:PORT, ray:NAME, a Ray actor, or a serving.clients.VllmServer"
    raise ConfigError([Violation("servers", f"got {shortened(given)}", remedy)])


def named_server(name: str, timeout_seconds: float, *, allow_public: bool = False) -> Server:
    """The server at `http://HOST:PORT`, or the Ray actor of `ray:NAME`.

    Raises ConfigError for what is neither, and DependencyError where Ray is not installed.
    """
    kind, _, actor = name.partition(":")
    if kind != "ray":
        return HttpServer(name, timeout_seconds, allow_public=allow_public)
    try:
        import ray
    except ImportError as error:
        raise DependencyError(f"servers: {name} needs Ray: pip install 'hybrid-engine[ray]'") from error
    try:
        return RayServer(ray.get_actor(actor), timeout_seconds)
    except ValueError as error:
        remedy = "Start the actor first, with options(name=...), in the namespace of this process"
        raise ConfigError([Violation("servers", f"{name}: {error}", remedy)]) from None


class Server(ABC):
    """The calls of a `VllmServer`, each as one call of this server's own."""

    @abstractmethod
    def num_workers(self) -> int:
        """Of all its replicas."""

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of vLLM's route /v1/completions to this body, for which it may take its time."""
        answer: Mapping[str, Any] = self._call("complete", ends=False, body=body)
        return answer

    def describe(self) -> str:
        """What the server can compute, as the JSON of a `comparison.Description`."""
        return str(self._call("describe"))

    def probe(self, tokens: list[list[int]]) -> str:
        """Log-probabilities of `tokens` [B, L], of a server that is paused: JSON of a `comparison.ServerAnswer`."""
        return str(self._call("probe", tokens=tokens))

    @abstractmethod
    def _call(self, name: str, ends: bool = True, **fields: Any) -> Any:
        """Make the call of this name; `ends`: within the timeout. Raises ServerError."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", ends=False, init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", ends=False, update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version=weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._call("update_weight_version", new_version=new_version)

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        # requests that are finished first take as long as they take
        self._call("pause", ends=mode != "wait", mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self._call("resume")


class _NoRouteError(ServerError):
    """The server is there, and has no such route."""


class HttpServer(Server):
    """`vllm serve`, with VLLM_SERVER_DEV_MODE=1 in its environment: without it vLLM has no routes for weights."""

    def __init__(self, url: str, timeout_seconds: float, *, allow_public: bool = False) -> None:
        """Raises ConfigError for what is no URL, or for one that anybody can reach: these routes ask no password."""
        self.url, self._timeout = url.rstrip("/"), timeout_seconds
        if not allow_public and (reachable := _public_addresses(self.url)):
            problem = f"{url} is at {', '.join(reachable)}, and vLLM's routes for weights authenticate nobody"
            remedy = "Bind the server to the loopback or a private address, or allow_public where a firewall guards it"
            raise ConfigError([Violation("servers", problem, remedy)])

    def num_workers(self) -> int:
        return _read(_WorldSize, self.get("get_world_size"), f"{self.url}/get_world_size").world_size

    def describe(self) -> str:
        return self._of_core("hybrid_engine_describe")

    def probe(self, tokens: list[list[int]]) -> str:
        return self._of_core("hybrid_engine_probe", tokens)

    def _of_core(self, method: str, *args: object) -> str:
        answer = self._call("collective_rpc", method=method, args=args)
        (text,) = _read(_Results, answer, f"{self.url}/collective_rpc, {method}").results
        return text

    def get(self, route: str) -> Any:
        """The answer of another route."""
        return self._request("GET", route, self._timeout)

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of another route, for which it may take its time."""
        return self._request("POST", route, None, json=body)

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.post("v1/completions", body)
        return answer

    def update_weight_version(self, new_version: str) -> None:
        """vLLM 0.26 has no route for it, and no version to be asked for."""
        with contextlib.suppress(_NoRouteError):
            super().update_weight_version(new_version)

    def _call(self, name: str, ends: bool = True, **fields: Any) -> Any:
        seconds = self._timeout if ends else None
        if name == "pause":
            query = {key: str(value).lower() for key, value in fields.items()}
            return self._request("POST", name, seconds, params=query)
        return self._request("POST", name, seconds, json=fields or None)

    def _request(self, method: str, route: str, seconds: float | None, **said: Any) -> Any:
        import requests

        where = f"{self.url}/{route}"
        try:
            # a redirect could take what is said of a job to anybody
            said |= {"allow_redirects": False, "timeout": (self._timeout, seconds)}
            # A session for each call: threads share none, and none has a connection that was idle for 5 s, which a
            # server closes, perhaps while the next call is on its way.
            with requests.Session() as session:
                session.trust_env = False  # a proxy is not to see this
                adapter, session.auth = _kept_alive()(), _authenticated
                for prefix in ("http://", "https://"):
                    session.mount(prefix, adapter)
                response = session.request(method, where, **said)
                if response.status_code == requests.codes.not_found:
                    raise _NoRouteError(f"{where}: no such route: start the server with VLLM_SERVER_DEV_MODE=1")
                if response.status_code // 100 != 2:  # a redirect is no answer
                    raise ServerError(f"{where}: {response.status_code}: {clipped(response.text, 2000)}")
                return json.loads(response.content) if response.content else None
        except (requests.RequestException, ValueError, RecursionError) as error:  # the last two of JSON
            raise ServerError(f"{where}: {clipped(str(error), 2000)}") from error


class _WorldSize(msgspec.Struct, frozen=True):
    world_size: Annotated[int, msgspec.Meta(ge=1)]


class _Results(msgspec.Struct, frozen=True):
    results: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)]


def _read(kind: type[_T], answer: object, where: str) -> _T:
    """Return an answer of this type. Raises ServerError for another."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ServerError(f"{where}: {error}") from None


def _authenticated(request: Any) -> Any:
    """A prepared request, with what this process has to show."""
    if key := os.environ.get(API_KEY, ""):
        request.headers["Authorization"] = f"Bearer {key}"
    if TOKEN in os.environ:
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else body
        request.headers[PROOF_HEADER] = proof_of_request(request.method, request.path_url, body)
    return request


@functools.cache
def _kept_alive() -> type[Any]:
    """The class of connections on which a host that is gone is noticed after two minutes: some answers have no timeout.

    Requests is imported by the first call of a server.
    """
    from requests.adapters import HTTPAdapter

    class KeptAlive(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **settings: Any) -> None:
            super().init_poolmanager(*args, socket_options=_SOCKET_OPTIONS, **settings)

    return KeptAlive


_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # as without any
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),  # ms, for what was sent and not acknowledged
)


class RayServer(Server):
    """A Ray actor with the methods of a `Server`, for example a `VllmActor`. Never run on several nodes.

    Where Ray starts it anew (`max_restarts`), the handle stays good.
    """

    def __init__(self, actor: Any, timeout_seconds: float) -> None:
        self._actor, self._timeout = actor, timeout_seconds

    def num_workers(self) -> int:
        return int(self._call("num_workers"))

    def _call(self, name: str, ends: bool = True, **fields: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, name).remote(**fields), timeout=self._timeout if ends else None)
        except Exception as error:
            raise ServerError(f"actor.{name}: {type(error).__name__}: {clipped(str(error), 2000)}") from error


def _public_addresses(url: str) -> list[str]:
    """Those of a URL's host. Raises ConfigError for what is no URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no http://HOST:PORT")
        _ = parts.port  # raises
        return public_ones(addresses_of(parts.hostname))
    except (ValueError, OSError) as error:
        remedy = "Give the address at which the server listens"
        raise ConfigError([Violation("servers", f"{shortened(url)}: {error}", remedy)]) from None
