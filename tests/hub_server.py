"""A small Hub on loopback: enough of the Hub's HTTP interface for the real clients to push to and pull from.

Repositories, branches, tags, commits and LFS objects live in memory; Spaces are repositories named `spaces:owner/name`.
Private repositories need the token; a push can be made to break off in the middle.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

TOKEN = "hf_loopback"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, tuple[bytes, bool]]] = field(default_factory=dict)  # id -> path -> (bytes, is LFS)
    references: dict[str, str] = field(default_factory=dict)  # branches and tags -> commit id

    def commit_of(self, revision: str) -> str | None:
        return self.references.get(revision, revision if revision in self.commits else None)

    def commit(self, files: dict[str, tuple[bytes, bool]], branch: str) -> str:
        content = json.dumps(
            [len(self.commits), sorted((path, hashlib.sha1(b).hexdigest()) for path, (b, _) in files.items())]
        )
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[commit] = files
        self.references[branch] = commit
        return commit


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.break_uploads = False  # drop the connection when the bytes of a file come
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> "Hub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def files_of(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo]
        return {path: content for path, (content, _) in repository.commits[repository.commit_of(revision)].items()}

    def handle_error(self, request, client_address) -> None:
        pass  # a client that went away


def _of_a_space(start: re.Match) -> str:
    """The beginning of a path of a Space, as that of a model whose name says that it is one."""
    return "/api/models/spaces:" if start[1] else "/spaces:"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    ROUTES = (
        ("POST", r"/api/repos/create", "create_repository"),
        ("POST", r"/api/validate-yaml", "validate_card"),
        ("GET", r"/api/whoami-v2", "who_am_i"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "choose_upload_modes"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<name>[^/]+)", "create_reference"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/tag/(?P<revision>[^/]+)", "create_tag"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", "list_tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)", "describe"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)", "describe"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
        ("GET|HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def dispatch(self) -> None:
        path = re.sub(r"^(/api)?/spaces/", _of_a_space, urlparse(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        self.server.requests.append((self.command, path))
        for methods, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split("|"):
                if name == "lfs_upload" and self.server.break_uploads:
                    self.rfile.read(min(length, 100))
                    self.connection.close()
                    return
                self.body = self.rfile.read(length)
                arguments = {key: unquote(value) if value else value for key, value in match.groupdict().items()}
                with self.server.lock:
                    getattr(self, name)(**arguments)
                return
        self.rfile.read(length)
        self.answer(404, {"error": f"no such endpoint: {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = dispatch

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: dict | list | bytes = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def refuse(self) -> None:
        self.answer(
            401, {"error": "Invalid credentials in Authorization header"}, X_Error_Message="Invalid credentials"
        )

    def readable(self, repo: str) -> Repository | None:
        """The repository, or None after an answer that hides a private one from who has no token."""
        repository = self.server.repositories.get(repo)
        if repository is not None and (self.has_token or not repository.private):
            return repository
        if "Authorization" in self.headers and not self.has_token:
            self.refuse()
        else:
            self.answer(
                401,
                {"error": "Repository not found"},
                X_Error_Code="RepoNotFound",
                X_Error_Message="Repository not found",
            )
        return None

    def writable(self, repo: str) -> Repository | None:
        if not self.has_token:
            self.refuse()
            return None
        return self.readable(repo)

    def address(self, repo: str) -> str:
        return f"{self.server.url}/{repo.replace('spaces:', 'spaces/')}"

    # Endpoints

    def create_repository(self) -> None:
        if not self.has_token:
            return self.refuse()
        asked = json.loads(self.body)
        assert asked.get("type") != "space" or asked["sdk"] == "gradio"
        kind = "spaces:" if asked.get("type") == "space" else ""
        repo = f"{kind}{asked.get('organization') or 'someone'}/{asked['name']}"
        status = 409 if repo in self.server.repositories else 200
        if status == 200:
            private = asked.get("private") is True or asked.get("visibility") == "private"
            self.server.repositories[repo] = Repository(private)
            self.server.repositories[repo].commit({".gitattributes": (b"", False)}, "main")
        return self.answer(status, {"url": self.address(repo), "name": repo, "id": repo})

    def validate_card(self) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    def who_am_i(self) -> None:
        self.answer(200, {"name": "someone", "type": "user"}) if self.has_token else self.refuse()

    def choose_upload_modes(self, repo: str, revision: str) -> None:
        if self.writable(repo) is None:
            return
        files = json.loads(self.body)["files"]
        modes = [(file["path"], "lfs" if file["path"].endswith(".safetensors") else "regular") for file in files]
        self.answer(200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]})

    def lfs_batch(self, repo: str) -> None:
        if self.writable(repo) is None:
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.lfs:  # one that is there already need not be sent again
                answer["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"}}
            objects.append(answer)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.lfs[oid] = self.body
        self.answer(200)

    def commit(self, repo: str, revision: str) -> None:
        repository = self.writable(repo)
        if repository is None:
            return
        parent = repository.commit_of(revision)
        files = dict(repository.commits[parent])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif entry["key"] == "lfsFile":
                files[value["path"]] = (self.server.lfs[value["oid"]], True)
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repository.commit(files, revision)
        url = f"{self.address(repo)}/commit/{oid}"
        self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def create_reference(self, repo: str, name: str) -> None:
        repository = self.writable(repo)
        if repository is None:
            return
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        status = 409 if name in repository.references else 200
        repository.references.setdefault(name, repository.commit_of(start))
        self.answer(status, {})

    def create_tag(self, repo: str, revision: str) -> None:
        repository = self.writable(repo)
        if repository is not None:
            repository.references[json.loads(self.body)["tag"]] = repository.commit_of(revision)
            self.answer(200, {})

    def describe(self, repo: str, revision: str = "main") -> None:
        repository = self.readable(repo)
        if repository is None:
            return
        commit = repository.commit_of(revision)
        if commit is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        files = sorted(repository.commits[commit].items())
        siblings = [{"rfilename": path, "size": len(content)} for path, (content, _) in files]
        described = {"_id": repo, "id": repo, "modelId": repo, "sha": commit, "private": repository.private, "tags": []}
        return self.answer(200, {**described, "siblings": siblings, "downloads": 0, "likes": 0})

    def list_tree(self, repo: str, revision: str, path: str | None = None) -> None:
        repository = self.readable(repo)
        if repository is None:
            return
        commit = repository.commit_of(revision)
        if commit is None:
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        if path:
            return self.answer(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
        entries = []
        for name, (content, is_lfs) in sorted(repository.commits[commit].items()):
            entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if is_lfs:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return self.answer(200, entries)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.readable(repo)
        if repository is None:
            return
        commit = repository.commit_of(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if path not in repository.commits[commit]:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content, is_lfs = repository.commits[commit][path]
        etag = hashlib.sha256(content).hexdigest() if is_lfs else hashlib.sha1(content).hexdigest()
        headers = {"X_Repo_Commit": commit, "ETag": f'"{etag}"', "Content_Type": "application/octet-stream"}
        if is_lfs:
            headers |= {"X_Linked_Etag": f'"{etag}"', "X_Linked_Size": str(len(content))}
        return self.answer(200, content, **headers)
