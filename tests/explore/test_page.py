"""The page in a browser: it opens from disk, asks for nothing, and shows what the data say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from embedded import embedded

from tessera_cupy import explore
from tessera_cupy.cli import main
from tessera_cupy.explore import page as module
from tessera_cupy.explore.data import explore_data
from tessera_cupy.viz import style

MODELS = ("wan-1.3b-81f-480p", "wan2.2-5b-121f-704p")
RULES = ("vsa", "window", "fg-attn")
GPUS = ("H200", "A100-SXM4-80GB")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1400",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    text = explore.explorer_page(models=MODELS, rules=RULES, heads=(0, 1), gpus=GPUS)
    path.write_text(text, encoding="utf-8")
    return path


def need_browser() -> tuple[str, str]:
    """Chromium and its driver; CI must have them, others may go without."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] and found[1]:
        return found[0], found[1]
    reason = "no chromium or no chromedriver (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = need_browser()
    if not os.environ.get("CI"):
        pytest.importorskip("selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, Service(driver))
    yield started
    started.quit()


def wait_until_ready(browser: Any) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 30).until(
        lambda b: b.execute_script("return document.body.dataset.ready") == "yes"
    )


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    browser.get(page.as_uri())
    wait_until_ready(browser)
    yield browser
    assert browser.get_log("browser") == []  # neither errors nor warnings


def choose(browser: Any, **values: str) -> None:
    from selenium.webdriver.support.select import Select

    for name, value in values.items():
        Select(browser.find_element("id", name)).select_by_value(value)


def chosen(browser: Any) -> dict[str, str]:
    names = ("model", "rule", "head", "block", "mapping", "gpu")
    return {name: browser.find_element("id", name).get_attribute("value") for name in names}


def pictures(browser: Any) -> list[str]:
    return [
        browser.find_element("id", name).get_attribute("innerHTML")
        for name in ("mask", "tiles", "figures")
    ]


def readout(browser: Any) -> str:
    text: str = browser.find_element("id", "readout").text
    return text


def figures(browser: Any) -> dict[str, float]:
    return {
        item.get_attribute("data-figure"): float(item.get_attribute("data-value"))
        for item in browser.find_elements("css selector", "[data-figure]")
    }


def marks(browser: Any, picture: str, kind: str = "here") -> list[str]:
    """What is outlined, in tokens, as the paths of the marks say."""
    paths = browser.find_elements("css selector", f"#{picture}-marks .{kind}")
    return [path.get_attribute("d") for path in paths]


