"""The studio in a real browser: Debian's Chromium, driven by Playwright.

One studio with two ranks serves all tests. No test writes a video that another one looks at.
"""

from __future__ import annotations

import http.server
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import pytest
from PIL import Image
from runs import ROOT, write_random_model
from studio_runs import log_step, write_run

from opensora_sp.data.video import read_video

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]
MILLISECONDS = 120_000  # that a page has, on a machine with other work
RUNS = {"a/same", "b/same", "one", "two"}


@dataclass
class Studio:
    """A studio of two ranks, and all that its browsers have asked for.

    Attributes:
        trap: the proxy of all HTTP clients of its processes, which nobody may ask.
        asked: addresses of the requests of its pages.
    """

    process: subprocess.Popen[str]
    url: str
    folder: Path
    browser: Any
    trap: socket.socket
    asked: list[str] = field(default_factory=list)

    def page(self, width: int = 1280, height: int = 900) -> Any:
        """A user who opens the address, and agrees to all that is asked."""
        context = self.browser.new_context(viewport=dict(width=width, height=height))
        context.on("request", lambda request: self.asked.append(request.url))
        page = context.new_page()
        page.on("dialog", lambda dialog: dialog.accept())
        page.set_default_timeout(MILLISECONDS)
        page.goto(self.url)
        page.get_by_role("button", name="Sample", exact=True).wait_for()
        return page

    def ranks(self) -> list[int]:
        children = psutil.Process(self.process.pid).children()
        return sorted(each.pid for each in children if "spawn_main" in " ".join(each.cmdline()))

    def fetch(self, path: str, *, token: bool = True, **headers: str) -> tuple[int, bytes]:
        """Status and body of a path, for somebody with the token or without it."""
        start = self.url if token else "http://" + urlsplit(self.url).netloc + "/"
        request = urllib.request.Request(start + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    folder = tmp_path_factory.mktemp("studio")
    (folder / "outputs" / "model").mkdir(parents=True)
    write_random_model(folder / "outputs" / "model")
    for name in RUNS:
        write_run(folder / "outputs" / name)

    trap = socket.create_server(("127.0.0.1", 0))
    trap.setblocking(False)
    proxy = f"http://127.0.0.1:{trap.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-m", "opensora_sp.cli", "studio", "outputs", "--port", "0"]
    options: dict[str, Any] = dict(cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    log = (folder / "log").open("w")
    process = subprocess.Popen([*command, "--nproc", "2"], stderr=log, **options)
    with process, importlib.import_module("playwright.sync_api").sync_playwright() as driver:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), (folder / "log").read_text()
            arguments = ["--no-sandbox", "--disable-gpu"]
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
            yield Studio(process, url, folder, browser, trap)
            browser.close()
        finally:
            process.terminate()


def field_of(page: Any, label: str) -> Any:
    """By the start of its name, to which an error is added."""
    return page.get_by_label(re.compile(rf"^\s*(number input for )?{label}\b")).first


def is_focused(element: Any) -> bool:
    return bool(element.evaluate("element => element === document.activeElement"))


def sample(page: Any, prompt: str, **fields: str) -> None:
    """Type a prompt and other fields, and press Enter in the prompt."""
    for label, text in (fields | {"Prompt": prompt}).items():
        field_of(page, label).fill(text)
    field_of(page, "Prompt").press("Enter")


def await_state(page: Any, text: str) -> None:
    page.locator("[role=status]").filter(has_text=text).first.wait_for()


def test_a_typed_prompt_becomes_a_video_that_plays(studio: Studio, tmp_path: Path) -> None:
    """By the keyboard alone; then again from the history, after the page is loaded anew."""
    page = studio.page()
    # Empty fields show what the run has.
    for label, text in (("Size", "28x24"), ("Frames", "5"), ("FPS", "8"), ("Guidance", "4")):
        page.get_by_placeholder(text, exact=True).first.wait_for()
        assert field_of(page, label).get_attribute("placeholder") == text
    field_of(page, "Prompt").focus()
    page.keyboard.type("a red circle")
    for label in ("Negative prompt", "Size", "Aspect ratio", "Frames", "FPS", "Steps"):
        page.keyboard.press("Tab")
        assert is_focused(field_of(page, label)), label
    page.keyboard.type("500")
    page.get_by_role("button", name="Sample", exact=True).focus()
    page.keyboard.press("Enter")

    await_state(page, "left")
    preview = page.get_by_alt_text("preview")
    first = preview.get_attribute("src")
    page.wait_for_function("old => document.querySelector('[alt=preview]')?.src != old", arg=first)
    await_state(page, "done")

    video = page.locator("#shown video")
    video.wait_for()
    page.wait_for_function("document.querySelector('#shown video').readyState >= 2")
    shown = video.evaluate("video => [video.videoWidth, video.videoHeight, video.error]")
    assert shown == [24, 28, None] and video.evaluate("video => video.duration") > 0.5
    status, content = studio.fetch(video.get_attribute("src"))
    (tmp_path / "a.mp4").write_bytes(content)
    assert status == 200 and read_video(tmp_path / "a.mp4", num_frames=5)[0].shape == (5, 28, 24, 3)

    (metadata,) = (studio.folder / "studio").glob("*/000-a-red-circle.json")
    facts = json.loads(metadata.read_text())
    assert facts["config"]["scheduler"]["num_sampling_steps"] == 500
    assert f"seed {facts['seed']}" in page.locator("#queue").inner_text()

    page.reload()
    page.locator("#history").get_by_text(f"a red circle | seed {facts['seed']}").click()
    page.locator("#shown video").wait_for()
    assert "a red circle" in page.locator("#metadata").inner_text()


