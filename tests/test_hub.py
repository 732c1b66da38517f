"""Uploads of exports, by the Hub's own client, to a stand-in for the Hub on this machine."""

import base64
import http.server
import json
import re
import threading

import pytest

from heinsen.interop import InteropError, load_folder, push_to_hub

pytest_plugins = ["tests.run_fixtures"]


class Hub(http.server.ThreadingHTTPServer):
    """What the client needs of the Hub: models are created, and commits carry the files themselves."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.commits, self.tokens = {}, {}, set()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_right":
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path == "/api/repos/create":
            repo = json.loads(content)
            name = f"{repo.get('organization') or 'someone'}/{repo['name']}"
            status = 409 if name in self.server.models else 200
            self.server.models.setdefault(name, repo.get("private", False) or repo.get("visibility") == "private")
            return self.answer(status, {"url": self.address(name), "name": name})
        if self.path == "/api/validate-yaml":  # of the model card
            return self.answer(200, {})
        name, action = re.fullmatch(r"/api/models/(.+/.+)/(preupload|commit)/main(?:\?.*)?", self.path).groups()
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(content)["files"]
            ]
            return self.answer(200, {"files": files})
        operations = [json.loads(line) for line in content.splitlines()]
        files = [each["value"] for each in operations if each["key"] == "file"]
        self.server.commits[name] = {file["path"]: base64.b64decode(file["content"]) for file in files}
        commit = {
            "commitUrl": self.address(name) + "/commit/1",
            "commitOid": "1" * 40,
            "hookOutput": "",
            "success": True,
        }
        return self.answer(200, commit)

    def do_GET(self):
        self.answer(404, {"error": "Repository not found"})

    def address(self, name):
        return f"http://127.0.0.1:{self.server.server_address[1]}/{name}"

    def answer(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_export_is_uploaded(hub, run, commands, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    folder = tmp_path / "x"
    options = ["--format=hf", "--push_to_hub=someone/model", "--private"]
    end = commands.run("scripts/export.py", f"--workdir={run.workdir}", f"--out={folder}", *options)
    assert end.returncode == 0, end.stderr
    assert hub.models == {"someone/model": True}
    assert hub.commits["someone/model"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert re.search(r"uploaded to http://127\.0\.0\.1:\d+/someone/model", end.stdout)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "AutoModelForCausalLM" in card
    assert "--workdir=." in card and str(folder) not in card
    load_folder(folder)


def test_refused_uploads_say_why(hub, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    cases = [
        ("hf_wrong", hub.server_address[1], "a/b", "401"),
        ("hf_right", 9, "a/b", "refused"),
        ("", 9, "a/b/c", "a/b/c"),
    ]
    for token, port, name, reason in cases:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(
            InteropError, match=f"is written, but could not be uploaded to {name}: .*{reason}.*hf upload"
        ):
            push_to_hub(tmp_path, name, private=False)
    assert not hub.models
