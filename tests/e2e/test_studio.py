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

from opensora_sp.data import read_video

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]
MILLISECONDS = 120_000  # that a page has, on a machine with other work


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

    @property
    def origin(self) -> str:
        return self.url.removesuffix(f"/{self.token}/")

    @property
    def token(self) -> str:
        return self.url.split("/")[-2]

    def page(self, width: int = 1280, height: int = 900) -> Any:
        """A user who opens the address."""
        context = self.browser.new_context(viewport=dict(width=width, height=height))
        context.on("request", lambda request: self.asked.append(request.url))
        page = context.new_page()
        page.set_default_timeout(MILLISECONDS)
        page.goto(self.url)
        page.get_by_role("button", name="Sample", exact=True).wait_for()
        return page

    def ranks(self) -> list[int]:
        children = psutil.Process(self.process.pid).children()
        return sorted(one.pid for one in children if "spawn_main" in " ".join(one.cmdline()))

    def fetch(self, path: str, *, token: bool = True, **headers: str) -> tuple[int, bytes]:
        """Status and body of a path, for somebody with the token or without it."""
        start = f"{self.origin}/{self.token}" if token else self.origin
        request = urllib.request.Request(start + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    folder = tmp_path_factory.mktemp("studio")
    model = folder / "outputs" / "model"
    model.mkdir(parents=True)
    write_random_model(model)
    for name in ("one", "two", "a/same", "b/same"):
        write_run(folder / "outputs" / name)

    trap = socket.create_server(("127.0.0.1", 0))
    trap.setblocking(False)
    proxy = f"http://127.0.0.1:{trap.getsockname()[1]}"
    command = [sys.executable, "-m", "opensora_sp.cli", "studio", "outputs", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "127.0.0.1"}
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [*command, "--nproc", "2"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdout is not None
    with process, importlib.import_module("playwright.sync_api").sync_playwright() as driver:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), (folder / "log").read_text()
            browser = driver.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            yield Studio(process, url, folder, browser, trap)
            browser.close()
        finally:
            process.terminate()


def field_of(page: Any, label: str) -> Any:
    """By the start of its name, to which an error is added."""
    return page.get_by_label(re.compile(rf"^\s*(number input for )?{label}\b")).first


def is_focused(element: Any) -> bool:
    return bool(element.evaluate("one => one === document.activeElement"))


def sample(page: Any, prompt: str, **fields: str) -> None:
    """Type a prompt and other fields, and press Enter in the prompt."""
    for label, text in fields.items():
        field_of(page, label).fill(text)
    field_of(page, "Prompt").fill(prompt)
    field_of(page, "Prompt").press("Enter")


def await_state(page: Any, text: str) -> None:
    page.locator("[role=status]").filter(has_text=text).first.wait_for()


def await_error(page: Any) -> str:
    alert = page.locator("pre[role=alert]").first
    alert.wait_for()
    return str(alert.inner_text())


def test_a_typed_prompt_becomes_a_video_that_plays(studio: Studio, tmp_path: Path) -> None:
    """By the keyboard alone; then again from the history, after the page is loaded anew."""
    page = studio.page()
    for _ in range(20):
        page.keyboard.press("Tab")
        if is_focused(field_of(page, "Prompt")):
            break
    page.keyboard.type("a red circle")
    for label in ("Negative prompt", "Size", "Aspect ratio", "Frames", "FPS", "Steps"):
        page.keyboard.press("Tab")
        assert is_focused(field_of(page, label)), label
    page.keyboard.type("100")
    # Empty fields show what the run has.
    for label, text in (("Size", "28x24"), ("Frames", "5"), ("FPS", "8"), ("Guidance", "4")):
        page.get_by_placeholder(text, exact=True).first.wait_for()
        assert field_of(page, label).get_attribute("placeholder") == text
    page.get_by_role("button", name="Sample", exact=True).focus()
    page.keyboard.press("Enter")

    await_state(page, "left")
    preview = page.get_by_alt_text("preview")
    preview.wait_for()
    first = preview.get_attribute("src")
    page.wait_for_function("old => document.querySelector('[alt=preview]')?.src != old", arg=first)
    await_state(page, "done")

    video = page.locator("#shown video")
    video.wait_for()
    page.wait_for_function("document.querySelector('#shown video').readyState >= 2")
    size = video.evaluate("one => [one.videoWidth, one.videoHeight, one.error]")
    assert size == [24, 28, None] and video.evaluate("one => one.duration") > 0.5
    status, data = studio.fetch("/" + video.get_attribute("src"))
    (tmp_path / "a.mp4").write_bytes(data)
    assert status == 200 and read_video(tmp_path / "a.mp4", num_frames=5)[0].shape == (5, 28, 24, 3)
    assert "a red circle" in page.locator("#metadata").inner_text()

    (metadata,) = (studio.folder / "studio").glob("*/000-a-red-circle.json")
    facts = json.loads(metadata.read_text())
    assert facts["config"]["scheduler"]["num_sampling_steps"] == 100
    seed = facts["seed"]
    assert f"seed {seed}" in page.locator("#queue").inner_text()

    page.reload()
    page.locator("#history").get_by_text(f"a red circle | seed {seed}").click()
    page.locator("#shown video").wait_for()
    assert "a red circle" in page.locator("#metadata").inner_text()


def test_requests_of_a_tab_wait_in_its_queue(studio: Studio) -> None:
    page = studio.page()
    sample(page, "long", Steps="100000")
    await_state(page, "step")
    sample(page, "many", Steps="3", Videos="2", Seed="7")
    sample(page, "last", Videos="1", Seed="")
    rows = page.locator("#queue article")
    rows.nth(3).wait_for()
    assert [
        re.sub("[0-9]{3,}", "N", rows.nth(i).inner_text().split("\n")[0]) for i in range(4)
    ] == [
        "long seed N",
        "many seed 7",
        "many seed 8",
        "last seed N",
    ]
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.locator("#shown").get_by_text("last").wait_for()
    states = page.locator("#queue [role=status]").all_inner_texts()
    assert states == ["done", "done", "done", "cancelled"]

    sample(page, "long", Steps="100000", Videos="2")
    await_state(page, "step")
    page.get_by_role("button", name="Cancel all").click()
    page.wait_for_function(
        "[...document.querySelectorAll('#queue [role=status]')].slice(0, 2)"
        ".every(e => e.textContent == 'cancelled')"
    )


def test_results_are_compared_and_sampled_again_with_their_references(
    studio: Studio, tmp_path: Path
) -> None:
    page = studio.page()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="References and LoRA").click()
    Image.new("RGB", (24, 28), "red").save(tmp_path / "kept.png")
    page.locator("input[type=file]").set_input_files(tmp_path / "kept.png")
    page.get_by_text("kept.png").first.wait_for()
    places = page.get_by_label("Frames that references set")
    places.click()
    page.get_by_role("option", name="reference 1 is the last frame").click()
    page.get_by_role("img", name="part 1 of 1, frame 4 by reference 1").wait_for()
    sample(page, "compared", Steps="3", Seed="11")
    page.locator("#shown").get_by_text("compared | seed 11").wait_for()
    page.get_by_role("button", name="Compare with the next").click()
    sample(page, "compared", Steps="4")
    both = page.locator("#history").get_by_text("compared | seed 11")
    both.nth(1).wait_for()
    both.nth(0).click()
    page.get_by_text("the same seed").wait_for()
    assert page.locator("#shown video").count() == 2

    other = studio.page()
    other.on("dialog", lambda dialog: dialog.accept())
    other.locator("#history").get_by_text("compared | seed 11").nth(1).click()
    other.locator("#shown").get_by_text("compared").wait_for()
    other.get_by_role("button", name="Use these settings").click()
    other.wait_for_function(
        "[...document.querySelectorAll('input, textarea')].some(e => e.value == 'compared')"
    )
    assert [field_of(other, label).input_value() for label in ("Steps", "Seed")] == ["3", "11"]
    sample(other, "compared again")
    other.locator("#shown").get_by_text("compared again").wait_for()
    other.locator("#history").get_by_text("compared again").wait_for()
    (kept,) = (studio.folder / "studio").glob("*compared-again/*.0.png")
    assert kept.read_bytes() == (tmp_path / "kept.png").read_bytes()
    other.get_by_role("button", name="Delete").click()
    other.locator("#history").get_by_text("compared again").wait_for(state="detached")
    assert not kept.parent.exists()


