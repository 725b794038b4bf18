"""The server itself: who is answered, who is refused, and that it lives on."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from served_models import TEXT, TOKEN, live, llama, server

import headwise as hw
from headwise.server import protocol, web_app
from headwise.server.live_model import LiveModel
from headwise.server.protocol import Distances, OfHead, Progress, Read, Reply, request_of

READ = {"ask": "read", "client": "test", "number": 1, "slot": 0, "text": TEXT, "appended": [], "image": None}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server(live("llama")) as served:
        yield served


def sent(
    address: str,
    method: str = "POST",
    path: str = "/ask",
    body: Any = None,
    *,
    token: str | None = TOKEN,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if method == "POST":
        all_headers = {"Content-Type": "application/json"} | all_headers
    if token is not None:
        all_headers["X-Headwise-Token"] = token
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, data, all_headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, content


def error_of(content: bytes) -> tuple[str, str]:
    reply = json.loads(content)
    return reply["kind"], reply["error"]


def header_of(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<I", content[:4])
    return json.loads(content[4 : 4 + length])


def test_the_page_is_given_only_with_the_token(address: str) -> None:
    status, headers, content = sent(address, "GET", f"/?token={TOKEN}", token=None)
    assert status == 200 and b"headwise serve 1" in content and b"connect-src 'self'" in content
    assert headers["referrer-policy"] == "no-referrer" and headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store" and "server" not in headers
    for path in ("/", "/?token=", "/?token=wrong", f"/?token={TOKEN}x", "/?token=%F0%9F%98%80"):
        status, _, content = sent(address, "GET", path, token=TOKEN)
        assert status == 403 and b"needs the token" in content
    assert sent(address, "GET", f"/favicon.ico?token={TOKEN}")[0] == 404


def test_requests_are_answered_only_with_the_token(address: str) -> None:
    status, headers, content = sent(address, body=READ)
    assert status == 200 and header_of(content)["tokens"] == len(TEXT)
    assert headers["content-type"] == "application/octet-stream"
    for token in (None, "", "wrong", TOKEN.upper()):
        status, _, content = sent(address, body=READ, token=token)
        assert status == 403 and error_of(content)[0] == "token"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Host": "evil.example"}, "got 'evil.example'"),
        ({"Host": "evil.example:80"}, "got 'evil.example:80'"),
        ({"Host": ""}, "got ''"),
        ({"Host": "10.0.0.1"}, "got '10.0.0.1'"),
        ({"Host": "127.0.0.1.evil.example"}, "evil"),
        ({"Origin": "http://evil.example"}, "got 'http://evil.example'"),
        ({"Origin": "null"}, "got 'null'"),
        ({"Sec_Fetch_Site": "cross-site"}, "server's own page"),
        ({"Sec_Fetch_Site": "same-site"}, "server's own page"),
    ],
    ids=str,
)
def test_other_hosts_and_origins_are_refused(address: str, headers: dict[str, str], words: str) -> None:
    for method, path in (("POST", "/ask"), ("GET", f"/?token={TOKEN}")):
        status, _, content = sent(address, method, path, READ if method == "POST" else None, **headers)
        kind, error = error_of(content)
        assert status == 403 and kind == "token" and words in error


def test_this_machine_has_several_names(address: str) -> None:
    port = urlsplit(address).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "127.0.0.2"):
        assert sent(address, body=READ, Host=host)[0] == 200
        assert sent(address, body=READ, Host=host, Origin=f"http://{host}")[0] == 200


def test_a_server_of_all_machines_takes_numbers_and_no_foreign_names() -> None:
    for name in ("192.168.1.7", "fe80::1", socket.gethostname(), "localhost"):
        assert web_app._is_allowed(name, "0.0.0.0")
    assert not web_app._is_allowed("evil.example", "0.0.0.0")
    assert not web_app._is_allowed("192.168.1.7", "127.0.0.1")
    assert web_app._is_allowed("box.example", "box.example")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        ([], "request must be an object: got list"),
        ({}, "got None"),
        ({"ask": "erase"}, "got 'erase'"),
        (READ | {"text": 3}, "text must be a text: got int"),
        (READ | {"client": "x" * 101}, "client must have at most 100 characters: got 101"),
        (READ | {"number": -1}, "number must be a whole number from 0: got -1"),
        (READ | {"number": True}, "number must be a whole number from 0: got True"),
        (READ | {"slot": 2}, "slot must be 0 or 1: got 2"),
        (READ | {"appended": [-3]}, "appended must be token ids: got [-3]"),
        (READ | {"image": 3}, "image must be base64: got int"),
        (READ | {"image": "?"}, "image must be base64"),
        (READ | {"factors": []}, "factors must be an object of at most 4096 heads: got []"),
        (READ | {"factors": {"x": 0}}, "factors must name heads as layer.head: got 'x'"),
        (READ | {"factors": {"0.0": 101}}, "factors must be between -100 and 100: got 101 for head 0.0"),
        (READ | {"factors": {"0.0": "0"}}, "got '0' for head 0.0"),
        (READ | {"maps": [[0]]}, "maps must be 0 to 256 pairs [layer, head]: got [[0]]"),
        ({"ask": "maps", "reading": "x", "heads": [[0, 0]], "measure": "all"}, "got 'all'"),
        ({"ask": "maps", "reading": "x", "heads": []}, "heads must be 1 to 256 pairs"),
        ({"ask": "maps", "reading": "x", "heads": [[0, -1]]}, "got [[0, -1]]"),
        (
            {"ask": "output", "reading": "x", "layer": -1, "head": 0},
            "layer must be a whole number from 0",
        ),
        (
            {"ask": "region", "reading": "x", "layer": 0, "head": 0, "queries": [3]},
            "queries must be [from, to]",
        ),
        (
            {"ask": "region", "reading": "x", "layer": 0, "head": 0, "queries": [3, 3], "keys": [0, 1]},
            "queries must hold a position: got [3, 3]",
        ),
        ({"ask": "changes", "readings": ["x"]}, "readings must be two names: got ['x']"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_requests_that_make_no_sense_are_refused_with_their_value(
    address: str, body: Any, words: str
) -> None:
    status, _, content = sent(address, body=body)
    kind, error = error_of(content)
    assert (status, kind) == (400, "refused") and words in error


def test_limits_of_size_are_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "MOST_REQUEST_BYTES", 2**20)
    status, _, content = sent(address, body=READ | {"text": "x" * 2**20})
    assert status == 400 and "at most 1 MiB" in error_of(content)[1]
    monkeypatch.setattr(protocol, "MOST_CHARACTERS", 10)
    status, _, content = sent(address, body=READ)
    assert status == 400 and f"text must have at most 10 characters: got {len(TEXT)}" in error_of(content)[1]
    monkeypatch.undo()
    monkeypatch.setattr(protocol, "MOST_IMAGE_BYTES", 2)
    status, _, content = sent(address, body=READ | {"image": "aaaaaaaa"})
    assert status == 400 and "image must have at most 0 MiB: got 0.0 MiB" in error_of(content)[1]
    assert sent(address, body=READ, Content_Type="text/plain")[0] == 400


def test_requests_are_read_as_they_were_written() -> None:
    assert request_of(READ | {"factors": {"2.3": 0, "1.0": 1, "0.5": 0.5}}) == Read(
        "test", 1, text=TEXT, factors={(2, 3): 0.0, (0, 5): 0.5}
    )
    assert request_of({"ask": "pairs", "reading": "x", "layer": 1, "head": 2, "most": 9999}) == OfHead(
        "pairs", "x", 1, 2, most=1000
    )
    assert request_of({"ask": "distances", "reading": "x", "layer": 1}) == Distances("x", 1)
    assert request_of({"ask": "progress", "client": "x"}) == Progress("x")
    assert header_of(Reply({"a": "é\ud800"}).to_bytes())["a"].startswith("é")


def test_two_pages_are_answered_one_after_the_other_with_their_own_heads(address: str) -> None:
    plain = header_of(sent(address, body=READ | {"client": "plain"})[2])["predictions"]
    replies: dict[int, list[Any]] = {0: [], 1: []}

    def ask(client: int) -> None:
        factors = {"0.0": 0, "1.3": 0} if client else {}
        for number in range(1, 6):
            body = READ | {"client": str(client), "number": number, "factors": factors}
            replies[client].append(header_of(sent(address, body=body)[2])["predictions"])

    threads = [threading.Thread(target=ask, args=(client,)) for client in replies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(rows == plain for rows in replies[0])
    assert all(rows == replies[1][0] != plain for rows in replies[1])


def test_a_browser_that_goes_away_ends_its_request() -> None:
    class Slow(LiveModel):
        began, ended = threading.Event(), threading.Event()

        def answer(self, request: Any, cancelled: Any = lambda: False) -> Reply:
            if isinstance(request, Read) and request.client == "slow":
                self.began.set()
                end = time.monotonic() + 20
                while not cancelled():
                    assert time.monotonic() < end
                    time.sleep(0.01)
                self.ended.set()
            return super().answer(request, cancelled)

    model = Slow(*llama())
    with server(model) as served:
        place = urlsplit(served)
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        headers = {"Content-Type": "application/json", "X-Headwise-Token": TOKEN}
        connection.request("POST", "/ask", json.dumps(READ | {"client": "slow"}), headers)
        assert model.began.wait(20)
        connection.close()
        assert model.ended.wait(20)
        assert sent(served, body=READ)[0] == 200


def test_a_failing_model_leaves_the_server_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LiveModel(*llama())
    with server(model) as served:
        monkeypatch.setattr(model.model, "forward", lambda **_: 1 / 0)
        status, _, content = sent(served, body=READ)
        assert (status, *error_of(content)) == (
            500,
            "failed",
            "the model failed: ZeroDivisionError: division by zero",
        )
        monkeypatch.undo()
        assert sent(served, body=READ | {"number": 2})[0] == 200


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(web_app, "MOST_WAITING", 0)
    status, _, content = sent(address, body=READ | {"client": "busy"})
    assert status == 503 and "0 requests to answer" in error_of(content)[1]


def test_requests_that_never_arrive_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "REQUEST_SECONDS", 0.3)
    with server(live("llama")) as served:
        place = urlsplit(served)
        slow = [socket.create_connection((place.hostname or "", place.port or 0)) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nX-a: ")
        for connection in slow:
            connection.settimeout(10)
            assert connection.recv(1) == b""
            connection.close()
        assert sent(served, body=READ | {"client": "after"})[0] == 200


def test_a_port_in_use_gives_the_next_one() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        bound = web_app.bound_socket("127.0.0.1", port)
        assert bound.getsockname()[1] > port
        bound.close()
    with pytest.raises(hw.errors.ArgumentError, match=r"host must be .*: got 'no\.such\.host'"):
        web_app.bound_socket("no.such.host", 8000)
    first = web_app.bound_socket("127.0.0.1", 65535)
    with pytest.raises(hw.errors.ArgumentError, match="port must be free: none from 65535 to 65535"):
        web_app.bound_socket("127.0.0.1", 65535)
    first.close()


def test_addresses_are_those_that_a_browser_opens() -> None:
    bound = web_app.bound_socket("127.0.0.1", 9321)
    port = bound.getsockname()[1]
    for host, name in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("box", "box")):
        assert web_app.address_of(bound, host, "t") == f"http://{name}:{port}/?token=t"
    bound.close()
