"""An adapter on the Hugging Face hub: the real client, against a server that speaks as much of the hub as it needs."""

import base64
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import yaml

from dualtune.config import parse_config
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.use.model_card import adapter_card
from dualtune.use.transfer.bundles.bundle import inspect

SHM = Path("/dev/shm")  # another file system than that of the tests, where there is one

TOKEN = "hf_" + "C4nAry" * 6
TRAINING = {"backend": "mlx", "steps": 40, "seed": 3, "final_loss": 0.5, "eval_loss_before": 2.25,
            "eval_loss": 0.75, "best_step": None, "train_documents": 320, "template": "chat"}  # fmt: skip


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories in memory. Every request has to have the token."""

    def do_GET(self):
        path, _, _ = self.path.partition("?")
        parts = path.strip("/").split("/")
        repo = self.server.repos.get("/".join(parts[2:4] if parts[0] == "api" else parts[:2]))
        if repo is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if parts[0] == "api":
            return self.reply_json(self.info(repo, "/".join(parts[2:4])))
        data = repo["files"].get("/".join(parts[4:]))
        if data is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self.reply(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": repo["sha"]})

    do_HEAD = do_GET

    def do_PUT(self):
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.reply(200, b"")

    def do_POST(self):
        self.server.asked.append(self.path)
        if self.server.fails:
            self.body()
            return self.reply(self.server.fails.pop(0), b"{}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        body = self.body()
        if self.path == "/api/repos/create":
            wish = json.loads(body)
            name = f"{wish.get('organization', 'me')}/{wish['name']}"
            private = wish.get("private", wish.get("visibility") == "private")
            self.server.repos[name] = {"private": private, "files": {".gitattributes": b""}, "sha": "0" * 40}
            return self.reply_json({"url": f"{self.address()}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        if "preupload" in parts:
            modes = [("lfs" if f["path"].endswith(".safetensors") else "regular", f) for f in json.loads(body)["files"]]
            files = [{"path": f["path"], "uploadMode": mode, "shouldIgnore": False} for mode, f in modes]
            return self.reply_json({"files": files})
        if parts[-1] == "batch":
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{self.address()}/lfs/{o['oid']}"}},
                }
                for o in json.loads(body)["objects"]
            ]
            return self.reply_json({"transfer": "basic", "objects": objects})
        return self.commit(self.server.repos["/".join(parts[2:4])], body)

    def commit(self, repo, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.server.large[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                repo["files"][value["path"]] = data
            elif line["key"] == "deletedFile":
                del repo["files"][value["path"]]
        repo["sha"] = hashlib.sha1(body).hexdigest()
        self.reply_json({"commitUrl": f"{self.address()}/me/x/commit/{repo['sha']}", "commitOid": repo["sha"]})

    def info(self, repo, name):
        files = [{"rfilename": file} for file in sorted(repo["files"])]
        return {"id": name, "sha": repo["sha"], "private": repo["private"], "siblings": files}

    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def body(self) -> bytes:
        assert self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path.startswith("/lfs/")
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply_json(self, table):
        self.reply(200, json.dumps(table).encode(), {"Content-Type": "application/json"})

    def reply(self, status, data, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, python):
    """The server, and `hub.run(...)` for the command line in a process that takes it for the hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repos, server.large, server.asked, server.fails = {}, {}, [], []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN,
           "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
           "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip

    def run(*args, **more):
        done = python("-c", "from dualtune.cli.main import main; main()", *args, env=env | more, cwd=tmp_path)
        assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
        return done

    server.run = run
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def adapter(tmp_path):
    def write(name="a", seed=0, layout="dual"):
        tensors = init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, seed=seed)
        spec = AdapterSpec(2, 4, 0.0, ("q_proj",))
        metadata = {"training": TRAINING, "base": {"name": "Qwen/Qwen3-0.6B"}}
        write_adapter(tmp_path / name, Adapter(spec, tensors, "Qwen/Qwen3-0.6B"), layout=layout, metadata=metadata)
        return tmp_path / name

    return write