def test_cancel_by_the_keyboard_keeps_the_ranks(studio: Studio) -> None:
    page = studio.page()
    sample(page, "a blue square", Steps="3")
    await_state(page, "done")
    before = studio.ranks()

    sample(page, "a blue square", Steps="100000")
    await_state(page, "step")
    page.get_by_role("button", name="Cancel", exact=True).focus()
    page.keyboard.press("Enter")
    await_state(page, "cancelled")

    sample(page, "a blue square", Steps="3")
    await_state(page, "done")
    assert studio.ranks() == before and len(before) == 2


def test_two_users_wait_for_each_other(studio: Studio) -> None:
    one, two = studio.page(), studio.page()
    sample(one, "first", Steps="100000")
    await_state(one, "step")
    sample(two, "second", Steps="3")
    await_state(two, "waiting for 1 before it")
    one.get_by_role("button", name="Cancel", exact=True).click()
    await_state(one, "cancelled")
    await_state(two, "done")
    two.locator("#metadata").get_by_text("second").wait_for()


def test_a_closed_tab_cancels_its_request(studio: Studio) -> None:
    closed, other = studio.page(), studio.page()
    sample(closed, "left alone", Steps="100000")
    await_state(closed, "step")
    sample(other, "next", Steps="3")
    await_state(other, "waiting for 1 before it")
    closed.close()
    await_state(other, "done")


