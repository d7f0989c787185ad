"""Parts of a URL, and names of origins."""

from __future__ import annotations

import pytest

from tidegate.service.http1.origin import Origin, parse_url


@pytest.mark.parametrize(
    ("url", "origin", "path", "headers"),
    [
        ("http://h", Origin("h", 80, False), "/", b"host: h\r\n"),
        ("https://h/v1?a=b", Origin("h", 443, True), "/v1?a=b", b"host: h\r\n"),
        ("http://h/a b?c=ü%20\x01", Origin("h", 80, False), "/a%20b?c=%C3%BC%20%01", b"host: h\r\n"),
        ("http://h:81/a/b", Origin("h", 81, False), "/a/b", b"host: h:81\r\n"),
        ("http://[::1]:81", Origin("::1", 81, False), "/", b"host: [::1]:81\r\n"),
        (
            "http://bücher.example",
            Origin("xn--bcher-kva.example", 80, False),
            "/",
            b"host: xn--bcher-kva.example\r\n",
        ),
        (
            "http://me:p%40ss@h",
            Origin("h", 80, False),
            "/",
            b"host: h\r\nauthorization: Basic bWU6cEBzcw==\r\n",
        ),
    ],
)
def test_parts_of_a_url(url: str, origin: Origin, path: str, headers: bytes) -> None:
    assert parse_url(url) == (origin, path, headers)


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://a b/"])
def test_a_url_that_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_url(url)


def test_names_of_origins() -> None:
    assert [str(Origin("h", 80, False)), str(Origin("::1", 1, True))] == ["http://h:80", "https://[::1]:1"]
