"""The live page, drawn by a real browser; and the history that it draws."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
import time

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
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--virtual-time-budget=2500", "--dump-dom", f"http://127.0.0.1:{port}/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


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