def test_a_killed_rank_fails_its_request_alone(studio: Studio) -> None:
    page = studio.page()
    sample(page, "a green circle", Steps="100000")
    await_state(page, "step")
    killed = studio.ranks()
    psutil.Process(killed[1]).kill()
    error = await_error(page)
    assert "-9]" in error and "expected all 2 ranks to live" in error and "try again" in error

    sample(page, "a green circle", Steps="3")
    await_state(page, "done")
    assert not set(studio.ranks()) & set(killed)


def test_what_cannot_be_sampled_is_an_error_of_three_parts(studio: Studio, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    outside = json.dumps({"reference_path": str(tmp_path / "secret.png")})
    page = studio.page()
    for label, prompt, fields, message in (
        ("Size", "a", {"Size": "wide"}, "got Size 'wide'"),
        ("Frames", "a", {"Size": "", "Frames": "100000"}, "got clips of 100,000 frames"),
        ("Prompt", "a" + outside, {"Frames": ""}, "got the path"),
        ("Prompt", "", {}, "got no prompt;"),
    ):
        sample(page, prompt, **fields)
        marked = page.locator(".refused").filter(has_text=message)
        marked.wait_for()
        assert marked.inner_text().strip().startswith(label)
        error = await_error(page)
        assert "got" in error and "expected" in error and ";" in error, error

    refused = quote(str(tmp_path / "secret.png"))
    assert studio.fetch(f"/media?path={refused}")[0] == 403
    assert studio.fetch(f"/media?path={studio.folder}/outputs/model/config.json")[0] == 404
    assert studio.fetch(f"/gradio_api/file={refused}")[0] in (403, 404)
    for path in ("/", "/config", f"/media?path={refused}", "/wrong/", f"/?token={studio.token}"):
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
    assert "/link" in received and studio.token not in received
    replayed = "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in cookies)
    for path in ("/", "/config"):
        assert studio.fetch(path, token=False, Cookie=replayed)[0] == 403
    assert studio.fetch("/config", Origin=address)[0] == 403
    assert studio.fetch("/config", Origin=studio.origin)[0] == 200


def lines_of(page: Any) -> Any:
    """The lines of the training loss."""
    return page.locator("svg.marks").first.locator("[aria-roledescription='line mark']")


def test_the_runs_tab_follows_runs_that_train(studio: Studio) -> None:
    for name in ("a/same", "b/same", "one", "two"):
        (studio.folder / "outputs" / name / "run.lock").touch()
        log_step(studio.folder / "outputs" / name, 4)
    page = studio.page()
    page.get_by_role("tab", name="Runs").click()
    page.locator("svg.marks").nth(5).wait_for()
    names = [
        box.evaluate("e => e.parentElement.innerText") for box in page.get_by_role("checkbox").all()
    ]
    expected = ["a/same (running)", "b/same (running)", "one (running)", "two (running)"]
    assert sorted(name.strip() for name in names) == expected

    # Ticks stay while the list changes.
    removed = write_run(studio.folder / "outputs" / "removed")
    page.get_by_role("checkbox", name="removed").check()
    for name in ("a/same", "b/same", "one", "two"):
        page.get_by_role("checkbox", name=name).check()
    (studio.folder / "outputs" / "one" / "run.lock").unlink()
    shutil.rmtree(removed)
    page.get_by_role("checkbox", name="removed").wait_for(state="detached")
    page.get_by_role("checkbox", name="one (failed)").wait_for()
    assert all(box.is_checked() for box in page.get_by_role("checkbox").all())
    page.wait_for_function(
        "document.querySelectorAll('svg.marks')[0]"
        ".querySelectorAll('[aria-roledescription=\"line mark\"]').length == 8"
    )

    page.get_by_role("button", name="Config").click()
    page.locator("#config td").filter(has_text="two").wait_for()
    assert "1 settings are equal" in page.locator("#config").inner_text()
    page.get_by_role("radio", name="log").check()
    page.wait_for_function("document.querySelector('svg.marks').textContent.includes('log10')")
    page.get_by_label("Filter").fill("failed")
    page.get_by_role("checkbox", name="two").uncheck()
    page.get_by_role("checkbox", name="two").wait_for(state="detached")

    drawn = lines_of(page).first.get_attribute("d")
    log_step(studio.folder / "outputs" / "a" / "same", 40)
    page.locator("#summary").get_by_text("40 of 3").wait_for()
    changed = "old => document.querySelectorAll('[aria-roledescription=\"line mark\"]')[0]"
    page.wait_for_function(f"{changed}.getAttribute('d') != old", arg=drawn)


def test_a_stretch_of_a_curve_is_zoomed_into(studio: Studio) -> None:
    page = studio.page()
    page.get_by_role("tab", name="Runs").click()
    lines_of(page).first.wait_for()
    page.wait_for_timeout(1000)  # until it is not drawn anew
    lines_of(page).first.scroll_into_view_if_needed()
    box = page.locator("svg.marks").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 90, steps=5)
    page.mouse.up()
    page.wait_for_function("[...document.querySelectorAll('input[type=number]')].at(-1).value > 0")
    first, last = (field_of(page, label).input_value() for label in ("First step", "Last step"))
    assert 1 <= int(first) <= int(last)


