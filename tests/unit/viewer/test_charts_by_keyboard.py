"""The script of the charts, run by node on the few parts of a page that it uses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tidegate.viewer.dashboard.app import page_files

PAGE = """
class Element {
  attributes = {};
  listeners = {};
  children = [];
  dataset = {};
  style = { setProperty() {} };
  clicks = 0;
  classList = { add() {}, remove() {} };
  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
  }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  append(...all) { this.children.push(...all); }
  replaceChildren(...all) { this.children = all; }
  querySelector(words) { return this.children.find((one) => `.${one.className}` === words) ?? null; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 640 }; }
  click() { this.clicks += 1; }
}
const createElement = () => new Element();
globalThis.document = { createElementNS: createElement, createElement, querySelectorAll: () => [] };
globalThis.getComputedStyle = () => ({ paddingLeft: "0px", paddingRight: "0px" });
globalThis.ResizeObserver = class { observe() {} };
"""
DRIVE = """
const points = [[1, 0.5], [2, 0.75], [4, 1]];
const series = [{ name: "mean", tone: "t", form: "line", points }];
const spec = { title: "Reward", axes: ["step", ""], y: [null, null], size: [640, 240], series };
const figure = Object.assign(new Element(), { clientWidth: 640, dataset: { chart: JSON.stringify(spec) } });
plot(figure);
const svg = figure.children.at(-1), tip = figure.querySelector(".tip");
const seen = [svg.attributes.tabindex];
const right = ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"];
for (const key of [...right, "ArrowLeft", "Enter", "Home", "End", "Escape", "ArrowLeft", "Tab"]) {
  let kept = true;
  svg.listeners.keydown({ key, preventDefault: () => { kept = false; } });
  const told = tip.hidden ? null : tip.children.map((one) => one.textContent).join(", ");
  seen.push([key, told, figure.dataset.step ?? null, kept]);
}
svg.listeners.blur();
console.log(JSON.stringify([...seen, tip.hidden, figure.clicks]));
"""


FLAT = """
const texts = (y, stacked = false) => {
  const points = [[0, 0], [1, y]];
  const series = ["a", "b"].map((name) => ({ name, tone: "t", form: "line", points }));
  const spec = { title: "", axes: ["step", ""], y: [null, null], size: [640, 240], series, stacked };
  const figure = Object.assign(new Element(), { clientWidth: 640, dataset: { chart: JSON.stringify(spec) } });
  plot(figure);
  const parts = figure.children.at(-1).children;
  const areas = parts.filter((one) => one.attributes.class.startsWith("area")).length;
  return [areas, ...parts.filter((one) => one.attributes.class === "tick end").map((one) => one.children[0])];
};
console.log(JSON.stringify([...[0, 4e-13, 3.2e6, -0.05, 2e-6].map((y) => texts(y)), texts(1500, true)]));
"""


def answer_of(program: str) -> Any:
    """What a program prints that is run after the page's script of charts."""
    script = page_files()["charts.js"].decode().replace("export ", "")
    script = re.sub(r"^import .*$", "", script, flags=re.MULTILINE)
    whole = f"{PAGE}{script}{{{program}}}"
    done = subprocess.run(["node", "-"], input=whole, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the script with node")
def test_ticks_are_round_and_a_range_of_equal_values_lies_around_them() -> None:
    assert answer_of(FLAT) == [
        [0, "−0.5", "0", "0.5"], [0, "−0.5", "0", "0.5"], [0, "0", "1M", "2M", "3M"],
        [0, "−0.04", "−0.02", "0"], [0, "0", "5e−7", "1e−6", "1.5e−6", "2e−6"],
        [2, "0", "1,000", "2,000", "3,000"],
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the script with node")
def test_the_arrow_keys_show_the_values_and_enter_opens_the_step() -> None:
    one, two, four = "step 1, mean: 0.5", "step 2, mean: 0.75", "step 4, mean: 1"
    assert answer_of(DRIVE) == [
        0,
        ["ArrowRight", one, 1, False], ["ArrowRight", two, 2, False], ["ArrowRight", four, 4, False],
        ["ArrowRight", four, 4, False], ["ArrowLeft", two, 2, False], ["Enter", two, 2, True],
        ["Home", one, 1, False], ["End", four, 4, False], ["Escape", None, None, True],
        ["ArrowLeft", four, 4, False], ["Tab", four, 4, True], True, 1,
    ]  # fmt: skip
