"""The built site: it builds without a warning, asks no other host for anything, and its search works in a browser."""

import html
import http.server
import json
import queue
import re
import runpy
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from pages import ROOT

build = runpy.run_path(str(ROOT / "scripts" / "site" / "__main__.py"))["build"]
PATIENCE_S = 600  # until the page counts as broken: a safety net on a machine of any load
RESOURCE = re.compile(r'<(?:script|img|iframe|source)[^>]*\bsrc="([^"]*)"|<link[^>]*\bhref="([^"]*)"')
# The page around the site: it types into the search, and says what the site has shown and loaded.
AROUND = """<!doctype html><title>-</title><iframe src="index.html" width="1200" height="900"></iframe><script>
const until = async what => {
  for (let found; ; await new Promise(done => setTimeout(done, 50))) if (found = what()) return found;
};
onload = async () => {
  const { contentDocument: page, contentWindow: frame } = document.querySelector("iframe");
  const style = frame.getComputedStyle(page.body);
  page.querySelector(".md-search__button").click();
  const deep = (root, name) => [...root.querySelectorAll("*")].flatMap(
    each => [...(each.matches(name) ? [each] : []), ...(each.shadowRoot ? deep(each.shadowRoot, name) : [])]);
  const input = await until(() => deep(page, "input[type=text], input[type=search], input:not([type])")[0]);
  input.value = "schedule_free";
  input.dispatchEvent(new frame.Event("input", { bubbles: true }));
  const hits = await until(() => {
    const links = deep(page, "a[href]").map(each => each.href).filter(each => each.includes("h=schedule"));
    return links.length && links;
  });
  const loaded = frame.performance.getEntriesByType("resource").map(each => each.name);
  const found = { hits, loaded, background: style.backgroundColor, title: page.title };
  fetch("found", { method: "POST", body: JSON.stringify(found) });
};
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("zensical")
    home = tmp_path_factory.mktemp("docs") / "built"
    done = subprocess.run([sys.executable, ROOT / "scripts" / "site", home], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "site"


def test_every_page_is_built(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages - {Path("decisions/README.html")} <= built and Path("decisions/index.html") in built
    config = (site / "reference" / "config.html").read_text(encoding="utf-8")
    assert (
        'id="trainlearning_rate"' in config
        and "dualtune adapter merge" in (site / "reference" / "commands.html").read_text()
    )
    assert "class StepRecord" in re.sub("<[^>]*>", "", (site / "reference" / "python.html").read_text(encoding="utf-8"))


def test_help_fits_into_the_lines_that_the_site_shows(site):
    page = html.unescape((site / "reference" / "commands.html").read_text(encoding="utf-8"))
    blocks = re.findall(r"<pre.*?</pre>", page, re.S)
    lines = [line for block in blocks for line in re.sub("<[^>]*>", "", block).splitlines()]
    assert len(blocks) > 30 and 70 < max(map(len, lines)) <= 80


def test_keys_in_tables_stay_whole(site):
    page = (site / "coming_from" / "trl.html").read_text(encoding="utf-8")
    assert '<link rel="stylesheet" href="../site.css' in page and (site / "site.css").is_file()


def test_a_page_loads_nothing_from_elsewhere(site):
    found = {
        "".join(match) for path in site.rglob("*.html") for match in RESOURCE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 10 and not [each for each in found if re.match(r"\w*:?//", each)]
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert styles and not re.search(r"url\(['\"]?(https?:)?//|@import", styles)


@pytest.mark.parametrize(("link", "is_fine"), [("index.md", True), ("no-such-page.md", False), ("#no-such", False)])
def test_a_broken_link_ends_the_build(link, is_fine, tmp_path):
    """A page of the navigation that is missing does not."""
    pytest.importorskip("zensical")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n[b]({link})\n", encoding="utf-8")
    assert (build(tmp_path) == 0) is is_fine


class AskedPage(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and takes what the page around it has found."""

    found: queue.Queue

    def do_POST(self):
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_the_search_works_without_the_internet(site, chromium, tmp_path):
    (site / "around.html").write_text(AROUND, encoding="utf-8")
    AskedPage.found = queue.Queue()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(AskedPage, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home, said = f"http://127.0.0.1:{server.server_port}/", tmp_path / "said"
        command = [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--blink-settings=preferredColorScheme=0", "--enable-logging=stderr", "--remote-debugging-port=0",
            f"--user-data-dir={tmp_path / 'profile'}", f"{home}around.html",
        ]  # fmt: skip
        with said.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as browser:
            try:
                shown = AskedPage.found.get(timeout=PATIENCE_S)
            finally:
                browser.terminate()
        server.shutdown()
    assert any("averaging" in hit or "config" in hit for hit in shown["hits"])
    assert shown["loaded"] and all(each.startswith((home, "data:", "blob:")) for each in shown["loaded"])
    assert max(map(int, re.findall(r"\d+", shown["background"])[:3])) < 80  # dark, as this browser asks for
    assert not [line for line in said.read_text(errors="replace").splitlines() if ":CONSOLE" in line]
