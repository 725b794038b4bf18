"""The web server of `headwise serve`: one page, one address that answers its requests.

    GET  /?token=...   the page
    POST /ask          a request of protocol.py; the token is in the header X-Headwise-Token

Only addresses of this machine, or of the chosen host, are answered (against DNS rebinding), a request of a
page of another origin is refused, and both addresses need the token. One thread runs the model: requests are
answered one after the other, each with its own heads switched off.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import queue
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, HeadwiseError, needed
from ..show.heads_page import served_page
from .live_model import LiveModel
from .protocol import MOST_REQUEST_BYTES, PROTOCOL, STATUS, Refusal, Reply, Request, request_of

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request as WebRequest
    from starlette.responses import Response

HOST, PORT = "127.0.0.1", 8765
PORTS_TRIED = 50
MOST_WAITING = 2000  # requests
MOST_CONNECTIONS = 500
REQUEST_SECONDS = 20.0  # for a request to arrive
TOKEN_HEADER = "x-headwise-token"
NO_PAGE = (
    "This address needs the token that headwise serve printed: open the complete address, with ?token=…, "
    "or start headwise serve again."
)
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the token is in the page's address
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Job = tuple[Request, threading.Event, Future[Reply]]  # the event is set once nobody waits
ScopeOrMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ScopeOrMessage]]
Send = Callable[[ScopeOrMessage], Awaitable[None]]


class ModelThread:
    """Answers requests one after the other, in a thread of its own."""

    def __init__(self, live: LiveModel) -> None:
        self.live = live
        self.stopped = threading.Event()
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headwise model", daemon=True).start()

    def submit(self, request: Request, cancelled: threading.Event) -> Future[Reply]:
        """Return the future reply to a request; it is not computed if `cancelled` is set before.

        Raises:
            Refusal: too many requests wait.
        """
        reply: Future[Reply] = Future()
        now = self.live.arrive(request)
        if now is not None:
            reply.set_result(now)
            return reply
        if self._waiting.qsize() >= MOST_WAITING:
            raise Refusal("busy", f"the server has {MOST_WAITING:,} requests to answer; try again later")
        self._waiting.put((request, cancelled, reply))
        return reply

    def stop(self) -> None:
        """End the thread; a forward that runs ends at its next layer."""
        self.stopped.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            request, cancelled, reply = job

            def unwanted(event: threading.Event = cancelled) -> bool:
                return event.is_set() or self.stopped.is_set()

            if unwanted():
                reply.cancel()
                continue
            try:
                reply.set_result(self.live.answer(request, unwanted))
            except BaseException as error:
                reply.set_exception(error)


def application(live: LiveModel, token: str, host: str = HOST) -> Callable[..., Awaitable[None]]:
    """Return the ASGI application that serves one model.

    Args:
        token: what every request must hold.
        host: the address that the server listens on.
    """
    with needed("starlette", "headwise serve needs starlette"):
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
        from starlette.responses import Response as BytesResponse
        from starlette.routing import Route

    thread = ModelThread(live)
    page = page_of_model(live, "http", "")

    async def show(request: WebRequest) -> Response:
        if not _is_equal(request.query_params.get("token", ""), token):
            return PlainTextResponse(NO_PAGE, 403)
        return HTMLResponse(page)

    async def ask(request: WebRequest) -> Response:
        try:
            if not _is_equal(request.headers.get(TOKEN_HEADER, ""), token):
                raise Refusal("token", NO_PAGE)
            if request.headers.get("content-type", "").partition(";")[0] != "application/json":
                raise Refusal("refused", "the request must be application/json; reload the page")
            message = request_of(_decoded(await _body(request)))
            content = (await _answered(request, thread, message)).to_bytes()
        except Refusal as refusal:
            return JSONResponse(refusal.reply, STATUS[refusal.kind])
        except HeadwiseError as error:
            return JSONResponse({"error": str(error), "kind": "refused"}, STATUS["refused"])
        except Exception as error:
            reason = f"the reply failed: {type(error).__name__}: {error!s:.500}"
            return JSONResponse({"error": reason, "kind": "failed"}, STATUS["failed"])
        return BytesResponse(content, media_type="application/octet-stream")

    app = Starlette(routes=[Route("/", show), Route("/ask", ask, methods=["POST"])])
    app.state.thread = thread
    return _Guard(app, host)


async def _body(request: WebRequest) -> bytes:
    """Return the body of a request, or raise `Refusal` before more than the limit was read."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_REQUEST_BYTES:
                most = MOST_REQUEST_BYTES // 2**20
                raise Refusal(
                    "refused", f"a request must have at most {most} MiB: got more; shorten the text"
                )
    except ClientDisconnect:
        raise Refusal("superseded", "the browser no longer waits for this") from None
    return bytes(body)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("refused", "the request must be JSON; reload the page") from None