def test_requests_wait_in_one_queue_and_are_cancelled(studio: Studio) -> None:
    """Of two users; the ranks stay."""
    page, other = studio.page(), studio.page()
    sample(page, "long", Steps="100000")
    await_state(page, "step")
    ranks = studio.ranks()
    sample(other, "many", Steps="3", Videos="2", Seed="7")
    await_state(other, "waiting for 2 before it")
    sample(other, "last", Videos="1", Seed="")
    await_state(other, "waiting for 3 before it")
    titles = [row.inner_text().split("\n")[0] for row in other.locator("#queue article").all()]
    assert titles[:2] == ["many seed 7", "many seed 8"]
    assert re.fullmatch("last seed [0-9]{1,10}", titles[2])

    page.get_by_role("button", name="Cancel", exact=True).focus()
    page.keyboard.press("Enter")
    await_state(page, "cancelled")
    other.locator("#shown").get_by_text("last").wait_for()
    assert other.locator("#queue [role=status]").all_inner_texts() == ["done"] * 3

    sample(page, "long", Videos="2")
    await_state(page, "waiting for 1 before it")
    page.get_by_role("button", name="Cancel all").click()
    page.locator("[role=status]").get_by_text("cancelled", exact=True).nth(2).wait_for()

    # A tab that is closed cancels its requests.
    sample(page, "left alone", Videos="1")
    await_state(page, "step")
    sample(other, "next")
    await_state(other, "waiting for 1 before it")
    page.close()
    other.locator("#shown").get_by_text("next").wait_for()
    assert studio.ranks() == ranks and len(ranks) == 2


def test_results_are_compared_and_sampled_again_with_their_references(
    studio: Studio, tmp_path: Path
) -> None:
    page, other = studio.page(), studio.page()
    page.get_by_role("button", name="References and LoRA").click()
    Image.new("RGB", (24, 28), "red").save(tmp_path / "kept.png")
    page.locator("input[type=file]").set_input_files(tmp_path / "kept.png")
    page.get_by_text("kept.png").first.wait_for()
    page.get_by_label("Frames that references set").click()
    page.get_by_role("option", name="reference 1 is the last frame").click()
    page.get_by_role("img", name="part 1 of 1, frame 4 by reference 1").wait_for()
    sample(page, "compared", Steps="3", Seed="11")
    page.locator("#shown").get_by_text("compared | seed 11").wait_for()
    sample(page, "compared", Steps="4")
    captions = page.locator("#history").get_by_text("compared | seed 11")
    captions.nth(1).wait_for()
    page.get_by_label("Compare with the one before").check()
    page.locator("#shown th").get_by_text("config.scheduler.num_sampling_steps").wait_for()
    assert page.locator("#shown video").count() == 2
    assert "seed" not in page.locator("#shown tbody").inner_text()

    other.locator("#history").get_by_text("compared | seed 11").nth(1).click()
    other.locator("#shown").get_by_text("compared").wait_for()
    other.get_by_role("button", name="Use these settings").click()
    other.wait_for_function(
        "[...document.querySelectorAll('input, textarea')].some(e => e.value == 'compared')"
    )
    assert [field_of(other, label).input_value() for label in ("Steps", "Seed")] == ["3", "11"]
    field_of(other, "Prompt").press("Enter")
    other.locator("#history").get_by_text("compared | seed 11").nth(2).wait_for()
    again, _, first = sorted((studio.folder / "studio").glob("*-compared"), reverse=True)
    assert (again / "000-compared.0.png").read_bytes() == (tmp_path / "kept.png").read_bytes()
    videos = [read_video(folder / "000-compared.mp4", num_frames=5)[0] for folder in (first, again)]
    assert (videos[0] == videos[1]).all()
    await_state(other, "done")
    other.get_by_role("button", name="Delete").click()
    other.locator("#history").get_by_text("compared | seed 11").nth(2).wait_for(state="detached")
    assert first.exists() != again.exists()


