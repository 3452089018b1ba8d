"""The live page, drawn by a real browser; and the history that it draws."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
import time
from importlib import resources

import numpy as np
import pytest
from serving import Connection, ask, fake_runner, get, infer_request, serving

X = np.ones((1, 4, 32), np.float32)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here to draw the live page with")


@pytest.fixture(scope="module")
def server():
    """A server whose history holds a second in which it answered 600 requests and refused one."""
    with serving(fake_runner()) as running:
        for _ in range(600):
            assert ask(running.port, infer_request(X)).status == 200
        assert ask(running.port, infer_request(np.repeat(X, 7, 0))).status == 400
        while sum(second.answered for second in running.stats.history) < 600:
            time.sleep(0.05)
        yield running


def drawn(port, folder):
    """The page's DOM after a few of its polls."""
    return dumped(f"http://127.0.0.1:{port}/", folder, 2500)


def dumped(address, folder, after_ms):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += [f"--virtual-time-budget={after_ms}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


SLOW = """
// A server of 40 seconds' history, one batch of 10 rows in each, whose answers take 1.6 s.
const from = Date.now() / 1000 | 0, live = {
  model: "slow", version: "1", ready: true, received: 1, in_progress: 0, outcomes: {},
  window: { count: 1, p50_ms: 1, p99_ms: null, p99_interval_ms: [1, null] },
};
const second = (time_s) => ({ time_s, answered: 1, others: 0, tokens: 1, p50_ms: 1, p99_ms: 1, queued: 0,
  pending: 0, batches: { 10: 1 } });
window.fetch = (address) => new Promise((answer) => setTimeout(() => {
  const since = Number(address.split("=")[1]), times = Array.from({ length: 40 }, (_, i) => from - 40 + i);
  const seconds = times.filter((time) => time > since).map(second);
  answer({ status: 200, ok: true, json: async () => ({ ...live, time_s: from, seconds }) });
}, 1600));
"""
LOCKED = """
// As a browser's own, it throws where a header cannot be sent; nothing is let in.
window.fetch = async (_, { headers }) => { new Headers(headers); return { status: 401 }; };
addEventListener("DOMContentLoaded", () => setTimeout(() => {
  document.getElementById("token").value = "пароль";
  document.getElementById("ask").requestSubmit();
  setTimeout(() => { document.title = `kept: ${sessionStorage.getItem("token")}`; }, 100);
}, 100));
"""


def drawn_with(script, folder):
    """The page's DOM after 6 s of its own time, in which `script` ran first and stands for the server."""
    text = resources.files("mha_deploy.serving").joinpath("page.html").read_text(encoding="utf-8")
    page = folder / "page.html"
    page.write_text(text.replace("<head>", f"<head><meta charset=utf-8><script>{script}</script>", 1))
    return dumped(page.as_uri(), folder / "profile", 6000)


def shown(dom, name):
    return re.search(rf'id="{name}"[^>]*>([^<]*)<', dom).group(1)


@contextlib.contextmanager
def under_load(port):
    """Requests without end while the block runs: however long a browser takes, the window holds some."""
    done = threading.Event()

    def client():
        with Connection(port) as connection:
            while not done.is_set():
                connection.send(infer_request(X))
                connection.reply()

    thread = threading.Thread(target=client)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@needs_chromium
def test_the_page_shows_what_the_server_does(server, tmp_path):
    with under_load(server.port):
        dom = drawn(server.port, tmp_path)
    assert shown(dom, "model") == "small, version 1"
    assert shown(dom, "state") == "ready"
    assert re.fullmatch(r"[\d,]+ received, [01] in progress", shown(dom, "counts"))
    assert float(shown(dom, "p50")) > 0
    assert float(shown(dom, "p99")) >= float(shown(dom, "p50"))
    assert float(shown(dom, "rate")) > 0
    assert shown(dom, "queued") in "01"
    for chart in ("rates", "latency", "queue"):
        drawing = re.search(rf'<svg id="{chart}".*?</svg>', dom, re.DOTALL).group()
        assert len(re.findall(r'<path class="stroke" d="M[^"]+"', drawing)) == 2
        assert "NaN" not in drawing
    outcomes = re.search(r'id="outcomes">(.*?)</section>', dom, re.DOTALL).group(1)
    answered = re.search(r"answered</span>.*?<span>([\d,]+)</span>", outcomes).group(1)
    assert 600 <= int(answered.replace(",", "")) <= server.stats.received
    assert re.search(r"refused</span>.*?<span>1</span>", outcomes)
    batches = re.search(r'id="batches">(.*?)id="outcomes"', dom, re.DOTALL).group(1)
    assert re.search(r"<span>1</span>.*?<span>[\d,]+</span>", batches)


@needs_chromium
def test_the_page_asks_for_the_token(tmp_path):
    with serving(fake_runner(), token="s3cret") as running:
        dom = drawn(running.port, tmp_path)
    assert shown(dom, "state") == "locked"
    assert re.search(r'<form class="card" id="ask">', dom)  # hidden until then


@needs_chromium
def test_a_server_slower_than_the_polls_has_each_second_drawn_once(tmp_path):
    dom = drawn_with(SLOW, tmp_path)
    (batches,) = re.findall(r'<span>10</span><div class="bar"><i [^>]*></i></div><span>(\d+)</span>', dom)
    assert batches == "40"
    line = re.search(r'id="rates".*?class="stroke" d="([^"]*)"', dom).group(1)
    across = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
    assert across == sorted(across)


@needs_chromium
def test_a_token_that_no_header_holds_is_a_wrong_one_and_is_not_kept(tmp_path):
    dom = drawn_with(LOCKED, tmp_path)
    assert shown(dom, "state") == "locked"
    assert re.search(r'<form class="card" id="ask">', dom)
    assert "<title>kept: null</title>" in dom


def test_the_page_loads_nothing_from_elsewhere(server):
    page = get(server.port, "/")
    text = page.body.decode()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    addresses = re.findall(r"https?://[^\s\"'`]+", text)
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)


def test_each_second_is_closed_once(server):
    times = [second.time_s for second in server.stats.history]
    while len(server.stats.history) < len(times) + 2:
        time.sleep(0.05)
    times = [second.time_s for second in server.stats.history]
    assert times == sorted(set(times))