async def _answered(request: WebRequest, thread: ModelThread, message: Request) -> Reply:
    """Return the reply; if the browser goes away before, the request is dropped."""
    cancelled = threading.Event()
    reply = asyncio.wrap_future(thread.submit(message, cancelled))
    reply.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
    gone = asyncio.ensure_future(_disconnected(request))
    either: set[asyncio.Future[Any]] = {reply, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise Refusal("superseded", "the browser no longer waits for this")
        return reply.result()
    except asyncio.CancelledError:
        raise Refusal("superseded", "the browser no longer waits for this") from None
    finally:
        cancelled.set()
        gone.cancel()


async def _disconnected(request: WebRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Guard:
    """Refuses requests of other hosts and origins, and adds headers of safety to every reply."""

    def __init__(self, app: Callable[..., Awaitable[None]], host: str) -> None:
        self.app, self.host = app, host

    async def __call__(self, scope: ScopeOrMessage, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no WebSocket is served
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        reason = self._reason(headers)

        async def with_headers(message: ScopeOrMessage) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        if reason is None:
            await self.app(scope, receive, with_headers)
            return
        body = json.dumps({"error": reason, "kind": "token"}).encode()
        start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await with_headers({"type": "http.response.start", "status": 403, "headers": start})
        await with_headers({"type": "http.response.body", "body": body})

    def _reason(self, headers: dict[str, str]) -> str | None:
        """Return why a request is refused, or None."""
        address = headers.get("host", "")
        name = _host_name(address)
        if not _is_allowed(name, self.host):
            return f"Host must be the printed address: got {address!r:.100}; open the printed address"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{address}":
            return f"Origin must be this server: got {origin!r:.100}; open the printed address"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "the request must come from this server's own page; open the printed address"
        return None


def _host_name(address: str) -> str:
    """Return the host of "host:port" or "[host]:port"."""
    if address.startswith("["):
        return address.partition("]")[0][1:]
    return address.rpartition(":")[0] if ":" in address else address


def _is_allowed(name: str, host: str) -> bool:
    """Return True for this machine and the chosen host. Numbers cannot be rebound; names of others can."""
    name, host = name.lower(), host.lower()
    if name in ("localhost", host) or (name == socket.gethostname().lower() and _is_open(host)):
        return True
    try:
        number = ipaddress.ip_address(name)
    except ValueError:
        return False
    return number.is_loopback or _is_open(host)


def _is_open(host: str) -> bool:
    """Return True if other machines can reach a server on this address."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def _is_equal(candidate: str, token: str) -> bool:
    return hmac.compare_digest(candidate.encode("utf-8", "replace"), token.encode())


def page_of_model(live: LiveModel, transport: str, channel: str) -> str:
    """Return the page of a served model.

    Args:
        transport: "http", or "parent" for a notebook.
        channel: names the widget in messages of a notebook.
    """
    served = {
        "protocol": PROTOCOL,
        "transport": transport,
        "channel": channel,
        "title": live.title,
        "input": live.input.kind,
        "predicts": live.predictor.kind,
        "layers": live.layers,
        "max_tokens": live.input.max_tokens,
        "mask_token": getattr(live.input, "mask_token", None),
        "first": live.first,
    }
    return served_page(served, live.first_reading, live.first["heads"])


# Serving


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first free port from `port` on.

    Raises:
        ArgumentError: no such host, or no free port.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ArgumentError(
            f"host must be an address of this machine: got {host!r} ({error.strerror}); try {HOST}"
        ) from None
    reason = ""
    for number in range(port, min(port + PORTS_TRIED, 65536)):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left
            bound.bind((address[0], number, *address[2:]))
            bound.listen(128)
        except OSError as error:
            bound.close()
            reason = error.strerror or str(error)
        else:
            return bound
    raise ArgumentError(
        f"port must be free: none from {port} to {min(port + PORTS_TRIED, 65536) - 1} is ({reason}); choose "
        "another"
    )


def address_of(bound: socket.socket, host: str, token: str) -> str:
    """Return the address of the page, to open in a browser on this machine."""
    port = bound.getsockname()[1]
    name = (
        HOST if host in ("0.0.0.0", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    )
    return f"http://{name}:{port}/?token={token}"


def web_server(app: Any) -> uvicorn.Server:
    """Return the server that runs an application; `run(sockets=[...])` answers until it is stopped."""
    with needed("uvicorn", "headwise serve needs uvicorn"):
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        """Closes a connection whose request has not arrived within `REQUEST_SECONDS`."""

        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.timer = self.loop.call_later(REQUEST_SECONDS, self._expire)

        def data_received(self, data: bytes) -> None:
            if self.timer is None:
                self.timer = self.loop.call_later(REQUEST_SECONDS, self._expire)
            super().data_received(data)

        def on_response_complete(self) -> None:
            self._stop_timer()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None

        def _expire(self) -> None:
            self.timer = None
            if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
                self.transport.close()

    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        limit_concurrency=MOST_CONNECTIONS,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
    )
    config.load()  # imports the rest now, so that Ctrl-C never meets an import
    return uvicorn.Server(config)


def serve_forever(server: uvicorn.Server, app: Any, bound: socket.socket) -> None:
    """Answer requests until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        try:
            server.run(sockets=[bound])
        finally:
            app.app.state.thread.stop()