def hover(browser: Any, picture: str, x: float, y: float) -> None:
    """Point at tokens (x, y) of a picture."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    browser.execute_script("document.getElementById('tiles-scroll').scrollTop = 0")
    left, top, width, height = browser.execute_script(
        "const svg = document.getElementById(arguments[0]);"
        "const r = svg.getBoundingClientRect(), v = svg.viewBox.baseVal;"
        "return [r.left, r.top, r.width / v.width, r.height / v.height]",
        picture,
    )
    actions = ActionBuilder(browser)
    actions.pointer_action.move_to_location(round(left + x * width), round(top + y * height))
    actions.perform()


def test_it_loads_from_disk_and_asks_for_nothing(opened: Any, page: Path) -> None:
    opened.get_log("performance")  # of the pages before, the browser's own first one with them
    opened.get(page.as_uri())
    wait_until_ready(opened)
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    assert page.as_uri() in asked
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    assert not opened.find_element("id", "failure").is_displayed()


def test_each_control_changes_the_picture(opened: Any) -> None:
    assert chosen(opened) == {
        "model": MODELS[0],
        "rule": "vsa",
        "head": "0",
        "block": "64x64",
        "mapping": "auto",
        "gpu": "H200",
    }
    for name, value, same in (
        ("head", "1", None),
        ("rule", "window", None),
        ("block", "128x128", None),
        ("mapping", "split-split", 0),  # the mask stays
        ("gpu", "A100-SXM4-80GB", 0),
        ("model", MODELS[1], None),
    ):
        before = pictures(opened)
        choose(opened, **{name: value})
        after = pictures(opened)
        assert chosen(opened)[name] == value
        assert before != after
        if same is not None:
            # The same block stays pointed at, so that only tiles and figures are others.
            assert after[2] != before[2]


@pytest.mark.parametrize(
    ("rule", "block", "mapping", "gpu"),
    [
        ("vsa", None, "auto", "H200"),
        ("vsa", None, "merge-merge", "H200"),
        ("window", (32, 32), "merge-pack", "A100-SXM4-80GB"),
        ("fg-attn", None, "share-gather", "H200"),
    ],
)
def test_numbers_are_those_of_the_data(
    opened: Any, rule: str, block: tuple[int, int] | None, mapping: str, gpu: str
) -> None:
    choose(opened, rule=rule, head="1", **({"block": "x".join(map(str, block))} if block else {}))
    choose(opened, gpu=gpu)
    choose(opened, mapping=mapping)
    data = explore_data(MODELS[0], rule, head=1, block_size=block, mapping=mapping, gpu=gpu)
    seen = figures(opened)
    assert set(seen) == {"density", "tiles", "steps", "tasks", "useful_fraction", "predicted_ms"}
    for name, value in seen.items():
        assert value == pytest.approx(data["figures"][name])
    text = opened.find_element("id", "figures").text
    assert f"{data['figures']['steps']:,} steps" in text
    assert f"{data['figures']['useful_fraction']:.2f}" in text
    assert "predicted for all 12 heads" in text
    assert f"ms on {gpu}" in text
    explain = opened.find_element("id", "explain").get_attribute("textContent")
    assert explain == data["plan"]["explain"]


def test_pointing_at_a_block_says_and_marks_where_it_is_computed(opened: Any) -> None:
    choose(opened, rule="window", block="64x64")
    choose(opened, mapping="merge-merge")
    # The window reaches 256 tokens: block (4, 4) is kept. Rows 256 to 383 are tile 2,
    # whose step 1 is the aligned group of blocks 3 to 5, block 4 in its middle.
    hover(opened, "mask", 4 * 64 + 32, 4 * 64 + 32)
    assert "Block (4, 4): kept" in readout(opened)
    assert (
        "Queries 256\N{EN DASH}319: within frame 1, rows 0\N{EN DASH}3, columns 0\N{EN DASH}19"
        in readout(opened)
    )
    assert "In tile 2, step 1 (the last is" in readout(opened)
    assert "rows 0\N{EN DASH}63, columns 64\N{EN DASH}127" in readout(opened)
    assert marks(opened, "mask") == ["M256 256h64v64h-64z"]
    columns = "".join(f"M{x} 256h64v128h-64z" for x in (192, 256, 320))
    assert marks(opened, "mask", "same-step") == [columns]
    # Lines are 1.2 times the 128 rows of a tile apart.
    assert marks(opened, "tiles") == ["M256 307.2h64v64h-64z"]
    assert marks(opened, "tiles", "same-step") == ["M192 307.2h192v128h-192z"]
    assert "Tile 2, step 1: 128 x 192" in opened.find_element("id", "lens-title").text
    hover(opened, "mask", 32, 28 * 64 + 32)
    assert "Block (28, 0): skipped" in readout(opened)
    assert "In no tile: it costs nothing." in readout(opened)
    assert not opened.find_element("id", "lens-part").is_displayed()


def test_pointing_at_a_tile_says_and_marks_its_block(opened: Any) -> None:
    choose(opened, rule="window", block="64x64")
    choose(opened, mapping="merge-merge")
    # The second half of tile 2's rows, the last block of its second step: block (5, 5).
    hover(opened, "tiles", 192 + 160, 2 * 1.2 * 128 + 96)
    assert "Block (5, 5): kept" in readout(opened)
    assert "rows 64\N{EN DASH}127, columns 128\N{EN DASH}191" in readout(opened)
    assert marks(opened, "mask") == ["M320 320h64v64h-64z"]


def test_a_skipped_block_may_be_computed_in_vain(opened: Any) -> None:
    choose(opened, rule="window", block="64x64")
    choose(opened, mapping="merge-merge")
    # Row 4 keeps blocks 0 to 8, row 5 blocks 1 to 9, so that tile 2 computes (4, 9) for (5, 9).
    # Its warpgroup of row 4 has nothing in step 3 but blocks 9 to 11, and skips it.
    hover(opened, "mask", 9 * 64 + 32, 4 * 64 + 32)
    assert "Block (4, 9): skipped" in readout(opened)
    assert "In no tile" in readout(opened)
    # But step 0 is computed by row 5 for blocks 1 and 2, and so for block 0 in vain.
    hover(opened, "mask", 32, 5 * 64 + 32)
    assert "Block (5, 0): skipped" in readout(opened)
    assert "Computed in vain in tile 2, step 0" in readout(opened)
    # Of block 0 row 4 wants some tokens, so that it is not in vain.
    hover(opened, "mask", 32, 4 * 64 + 32)
    assert "Block (4, 0): kept in part" in readout(opened)
    assert "In tile 2, step 0 (the last is" in readout(opened)


def test_keys_walk_over_blocks_and_over_tiles(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    choose(opened, rule="window", block="64x64")
    choose(opened, mapping="retain-pack", gpu="A100-SXM4-80GB")
    hover(opened, "mask", 4 * 64 + 32, 4 * 64 + 32)
    mask = opened.find_element("id", "mask")
    mask.send_keys(Keys.ARROW_RIGHT)
    assert "Block (4, 5): kept" in readout(opened)
    mask.send_keys(Keys.ARROW_DOWN)
    assert "Block (5, 5): kept" in readout(opened)
    # Pieces of tile 5 ascend by key, and tile 6 begins one block later, as its window does.
    tiles = opened.find_element("id", "tiles")
    tiles.send_keys(Keys.ARROW_LEFT)
    assert "Block (5, 4): kept" in readout(opened)
    tiles.send_keys(Keys.ARROW_DOWN)
    assert "Block (6, 5): kept" in readout(opened)


def test_it_is_legible_on_a_phone_and_in_the_dark(browser: Any, page: Path) -> None:
    wide = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", wide)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    try:
        browser.get(page.as_uri())
        wait_until_ready(browser)
        inner, outer = browser.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert inner <= outer == 390
        body = browser.find_element("tag name", "body")
        assert body.value_of_css_property("background-color") == "rgba(22, 22, 22, 1)"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_widgets_frame_shows_the_same_pictures(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    pytest.importorskip("ipywidgets")
    box = explore.widget(model=MODELS[0], rule="vsa")
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{box.picture.value}", encoding="utf-8")
    browser.get(path.as_uri())
    browser.switch_to.frame(0)
    try:
        wait_until_ready(browser)
        data = explore_data(MODELS[0], "vsa")
        assert figures(browser)["steps"] == data["figures"]["steps"]
        assert not browser.find_element("id", "controls").is_displayed()
        before = readout(browser)
        mask = browser.find_element("id", "mask")
        ActionChains(browser).move_to_element_with_offset(mask, -80, -100).perform()
        assert readout(browser).startswith("Block (")
        assert readout(browser) != before
    finally:
        browser.switch_to.default_content()


def test_what_views_share_is_embedded_once(page: Path) -> None:
    data = embedded(page.read_text(encoding="utf-8"))
    # Of two models and two heads: VSA, FG-Attn, and the window in three sizes of blocks.
    assert len(data["scenes"]) == 2 * 2 * (1 + 1 + 3)
    assert len(data["layouts"]) < len(data["views"])
    slices = [i for i, scene in enumerate(data["scenes"]) if scene["mask"]["slices"]]
    asked = {view["asked"] for view in data["views"] if view["scene"] in slices}
    assert asked == {"auto", "retain-pack", "retain-gather", "share-gather"}
    assert set(data["sentences"]) == {
        "retain",
        "merge",
        "split",
        "pack",
        "share",
        "regroup",
        "gather",
    }


def test_it_has_the_colours_of_the_pictures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, colour in (("style-kept", style.KEPT), ("step-3", style.STEP_COLOURS[3])):
        assert f"--{name}: {colour};" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


@pytest.mark.parametrize("name", ["models", "rules", "heads", "gpus"])
def test_nothing_to_show_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}`: expected at least one, got none"):
        module.explorer_page(**{name: ()})


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    command = ["explore", "--out", str(out), "--rule", "vsa", "--model", MODELS[0], "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "out": str(out),
        "bytes": out.stat().st_size,
        "models": [MODELS[0]],
        "rules": ["vsa"],
    }
    data = embedded(out.read_text(encoding="utf-8"))
    assert {scene["rule"]["name"] for scene in data["scenes"]} == {"vsa"}
    assert {view["gpu"]["name"] for view in data["views"]} == set(module.GPUS)


def test_the_command_refuses_a_rule_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explore", "--rule", "svg3"])
    assert stopped.value.code == 2
    assert "invalid choice: 'svg3'" in capsys.readouterr().err


def test_a_folder_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(**given: object) -> str:
        raise AssertionError("computed")

    monkeypatch.setattr("tessera_cupy.explore.page.explorer_page", never)
    assert main(["explore", "--out", str(tmp_path)]) == 1
    assert "`--out`: expected a file to write, got the folder" in capsys.readouterr().err
