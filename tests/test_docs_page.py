"""GET /docs: a page that loads nothing from elsewhere, and knows all routes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx

from tests.serving import Server


class _Page(HTMLParser):
    """What a page refers to, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []
        self.script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.script += data


def test_page_is_whole_by_itself(data: Path) -> None:
    with Server(data / "arch" / "llama", "--api-key", "secret") as server:
        response = server.http.get("/docs")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "http" not in policy
        page = _Page(response.text)
        assert not page.references
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|innerHTML", response.text)
        assert re.findall(r'fetch\(("[^"]*"|[^,]*)', page.script) == ["url.slice(1)", '"openapi.json"']
        assert httpx.get(server.url + "/openapi.json").status_code == 401  # the page asks for the key
        api = server.http.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
        samples = re.findall(r'^  "(/v1/[^"]*)": \{', page.script, re.MULTILINE)
        assert len(samples) == 4
        for path in samples:
            assert "post" in api["paths"][path]