def test_a_killed_rank_fails_its_request_alone(studio: Studio) -> None:
    page = studio.page()
    sample(page, "a green circle", Steps="100000")
    await_state(page, "step")
    killed = studio.ranks()
    psutil.Process(killed[1]).kill()
    error = page.locator("pre[role=alert]").first.inner_text()
    assert "-9]" in error and "expected all 2 ranks to live" in error and "try again" in error

    sample(page, "a green circle", Steps="3")
    await_state(page, "done")
    assert not set(studio.ranks()) & set(killed)


def test_what_cannot_be_sampled_is_an_error_at_its_field(studio: Studio, tmp_path: Path) -> None:
    page = studio.page()
    (tmp_path / "secret.png").write_bytes(b"no image")
    outside = json.dumps({"reference_path": str(tmp_path / "secret.png")})
    for label, prompt, fields, message in (
        ("Size", "a", {"Size": "wide"}, "got Size 'wide'"),
        ("Prompt", "a" + outside, {"Size": ""}, "got the path"),
        ("Prompt", "", {}, "got no prompt;"),
    ):
        sample(page, prompt, **fields)
        marked = page.locator(".refused").filter(has_text=message)
        marked.wait_for()
        assert marked.inner_text().strip().startswith(label)
        assert "; expected" in page.locator("pre[role=alert]").first.inner_text().replace("\n", " ")

    page.get_by_role("button", name="References and LoRA").click()
    (tmp_path / "a.txt").write_text("text")
    with (tmp_path / "big.mp4").open("wb") as file:
        file.truncate(2 * 10**9)
    for name, text in (
        ("a.txt", "Only image, ?video allowed"),
        ("big.mp4", "exceed the maximum allowed size"),
        ("secret.png", "secret.png"),
    ):
        page.locator("input[type=file]").set_input_files(tmp_path / name)
        page.get_by_text(re.compile(text)).first.wait_for()
    sample(page, "a")
    page.locator(".refused").get_by_text("References got").wait_for()

    refused = quote(str(tmp_path / "secret.png"))
    assert studio.fetch(f"media?path={refused}")[0] == 404
    assert studio.fetch(f"media?path={studio.folder}/outputs/model/config.json")[0] == 404
    assert studio.fetch(f"gradio_api/file={refused}")[0] in (403, 404)
    for path in ("", "config", f"media?path={refused}", "wrong/", "?token=" + studio.url):
        assert studio.fetch(path, token=False)[0] == 403


class _Listener(http.server.BaseHTTPRequestHandler):
    """Another user's server on this host, which keeps what browsers send it."""

    def do_GET(self) -> None:
        self.server.received.append(f"{self.path}\n{self.headers}")  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<title>another</title>")

    def log_message(self, *_: Any) -> None: ...