def test_an_adapter_goes_to_the_hub_and_comes_back(hub, adapter, tmp_path):
    here = adapter()
    done = hub.run("push", "hf://me/tiny", here)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["me/tiny"]
    assert repo["private"] is True
    ours = {path.name: path.read_bytes() for path in here.iterdir()}
    assert json.loads(repo["files"]["dualtune.json"]) == json.loads(ours["dualtune.json"])
    assert all(repo["files"][name] == data for name, data in ours.items() if name != "dualtune.json")
    assert repo["files"].keys() == ours.keys() | {".gitattributes", "README.md"}
    assert not [data for data in repo["files"].values() if TOKEN.encode() in data]

    asked = len(hub.asked)
    assert "unchanged   hf://me/tiny" in hub.run("push", "hf://me/tiny", here).stdout
    assert hub.asked[asked:] == []  # nothing was written

    done = hub.run("pull", "hf://me/tiny")
    assert done.returncode == 0, done.stderr
    assert f"dualtune verify {tmp_path}/tiny/adapter --base Qwen/Qwen3-0.6B" in done.stdout
    moved = read_adapter(tmp_path / "tiny" / "adapter")
    assert all((moved.tensors[name] == x).all() for name, x in read_adapter(here).tensors.items())

    done = hub.run(
        "pull", "hf://me/tiny", "new/kept.tar", "--keep-packed", TMPDIR=str(SHM if SHM.is_dir() else tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert inspect(tmp_path / "new" / "kept.tar").bundle.kind == "adapter"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["kept.tar"]

    repo["files"]["adapter_model.safetensors"] = repo["files"]["adapter_model.safetensors"][:-4] + b"\0\0\0\1"
    repo["sha"] = "1" * 40
    done = hub.run("pull", "hf://me/tiny", "again")
    assert (done.returncode, "was changed" in done.stderr, (tmp_path / "again").exists()) == (6, True, False)


def test_another_adapter_takes_its_place_only_when_asked(hub, adapter, wording):
    hub.run("push", "hf://me/tiny", adapter())
    before = dict(hub.repos["me/tiny"]["files"])
    other = adapter("b", seed=1, layout="peft")
    done = hub.run("push", "hf://me/tiny", other)
    assert done.returncode == 2
    wording(done.stderr)
    assert hub.repos["me/tiny"]["files"] == before
    hub.fails += [503]  # once, on the way
    done = hub.run("push", "hf://me/tiny", other, "--force")
    assert done.returncode == 0, done.stderr
    assert hub.repos["me/tiny"]["files"].keys() == {path.name for path in other.iterdir()} | {
        "README.md",
        ".gitattributes",
    }


def test_what_is_public_is_what_was_asked_for(hub, adapter, wording):
    here = adapter()
    assert hub.run("push", "hf://me/open", here, "--public").returncode == 0
    assert hub.repos["me/open"]["private"] is False
    hub.repos["me/open"]["files"] = {}
    done = hub.run("push", "hf://me/open", here)
    assert done.returncode == 2
    wording(done.stderr)
    assert hub.repos["me/open"]["files"] == {}
    hub.repos["me/open"]["private"] = True
    done = hub.run("push", "hf://me/open", here, "--public")
    assert done.returncode == 2
    wording(done.stderr)


def test_what_the_hub_refuses_is_one_clear_error(hub, adapter):
    hub.fails += [403]
    done = hub.run("push", "hf://me/tiny", adapter())
    assert (done.returncode, "hf://me/tiny: the hub answered 403" in done.stderr) == (4, True)
    done = hub.run("pull", "hf://me/absent")
    assert (done.returncode, "no such repository, or no access to it" in done.stderr) == (4, True)
    done = hub.run("pull", "hf://me/absent", HF_HUB_OFFLINE="1")
    assert (done.returncode, "HF_HUB_OFFLINE is set" in done.stderr) == (4, True)
    done = hub.run("pull", "hf://me/absent", "--retries", 0, HF_ENDPOINT="http://127.0.0.1:1")
    assert (done.returncode, "gave up after 1 attempts" in done.stderr) == (4, True)


# --- the card --------------------------------------------------------------------------------------------------------


def test_the_card_says_what_was_recorded_and_nothing_else(adapter):
    config = parse_config(
        "model: {name: Qwen/Qwen3-0.6B}\ndata: {train: [rows.jsonl, openai/gsm8k]}\ntrain: {optimizer: sgd}"
    )
    found = read_adapter(adapter())
    text = adapter_card("me/tiny", found, config)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front == {"library_name": "peft", "tags": ["lora", "dualtune", "mlx"], "base_model": "Qwen/Qwen3-0.6B",
                     "base_model_relation": "adapter", "datasets": ["openai/gsm8k"]}  # fmt: skip
    rows = dict(
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line != "| | |"
    )
    assert rows == {
        "method": "LoRA", "rank": "2", "scale (alpha / rank)": "2", "modules": "q_proj", "backend": "mlx",
        "steps": "40", "seed": "3", "source": "rows.jsonl, openai/gsm8k", "documents trained on": "320",
        "training loss, last step": "0.5", "evaluation loss, before training": "2.25",
        "evaluation loss, after training": "0.75", "`train.optimizer`": "sgd",
        "`train.learning_rate`": "0.0002", "`train.schedule`": "cosine", "`train.warmup`": "0.03",
        "`train.weight_decay`": "0.01", "`data.max_length`": "2048",
        "`data.loss_on`": "assistant", "`model.dtype`": "auto", "`model.quantization`": "auto",
    }  # fmt: skip


def test_the_card_of_a_preference_run_names_its_objective_and_what_that_uses(adapter):
    text = "model: {name: m}\ndata: {train: t}\ntrain: {objective: orpo}\npreference: {beta: 0.2}"
    card = adapter_card("me/tiny", read_adapter(adapter()), parse_config(text))
    rows = [line for line in card.splitlines() if "objective" in line or "preference" in line]
    assert rows == [
        "| `train.objective` | orpo |", "| `preference.beta` | 0.2 |", "| `preference.sft_weight` | auto |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ("adapter: {dropout: 0, merge_for: q4_0}\ntrain: {label_smoothing: 0.1}",
         ["| `adapter.dropout` | 0 |", "| `adapter.merge_for` | q4_0 |", "| `train.label_smoothing` | 0.1 |"]),
        ("adapter: {dropout: 0}\ntrain: {objective: grpo}\nrollouts: {rewards: [exact, number], samples: 4}",
         ["| `adapter.dropout` | 0 |", "| `rollouts.rewards` | exact, number |", "| `rollouts.samples` | 4 |"]),
        ("", []),
    ],
)  # fmt: skip
def test_a_card_names_what_is_not_the_default(adapter, more, rows):
    """What a reader cannot know otherwise: how it starts, for which format it is trained, what else is minimized."""
    config = parse_config(f"model: {{name: m}}\ndata: {{train: t}}\n{more}")
    card = adapter_card("me/tiny", read_adapter(adapter()), config)
    keys = ("| `adapter.", "| `train.label", "| `rollouts.")
    assert [line for line in card.splitlines() if line.startswith(keys)] == rows


def test_a_card_of_what_was_not_recorded_invents_nothing(tmp_path):
    tensors = init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, seed=0)
    write_adapter(tmp_path / "a", Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, None), layout="peft")
    (tmp_path / "a" / "dualtune.json").unlink()
    text = adapter_card("me/tiny", read_adapter(tmp_path / "a"), None)
    assert "Nothing was recorded." in text and "base model that was not recorded" in text
    assert yaml.safe_load(text.split("---\n")[1]).keys() == {"library_name", "tags"}
    assert "loss" not in text and "Data" not in text


def test_a_card_shows_the_texts_of_others_as_texts(adapter, tmp_path):
    path = adapter() / "dualtune.json"
    table = json.loads(path.read_text())
    table["training"]["backend"] = "x | y\n\n# <script>"
    path.write_text(json.dumps(table))
    assert "| backend | x \\| y  # &lt;script> |" in adapter_card("me/tiny", read_adapter(tmp_path / "a"), None)


def test_the_python_of_the_card_is_python(adapter):
    text = adapter_card("me/tiny", read_adapter(adapter()), None)
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "card", "exec")
        assert '"Qwen/Qwen3-0.6B"' in block and '"me/tiny"' in block
