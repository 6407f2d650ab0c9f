"""Fixtures for tests in a real browser: the built page, a real server, headless Chromium, feeders.

`chromium` and `page_files` fail, and say what to run, when something is missing; nothing here ever skips.
Playwright's sync API keeps an event loop while it is open, so its fixtures end with their module.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, StorageState, sync_playwright
from playwright.sync_api import Error as PlaywrightError
from tests.e2e.feeder import Feeder
from tests.support.databases import lay_database

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60
PAGE_TIMEOUT_MS = 30_000  # a machine with two busy cores paints late; nothing waits this long when all is well
BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LEFT_OUT_BY_PLAYWRIGHT = (
    "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning",
    "AvoidCorsURLLoaderRestartOnRedirect", "TcpPortRandomizationWin", "OptimizationHints", "NetworkTimeServiceQuerying",
    "AimEnabled", "PreconnectToSearch", "msForceBrowserSignIn", "msEdgeUpdateLaunchServicesPreferredVersion",
)  # fmt: skip
"""Chromium obeys the last list of features alone, which is that of `BROWSER_ARGS`: it repeats Playwright's own."""
LEFT_OUT = (*LEFT_OUT_BY_PLAYWRIGHT, "WebUIOmniboxPopup", "WebUIOmniboxFullPopup", "WebUIOmniboxAimPopup")
"""With them Chromium loads two pages of its own for the address line, which nobody sees, with each window: four fifths
of the processor time that an empty page takes (1.7 to 2.1 s and 0.4 s on busy cores, Chromium 156)."""
BROWSER_ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    f"--disable-features={','.join(LEFT_OUT)}",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium, or a failure that names the command that brings one."""
    named = os.environ.get("PENSTOCK_CHROMIUM")
    found = named or next((path for name in BROWSER_NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium on this machine. Run: sudo apt-get install -y chromium  (or set PENSTOCK_CHROMIUM)")
    return found


@pytest.fixture(scope="session")
def page_files() -> Path:
    """The built page, or a failure that names the command that builds it."""
    folder = ROOT / "web" / "dist"
    if not (folder / "index.html").is_file():
        pytest.fail("web/dist is not built. Run: make web/dist/index.html  (or: cd web && npm ci && npm run build)")
    return folder


@dataclass(frozen=True)
class RunningServer:
    """A server process and its admin token."""

    url: str
    token: str
    state_dir: Path
    pid: int

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Call the API as admin; None for an answer without a body."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v1{path}", method=method, data=content, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def login_url(self) -> str:
        """A link that logs a browser in, once."""
        return f"{self.url}/login#code={self.call('POST', '/login-codes')['code']}"


def start_server(
    state_dir: Path, static_dir: Path, port: int = 0
) -> tuple[RunningServer, subprocess.Popen[bytes]]:  # fmt: skip
    """Start a server, on a free port if none is given, and wait until it answers."""
    lay_database(state_dir)
    command = [sys.executable, "-m", "penstock_server", "--port", str(port), "--state-dir", str(state_dir),
               "--static-dir", str(static_dir)]  # fmt: skip
    with (state_dir / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        running = _answering(state_dir, process.pid)
        if running is not None:
            return running, process
        time.sleep(0.05)
    stop(process)
    pytest.fail(
        f"the server did not answer within {START_TIMEOUT_S} s:\n{(state_dir / 'server.log').read_text()[-3000:]}"
    )


def _answering(state_dir: Path, pid: int) -> RunningServer | None:
    try:
        said = json.loads((state_dir / "server.json").read_text())
        token = (state_dir / "admin.token").read_text().strip()
        with urllib.request.urlopen(f"{said['url']}/healthz", timeout=5):
            return RunningServer(said["url"], token, state_dir, pid)
    except (FileNotFoundError, json.JSONDecodeError, urllib.error.URLError):
        return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that this test started."""
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, page_files: Path) -> Iterator[RunningServer]:
    """A server of this module's own, without jobs, that serves the built page."""
    running, process = start_server(tmp_path_factory.mktemp("server"), page_files)
    yield running
    stop(process)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One headless Chromium for the module."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(BROWSER_ARGS))
        yield launched
        launched.close()


@dataclass
class Watched:
    """A page, and everything that it complained about."""

    page: Page
    problems: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def watch(self) -> None:
        """Collect errors of the console, of scripts, and of requests that failed."""
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def unexpected(self) -> list[str]:
        """The complaints that the test did not announce."""
        return [text for text in self.problems if not any(part in text for part in self.expected)]


Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def logged_in(browser: Browser, server: RunningServer) -> StorageState:
    """The cookie of one login by code, for all pages of the module."""
    context = browser.new_context()
    context.set_default_timeout(PAGE_TIMEOUT_MS)
    page = context.new_page()
    page.goto(server.login_url())
    page.wait_for_url(f"{server.url}/")
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def open_page(browser: Browser, server: RunningServer, logged_in: StorageState) -> Iterator[Open]:
    """Open pages that are logged in (or not); fails at the end if one complained about something unexpected."""
    contexts: list[BrowserContext] = []
    opened: list[Watched] = []

    def open_one(path: str = "/", *, login: bool = True, **options: Any) -> Watched:
        settings: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark", **options}
        context = browser.new_context(storage_state=logged_in if login else None, **settings)
        contexts.append(context)
        context.set_default_timeout(PAGE_TIMEOUT_MS)
        watched = Watched(context.new_page())
        watched.watch()
        opened.append(watched)
        watched.page.goto(server.url + path)
        return watched

    yield open_one
    for context in contexts:
        try:
            context.close()
        except PlaywrightError as error:
            opened[0].problems.append(f"closing: {error}")
    complaints = [text for watched in opened for text in watched.unexpected()]
    assert complaints == []


@pytest.fixture
def browser_page(open_page: Open) -> Watched:
    """A page that is logged in and shows the jobs."""
    return open_page()


@pytest.fixture
def feed(server: RunningServer) -> Iterator[Callable[..., Feeder]]:
    """Attach feeders; those that are still open at the end say GOODBYE."""
    feeders: list[Feeder] = []

    def attach(job_name: str, **options: Any) -> Feeder:
        feeder = Feeder(server.url, server.token, job_name, **options)
        feeders.append(feeder)
        return feeder

    yield attach
    for feeder in feeders:
        feeder.close()