def test_another_server_on_the_host_learns_no_token(studio: Studio) -> None:
    """Neither by cookies, which reach every port, nor as a referrer, nor by asking itself."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Listener) as other:
        other.received = []  # type: ignore[attr-defined]
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{other.server_port}"
        page = studio.page()
        page.evaluate("address => { location.href = address + '/link' }", address)
        page.wait_for_url(f"{address}/link")
        ask = "url => fetch(url, {credentials: 'include'}).then(() => 'read', () => 'refused')"
        assert page.evaluate(ask, studio.url + "config") == "refused"
        cookies = page.context.cookies()
        other.shutdown()
    studio.asked[:] = [url for url in studio.asked if not url.startswith(address)]

    received = "".join(other.received)  # type: ignore[attr-defined]
    assert "/link" in received and studio.url.split("/")[-2] not in received
    replayed = "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in cookies)
    for path in ("", "config"):
        assert studio.fetch(path, token=False, Cookie=replayed)[0] == 403
    assert studio.fetch("config", Origin=address)[0] == 403
    assert studio.fetch("config", Origin="http://" + urlsplit(studio.url).netloc)[0] == 200


def test_the_runs_tab_follows_runs_that_train(studio: Studio) -> None:
    outputs, first = studio.folder / "outputs", "document.querySelector('.js-plotly-plot')"
    for name in RUNS:
        (outputs / name / "run.lock").touch()
        log_step(outputs / name, 4)
    removed = write_run(outputs / "removed")
    page = studio.page()
    page.get_by_role("tab", name="Runs").click()
    page.locator(".js-plotly-plot .trace").first.wait_for()

    # Choices stay while the list changes.
    drawn = page.evaluate(f"{first}.data.at(-1).name")
    page.get_by_label("Runs in the plots").click()
    for name in sorted((RUNS | {"removed"}) - {drawn}):
        page.get_by_role("option", name=f"{name} (running)").click()
    page.wait_for_function(f"{first}.data.length == 10")
    (outputs / "one" / "run.lock").unlink()
    shutil.rmtree(removed)
    page.wait_for_function(f"{first}.data.length == 8")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Config").click()
    page.locator("#config td").filter(has_text="two").wait_for()
    assert "1 settings are equal" in page.locator("#config").inner_text()

    # What is zoomed into is so in all plots, also when a run has logged more.
    page.locator(".js-plotly-plot").first.scroll_into_view_if_needed()
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 85, steps=5)
    page.mouse.up()
    ranges = "[...document.querySelectorAll('.js-plotly-plot')].map(e => e.layout.xaxis.range + '')"
    zoomed = f"{ranges}.filter(range => range == {ranges}[0]).length == 5"
    page.wait_for_function(zoomed)
    low, high = page.evaluate(f"{first}.layout.xaxis.range")
    assert 1 < low < high < 4
    log_step(outputs / "two", 40)
    page.wait_for_function(f"{first}.data.some(trace => trace.x.at(-1) == 40)")
    page.wait_for_function(f"{zoomed} && {first}.layout.xaxis.range[1] == {high}")
    page.get_by_role("radio", name="log").check()
    page.wait_for_function(f"{first}.layout.yaxis.type == 'log'")


# Texts with a contrast below WCAG's level AA.
FAINT = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const part = x => x <= 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = element => {
    const color = element ? numbers(getComputedStyle(element).backgroundColor) : [255, 255, 255];
    return color.length < 4 || color[3] > 0 ? color : behind(element.parentElement);
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const isText = [...element.childNodes].some(e => e.nodeType == 3 && e.textContent.trim());
    const isShown = element.checkVisibility({visibilityProperty: true});
    if (!(isText || element.placeholder) || !isShown || element.closest("svg")) continue;
    const style = getComputedStyle(element, element.placeholder ? "::placeholder" : null);
    const lights = [light(numbers(style.color)), light(behind(element))].sort((a, b) => b - a);
    const contrast = (lights[0] + 0.05) / (lights[1] + 0.05);
    if (contrast < 4.5) faint.push([element.textContent || element.placeholder, contrast]);
  }
  return [faint, document.querySelectorAll("*").length];
}"""
CONTROLS = ("textbox", "listbox", "combobox", "checkbox", "button", "tab", "Video", "image")


def test_controls_have_names_and_texts_contrast_on_a_phone(studio: Studio) -> None:
    """Names are those that a screen reader gets."""
    page = studio.page(width=360, height=740)
    page.add_style_tag(content="* { transition: none !important; animation: none !important }")
    sample(page, "named", Steps="3")
    await_state(page, "done")
    page.get_by_role("button", name="References and LoRA").press("Enter")
    field_of(page, "LoRA").wait_for()

    def names() -> set[str]:
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node["ignored"]]
        named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in shown]
        # Icons are images without a name, inside of buttons that have one.
        assert [role for role, name in named if role in CONTROLS[:-1] and not name] == []
        for scheme in ("dark", "light"):
            page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
            faint, count = page.evaluate(FAINT)
            assert faint == [] and count > 100, scheme
        return {name for role, name in named if role in CONTROLS}

    fields = {"Checkpoint", "Prompt", "Negative prompt", "Size", "Seed", "sample"}
    assert fields < names()
    page.get_by_role("tab", name="Runs").click()
    page.locator(".js-plotly-plot").nth(5).wait_for()
    assert {"Runs in the plots"} < names()

    # The order of the keyboard is the one of the page: the chosen run's button, the field.
    page.get_by_role("tab", name="Runs").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert is_focused(field_of(page, "Runs in the plots"))


def test_nothing_is_asked_of_another_machine(studio: Studio) -> None:
    """By any page of the tests above, or of one that is opened here; nor by the processes."""
    studio.page().get_by_role("tab", name="Runs").click()
    hosts = {urlsplit(url).netloc for url in studio.asked if not url.startswith(("data:", "blob:"))}
    assert len(studio.asked) > 50 and hosts == {urlsplit(studio.url).netloc}
    with pytest.raises(BlockingIOError):
        studio.trap.accept()


def test_ctrl_c_ends_it_without_a_traceback(studio: Studio) -> None:
    """While requests run and wait. It is the last test: the studio has ended then."""
    page = studio.page()
    sample(page, "long", Steps="100000", Videos="2")
    await_state(page, "waiting for 1 before it")
    ranks = studio.ranks()
    studio.process.send_signal(signal.SIGINT)
    assert studio.process.wait(60) == 0
    assert len(ranks) == 2 and not any(map(psutil.pid_exists, ranks))
    log = (studio.folder / "log").read_text()
    assert log.startswith("starting: ") and "Traceback" not in log and "ERROR" not in log
    page.get_by_text("The studio does not answer").wait_for()
