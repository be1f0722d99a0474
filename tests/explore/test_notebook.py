"""The widget without a display: its controls are set in Python, its page is read."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from embedded import embedded

from tessera_cupy import explore
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.explore import notebook as module
from tessera_cupy.explore.data import explore_data
from tessera_cupy.video import MODELS

MODEL = "wan-1.3b-81f-480p"


def shown(box: Any) -> dict[str, Any]:
    """The data of the picture's only view, as explore_data has them."""
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', box.picture.value)
    data = embedded(html.unescape(page))
    (view,) = data["views"]
    return {
        "scene": data["scenes"][view["scene"]],
        "tiles": data["layouts"][view["layout"]],
        "plan": {**data["plans"][view["plan"]], "asked": view["asked"]},
        "gpu": view["gpu"],
        "figures": view["figures"],
    }


def plain(data: dict[str, Any]) -> Any:
    import json

    return json.loads(json.dumps(data))


@pytest.fixture
def box() -> Any:
    pytest.importorskip("ipywidgets")
    return explore.widget(model=MODEL, rule="window")


def test_it_begins_with_what_it_is_told(box: Any) -> None:
    assert shown(box) == plain(explore_data(MODEL, "window", block_size=(64, 64)))
    assert {name: control.value for name, control in box.controls.items()} == {
        "model": MODEL,
        "rule": "window",
        "head": 0,
        "block_size": (64, 64),
        "mapping": "auto",
        "gpu": "H200",
    }


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("model", "longcat-93f-480p"),
        ("rule", "vsa"),
        ("head", 3),
        ("block_size", (128, 128)),
        ("mapping", "retain-merge"),
        ("gpu", "RTX 4090"),
    ],
)
def test_each_control_draws_anew(box: Any, control: str, value: Any) -> None:
    before = box.picture.value
    box.controls[control].value = value
    assert box.picture.value != before
    wanted = {name: item.value for name, item in box.controls.items()}
    assert wanted[control] == value
    assert shown(box) == plain(explore_data(wanted.pop("model"), wanted.pop("rule"), **wanted))


def test_options_follow_from_each_other(box: Any) -> None:
    controls = box.controls
    assert controls["head"].max == MODELS[MODEL].heads - 1
    controls["mapping"].value = "regroup-pack"
    controls["gpu"].value = "RTX 4090"  # whose kernel cannot
    assert controls["mapping"].value == "auto"
    assert "regroup-pack" not in dict(controls["mapping"].options).values()
    controls["block_size"].value = (128, 128)
    assert "split-split" in dict(controls["mapping"].options).values()
    controls["rule"].value = "vsa"
    assert dict(controls["block_size"].options) == {"the rule's": None}
    assert shown(box)["scene"]["rule"]["name"] == "vsa"


def test_a_change_that_changes_others_draws_once(box: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    right = module.view_page
    monkeypatch.setattr(module, "view_page", lambda data: drawn.append(1) or right(data))
    box.controls["rule"].value = "vsa"
    assert len(drawn) == 1


def test_a_rule_that_lacks_a_package_says_so_in_place_of_the_picture(
    box: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise MissingExtraError("needs <hilbert>")

    monkeypatch.setattr(module, "make_scene", missing)
    box.controls["rule"].value = "spargeattn"
    assert box.picture.value == "<p>needs &lt;hilbert&gt;</p>"


def test_without_ipywidgets_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install ipywidgets \(the extra `notebooks`"):
        explore.widget()


@pytest.mark.parametrize("name", ["model", "rule", "gpu"])
def test_what_there_is_not_is_refused(name: str) -> None:
    pytest.importorskip("ipywidgets")
    with pytest.raises(ValueError, match=rf"`{name}`: expected one of .*'other'"):
        explore.widget(**{name: "other"})