def test_it_fits_a_phone(studio: Studio) -> None:
    page = studio.page(width=360, height=740)
    sample(page, "on a phone", Steps="3")
    await_state(page, "done")
    for tab in ("Sample", "Runs"):
        page.get_by_role("tab", name=tab).click()
        width = page.evaluate("document.scrollingElement.scrollWidth")
        assert width <= 360, tab
    assert page.get_by_role("tab", name="Runs").is_visible()


# Texts with a contrast below WCAG's level AA.
FAINT = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const part = x => x <= 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = one => {
    const color = one ? numbers(getComputedStyle(one).backgroundColor) : [255, 255, 255];
    return color.length < 4 || color[3] > 0 ? color : behind(one.parentElement);
  };
  const faint = [];
  for (const one of document.querySelectorAll("body *")) {
    const isText = [...one.childNodes].some(node => node.nodeType == 3 && node.textContent.trim());
    if (!(isText || one.placeholder) || !one.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(one, one.placeholder ? "::placeholder" : null);
    const lights = [light(numbers(style.color)), light(behind(one))].sort((a, b) => b - a);
    const contrast = (lights[0] + 0.05) / (lights[1] + 0.05);
    if (contrast < 4.5) faint.push([one.textContent || one.placeholder, contrast]);
  }
  return [faint, document.querySelectorAll("*").length];
}"""
CONTROLS = ("textbox", "listbox", "combobox", "checkbox", "button", "tab", "Video", "image")


def test_controls_have_names_and_texts_contrast(studio: Studio) -> None:
    """Names are those that a screen reader gets."""
    page = studio.page()
    page.add_style_tag(content="* { transition: none !important; animation: none !important }")
    sample(page, "named", Steps="3")
    await_state(page, "done")
    page.get_by_role("button", name="References and LoRA").press("Enter")
    field_of(page, "LoRA").wait_for()

    def names() -> list[str]:
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node["ignored"]]
        found = [(one["role"]["value"], one.get("name", {}).get("value")) for one in shown]
        # Icons are images without a name, inside of buttons that have one.
        assert not [one for one in found if one[0] in CONTROLS[:-1] and not one[1]]
        for scheme in ("dark", "light"):
            page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
            faint, count = page.evaluate(FAINT)
            assert faint == [] and count > 100, scheme
        return [name for role, name in found if role in CONTROLS]

    fields = {"Checkpoint", "Prompt", "Negative prompt", "Size", "Seed", "History", "sample"}
    assert fields < set(names())
    page.get_by_role("tab", name="Runs").click()
    page.locator("svg.marks").nth(5).wait_for()
    assert {"Filter", "Sort by"} < {*names()}

    # The order of the keyboard is the one of the page.
    page.get_by_role("tab", name="Runs").focus()
    page.keyboard.press("Tab")
    assert is_focused(field_of(page, "Filter"))


def test_uploads_are_images_and_videos_of_limited_size(studio: Studio, tmp_path: Path) -> None:
    page = studio.page()
    page.get_by_role("button", name="References and LoRA").click()
    (tmp_path / "a.txt").write_text("text")
    page.locator("input[type=file]").set_input_files(tmp_path / "a.txt")
    page.get_by_text(re.compile("Only image, ?video allowed")).wait_for()

    with (tmp_path / "big.mp4").open("wb") as file:
        file.truncate(2 * 10**9)
    page.locator("input[type=file]").set_input_files(tmp_path / "big.mp4")
    page.get_by_text("exceed the maximum allowed size").wait_for()

    Image.new("RGB", (24, 28), "red").save(tmp_path / "a.png")
    page.locator("input[type=file]").set_input_files(tmp_path / "a.png")
    page.get_by_text("a.png").first.wait_for()


def test_nothing_is_asked_of_another_machine(studio: Studio) -> None:
    """By any page of the tests above, or of one that is opened here; nor by the processes."""
    studio.page().get_by_role("tab", name="Runs").click()
    hosts = {urlsplit(url).netloc for url in studio.asked if not url.startswith(("data:", "blob:"))}
    assert len(studio.asked) > 50 and hosts == {urlsplit(studio.url).netloc}
    with pytest.raises(BlockingIOError):
        studio.trap.accept()


def test_ctrl_c_ends_it_without_a_traceback(studio: Studio) -> None:
    """While a page is open. It is the last test: the studio has ended then."""
    page = studio.page()
    page.locator("#gone").wait_for(state="attached")
    studio.process.send_signal(signal.SIGINT)
    assert studio.process.wait(60) == 0
    log = (studio.folder / "log").read_text()
    assert log.startswith("starting: ") and "Traceback" not in log and "ERROR" not in log
    page.get_by_text("The studio does not answer").wait_for()
