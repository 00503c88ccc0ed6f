// The tools above the picture. The brush's slider is logarithmic: from 2 pixels to the largest of the picture.

import { SIZES } from "./editor.js";
import { at } from "./page.js";

export function listenToToolbar(stage, editor, commands) {
  for (const button of document.querySelectorAll("button[data-tool], button[data-action]")) {
    button.addEventListener("click", () => editor.choose({ ...button.dataset }));
  }
  at("brush-size").addEventListener("input", () => editor.choose({ size: sizeAt(at("brush-size").valueAsNumber / 100, editor.largest) }));
  at("invert").addEventListener("click", commands.invert);
  at("clear").addEventListener("click", commands.clear);
  at("undo").addEventListener("click", commands.undo);
  at("redo").addEventListener("click", commands.redo);
  at("zoom-in").addEventListener("click", () => stage.zoom(1.25));
  at("zoom-out").addEventListener("click", () => stage.zoom(0.8));
  at("zoom-full").addEventListener("click", () => stage.zoom(1 / stage.view.scale));
  at("zoom-fit").addEventListener("click", () => stage.fit());

  const show = () => {
    for (const name of ["tool", "action"]) {
      for (const button of document.querySelectorAll(`button[data-${name}]`)) {
        button.setAttribute("aria-pressed", String(button.dataset[name] === editor[name]));
      }
    }
    at("stage").dataset.cursor = editor.tool;
    at("brush-size").value = Math.round(100 * placeOf(editor.size, editor.largest));
    at("brush-size").setAttribute("aria-valuetext", `${editor.size} pixels`);
    at("brush-size-text").textContent = `${editor.size} px`;
    if (stage.brush) stage.brush.radius = editor.size / 2;
    stage.refresh();
  };
  editor.addEventListener("tool", show);
  editor.addEventListener("change", () => {
    at("undo").disabled = !editor.canUndo;
    at("redo").disabled = !editor.canRedo;
  });
  stage.onview = () => {
    at("zoom-text").textContent = `${Math.round(100 * stage.view.scale)} %`;
  };
  at("undo").disabled = at("redo").disabled = true;
  show();
}

function sizeAt(place, largest) {
  return SIZES.min * (largest / SIZES.min) ** place;
}

function placeOf(size, largest) {
  return Math.log(size / SIZES.min) / Math.log(largest / SIZES.min);
}
