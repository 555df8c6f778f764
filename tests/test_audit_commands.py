"""`headwater audit judge`, from the words typed to the files left behind."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.evaluation.audit.judge_items import save_items, synthetic_items


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with items, in which commands are typed."""
    save_items(synthetic_items(24), tmp_path / "items.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def type_(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["audit", "judge", *words])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return " ".join((done.stderr if code == 2 else done.stdout).split())


class _Silent(BaseHTTPRequestHandler):
    """An endpoint that never gives a verdict."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = json.dumps(
            {
                "choices": [{"message": {"content": "Both are [bold]fine[/]."}}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has spent its budget hangs up; that is no news."""


@pytest.fixture
def url() -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), _Silent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_help_has_an_example():
    assert "headwater audit judge --synthetic position" in type_("--help")


def test_a_made_judge_is_audited(here: Path):
    said = type_("--synthetic", "position", "--limit", "60", "--only", "position", "--only", "rubric", "--out", "made")
    assert "position found +0." in said
    assert "rubric not found" in said
    found = json.loads((here / "made" / "audit.json").read_text())
    assert found["verdicts"] == {"position": "found", "rubric": "not found"}
    assert found["items"] == 60
    assert (here / "made" / "audit.html").read_text().startswith("<!doctype html>")


def test_strict_fails_where_a_bias_is_found(here: Path):
    words = ("--limit", "60", "--only", "position", "--strict")
    type_("--synthetic", "position", *words, code=1)
    type_("--synthetic", "fair", *words)


def test_an_endpoint_without_verdicts_is_neither_found_nor_cleared(here: Path, url: str):
    words = ("--items", "items.jsonl", "--base-url", url, "--model", "m", "--limit", "4", "--cache", "kept")
    said = type_(*words, "--input-price", "10", "--own", "own")
    assert said.count("not enough data") == 13
    found = json.loads((here / "audit" / "audit.json").read_text())
    assert found["asked"]["unparsed"] == found["asked"]["asked"] > 50
    usage = found["spent"]["usage"]
    assert usage["cost"] == pytest.approx(usage["replies"] * 10 * 10 / 1e6)
    type_(*words, "--out", "again")
    assert json.loads((here / "again" / "audit.json").read_text())["spent"]["usage"]["requests"] == 0


def test_a_budget_ends_an_audit(here: Path, url: str):
    words = ("--items", "items.jsonl", "--base-url", url, "--model", "m")
    assert "max_cost is 0.001" in type_(*words, "--input-price", "100", "--max-cost", "0.001", code=2)


def test_a_model_of_here_is_audited(here: Path):
    words = ("--items", "items.jsonl", "--model", "fake:llama", "--limit", "2", "--only", "position")
    assert "not enough data" in type_(*words, "--max-tokens", "4", "--pointwise", "--no-guard")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to judge"),
        (["--items", "items.jsonl"], "Nobody is named"),
        (["--items", "none.jsonl", "--synthetic", "fair"], "no data file"),
        (["--synthetic", "fiar"], "Did you mean 'fair'"),
        (["--synthetic", "fair", "--model", "m"], "no effect"),
        (["--synthetic", "fair", "--only", "positon"], "Did you mean 'position'"),
        (["--synthetic", "fair", "--own", "nobody"], "No item has an answer by 'nobody'"),
        (["--synthetic", "fair", "--rubric", "none.txt"], "cannot be read"),
        (["--items", "items.jsonl", "--model", "m", "--max-cost", "1"], "--max-cost belongs to an endpoint"),
        (["--items", "items.jsonl", "--model", "m", "--base-url", "host"], "http://"),
        (["--items", "items.jsonl", "--model", "", "--base-url", "http://127.0.0.1:9"], "model"),
    ],
)
def test_words_that_cannot_work(words: list[str], said: str, here: Path):
    assert said in type_(*words, code=2)
