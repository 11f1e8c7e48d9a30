"""Addresses, tokens, and what a client gets from something that is no service."""

from __future__ import annotations

import http.server
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sluice
from sluice.address import parse, resolve

from .conftest import Service


@pytest.mark.parametrize(
    ("url", "says"), [
        ("ftp://x", "scheme"), ("http://", "no host"), ("unix:relative", "absolute"), ("http://u:p@host", "password"), ("http://host?x=1", "query"), ("http://host:99999", "can't be read"),
        ("host:7447", "scheme"),
    ],
)
def test_bad_addresses(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse(url)
    assert "p@" not in str(caught.value)


def test_addresses() -> None:
    a = parse("https://trainer-3:7447/sluice/")
    assert (a.scheme, a.host, a.port, a.prefix, a.name) == ("https", "trainer-3", 7447, "/sluice", "https://trainer-3:7447/sluice")
    assert parse("unix:///run/s.sock").socket == "/run/s.sock"
    assert parse("http://127.0.0.1").port == 80


def test_the_state_directory_says_where_and_with_which_token(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve(state_dir=service.state).scheme == "unix"
    over_tcp = resolve(service.url, state_dir=service.state)
    assert len(over_tcp.token) >= 26 and over_tcp.token not in repr(over_tcp)
    monkeypatch.setenv("SLUICE_STATE", str(service.state))
    monkeypatch.delenv("SLUICE_URL", raising=False)
    assert resolve().socket == str(service.state / "sluice.sock")
    monkeypatch.setenv("SLUICE_STATE", str(tmp_path))
    with pytest.raises(ConnectionError, match="sluice serve"):
        resolve()


def test_tcp_wants_a_token(service: Service, tmp_path: Path) -> None:
    with pytest.raises(PermissionError) as caught:
        sluice.Client(service.url, state_dir=tmp_path)
    assert isinstance(caught.value, sluice.DeniedError) and caught.value.code == "unauthorized"
    with pytest.raises(PermissionError, match="token_file="):
        sluice.Client(service.url, state_dir=tmp_path, token="x" * 30)
    token = resolve(service.url, state_dir=service.state).token
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(token + "\n")
    with sluice.Client(service.url, state_dir=tmp_path, token_file=file) as c:
        assert c.status()["ready"] is True
    file.chmod(0o644)
    with pytest.raises(PermissionError, match="600") as caught:
        sluice.Client(service.url, state_dir=tmp_path, token_file=file)
    assert token not in str(caught.value)
    file.chmod(0o600)
    file.write_text("two words")
    with pytest.raises(ValueError, match="no token"):
        sluice.Client(service.url, state_dir=tmp_path, token_file=file)


def test_nobody_there_is_unavailable_within_the_patience(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="does not answer|has not answered"):
        sluice.Client(f"unix:{tmp_path}/none.sock", patience=0.1)


@pytest.mark.parametrize(("option", "value"), [("ranges", 0), ("ranges", 65), ("patience", 0), ("patience", -1), ("token", "short"), ("ca_file", "/does/not/exist")])
def test_bad_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        sluice.Client("https://127.0.0.1:1", **{option: value})


class _Other(http.server.BaseHTTPRequestHandler):
    answers: list[tuple[int, str, bytes]] = []

    def do_GET(self) -> None:
        status, kind, body = self.answers[0] if self.path != "/v1/status" or len(self.answers) == 1 else self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    """Something else that speaks HTTP."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize(
    ("answer", "error"), [
        ((200, "text/html", b"<html>"), sluice.UnavailableError), ((404, "text/plain", b"no"), sluice.UnavailableError), ((200, "application/json", b"{"), sluice.CorruptError),
        ((500, "application/problem+json", b'{"code":"internal","detail":"the service failed"}'), sluice.UnavailableError),
        ((400, "application/problem+json", b'{"code":"new_code","detail":"of a newer service"}'), sluice.SluiceError), ((302, "text/html", b""), sluice.UnavailableError),
    ],
)
def test_what_is_no_service_is_told_apart(other: str, answer: tuple[int, str, bytes], error: type[Exception]) -> None:
    _Other.answers = [answer]
    with pytest.raises(error):
        sluice.Client(other, patience=0.1)


def test_busy_and_unavailable_are_asked_again(other: str) -> None:
    busy = (429, "application/problem+json", b'{"code":"busy","detail":"too many"}')
    _Other.answers = [busy, (503, "application/problem+json", b'{"code":"unavailable","detail":"starting"}'), (502, "text/html", b"proxy"), (200, "application/json", b'{"ready":true}')]
    with sluice.Client(other, patience=20) as c:
        assert c.status() == {"ready": True}


def test_a_service_with_tls_of_its_own(binary: str, tmp_path: Path) -> None:
    s = Service(binary, tmp_path, "--tls-self-signed")
    try:
        with sluice.Client(s.url, state_dir=s.state) as c:  # its certificate and token lie in its state directory
            assert c.status()["ready"]
        token = resolve(s.url, state_dir=s.state).token
        with pytest.raises(sluice.UnavailableError, match="not trusted"):
            sluice.Client(s.url, state_dir=tmp_path / "none", token=token, patience=5)
        pem = s.state / "tls-cert.pem"
        with sluice.Client(s.url, state_dir=tmp_path / "none", token=token, ca_file=pem) as c:
            assert c.status()["ready"]
        assert ssl.create_default_context(cafile=os.fspath(pem))
    finally:
        s.stop()


def test_a_run_that_is_not_there_says_how_to_make_it(client: sluice.Client) -> None:
    with pytest.raises(KeyError, match=r"no such run \(make it by client\.create_run\(\)"):
        client.run("nope")


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        ("max_bytes", 1e6, "a whole number of bytes, or a size"), ("max_bytes", True, "a whole number of bytes"), ("max_bytes", "4 Gigs", "a whole number of bytes"),
        ("max_bytes", "0.3B", "a whole number of bytes"), ("largest_sample", 1 << 60, "a whole number of bytes"), ("max_samples", "3", "a whole number"), ("ranks", 2.0, "a whole number"),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_name(client: sluice.Client, run_id: str, field: str, value: object, want: str) -> None:
    fields = {"max_bytes": 1 << 20} | ({"per_rank": 1} if field == "ranks" else {}) | {field: value}
    with pytest.raises(sluice.InvalidError, match=want) as caught:
        client.create_run(run_id, algorithm="eagle3", **fields)  # type: ignore[arg-type]
    assert caught.value.subject == field


def test_sizes_are_taken_as_the_command_line_takes_them(client: sluice.Client, run_id: str) -> None:
    run = client.create_run(run_id, algorithm="eagle3", max_bytes="1.5MiB", low_watermark_bytes="100 KB", high_watermark_bytes=np.int64(1 << 20))  # type: ignore[arg-type]
    assert {name: run.spec["caps"][name] for name in ("max_bytes", "low_watermark_bytes", "high_watermark_bytes")} == {
        "max_bytes": 3 << 19, "low_watermark_bytes": 100_000, "high_watermark_bytes": 1 << 20,
    }
    run.configure(low_watermark_bytes="1KiB")
    assert run.spec["caps"]["low_watermark_bytes"] == 1024
    client.delete_run(run_id)
