"""Serves the routes of the Hugging Face Hub that give one file of a model, on the loopback, from a
folder of ``ORG/NAME/config.json``; prints its address.

``gated/*`` wants an account that was let in, ``broken/*`` answers with an error of its own. Answers
are as the Hub has them: status, X-Error-Code, X-Repo-Commit.
Source: https://github.com/huggingface/huggingface_hub, src/huggingface_hub/utils/_http.py
"""

import hashlib
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_an_account_that_was_let_in"  # noqa: S105 -- nobody's
_FILE = re.compile(r"/([\w.-]+)/([\w.-]+)/resolve/(?:main|[0-9a-f]{40})/(.+)")


class Hub(BaseHTTPRequestHandler):
    root: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Say who asked for what, so that a test can count."""
        sys.stderr.write(f"{self.command} {self.path}\n")

    def _answer(self, *, with_body: bool) -> None:
        refused = self._refusal()
        if refused is not None:
            self._say(*refused)
            return
        content = self._path().read_bytes()
        name = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self._say(HTTPStatus.OK, {"ETag": f'"{name}"'}, content, with_body=with_body)

    def _path(self) -> Path:
        asked = _FILE.fullmatch(self.path)
        return self.root.joinpath(*asked.groups()) if asked else self.root / "no" / "such" / "file"

    def _refusal(self) -> tuple[HTTPStatus, dict[str, str]] | None:
        file, account = self._path(), self.headers.get("authorization")
        organisation = file.parts[-3]
        if organisation == "broken":
            return HTTPStatus.INTERNAL_SERVER_ERROR, {}
        if organisation == "gated" and account != f"Bearer {TOKEN}":
            status = HTTPStatus.FORBIDDEN if account else HTTPStatus.UNAUTHORIZED
            return status, {"X-Error-Code": "GatedRepo"}
        if not file.parent.is_dir():
            return HTTPStatus.NOT_FOUND, {"X-Error-Code": "RepoNotFound"}
        if not file.is_file():
            return HTTPStatus.NOT_FOUND, {"X-Error-Code": "EntryNotFound"}
        return None

    def _say(
        self,
        status: HTTPStatus,
        headers: dict[str, str],
        content: bytes = b"",
        *,
        with_body: bool = False,
    ) -> None:
        self.send_response(status)
        length = {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
        for name, value in {**length, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


def serve(root: Path) -> None:
    Hub.root = root
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
