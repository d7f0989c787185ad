"""The script of the charts, run by node on the few parts of a page that it uses: values by the arrow keys."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

import pytest

PAGE = """
class Element {
  attributes = {};
  listeners = {};
  children = [];
  dataset = {};
  style = {};
  clicks = 0;
  classList = { add() {}, remove() {} };
  setAttribute(name, value) { this.attributes[name] = value; }
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


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the script with node")
def test_the_arrow_keys_show_the_values_and_enter_opens_the_step() -> None:
    script = resources.files("tidegate.viewer").joinpath("report.js").read_text(encoding="utf-8")
    done = subprocess.run(
        ["node", "-"], input=PAGE + script + DRIVE, capture_output=True, text=True, timeout=60, check=True
    )
    one, two, four = "step 1, mean: 0.5", "step 2, mean: 0.75", "step 4, mean: 1"
    assert json.loads(done.stdout) == [
        0,
        ["ArrowRight", one, 1, False], ["ArrowRight", two, 2, False], ["ArrowRight", four, 4, False],
        ["ArrowRight", four, 4, False], ["ArrowLeft", two, 2, False], ["Enter", two, 2, True],
        ["Home", one, 1, False], ["End", four, 4, False], ["Escape", None, None, True],
        ["ArrowLeft", four, 4, False], ["Tab", four, 4, True], True, 1,
    ]  # fmt: skip
