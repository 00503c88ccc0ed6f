// The picture without a mouse, and the shortcuts. Letters work only inside the workspace, so that they never surprise
// a person who dictates or types elsewhere.

import { announce } from "./page.js";

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function listenToKeys(workspace, canvas, stage, editor, commands) {
  const letters = {
    b: () => editor.choose({ tool: "brush" }),
    r: () => editor.choose({ tool: "rectangle" }),
    l: () => editor.choose({ tool: "lasso" }),
    s: () => editor.choose({ tool: "pick" }),
    h: () => editor.choose({ tool: "hand" }),
    p: () => editor.choose({ action: "paint" }),
    e: () => editor.choose({ action: "erase" }),
    "[": () => editor.choose({ size: editor.size / 1.25 - 1 }),
    "]": () => editor.choose({ size: editor.size * 1.25 + 1 }),
    i: commands.invert,
    delete: commands.clear,
    "+": () => stage.zoom(1.25),
    "=": () => stage.zoom(1.25),
    "-": () => stage.zoom(0.8),
    0: () => stage.fit(),
    1: () => stage.zoom(1 / stage.view.scale),
    v: commands.toggleView,
    "?": commands.help,
  };

  workspace.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input:not([type=range]), textarea, select");
    const command = letters[event.key.toLowerCase()];
    if (typing || !command) return;
    command();
    event.preventDefault();
  });

  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]")) return;
    const key = event.key.toLowerCase();
    const typing = event.target.matches("input:not([type=range]), textarea");
    if (key === "enter") event.repeat || commands.edit(); // once, however long it is held
    else if (key === "o") commands.choose();
    else if (key === "z" && !typing) event.shiftKey ? commands.redo() : commands.undo();
    else if (key === "y" && !typing) commands.redo();
    else return;
    event.preventDefault();
  });

  canvas.addEventListener("keydown", (event) => {
    if (!stage.base || event.ctrlKey || event.metaKey) return;
    const [dx, dy] = ARROWS[event.key] ?? [0, 0];
    if (stage.showing === "result" && dy) commands.stepBy(dy);
    else if (stage.showing === "result" && dx) commands.compareBy(dx * 0.02);
    else if (ARROWS[event.key]) moveCursor(stage, editor, ARROWS[event.key], event.shiftKey ? 10 : 1);
    else if (event.key === " ") {
      if (!event.repeat) press(stage, editor);
    } else if (event.key === "Escape" && editor.drawing) editor.abandon();
    else return;
    event.preventDefault();
  });

  canvas.addEventListener("keyup", (event) => {
    if (event.key === " " && editor.tool === "brush") editor.finish();
  });
  canvas.addEventListener("blur", () => {
    if (stage.cross) editor.finish();
    stage.cross = null;
    stage.refresh();
  });
}

function cursor(stage) {
  return stage.cross ?? { x: stage.base.width / 2, y: stage.base.height / 2 };
}

/** By a few pixels of the screen, whatever the zoom, but at least one of the picture. */
function moveCursor(stage, editor, [dx, dy], times) {
  if (stage.showing !== "mask" || editor.tool === "hand") {
    stage.pan(-dx * 16 * times, -dy * 16 * times);
    return;
  }
  const step = Math.max(1, Math.round(4 / stage.view.scale)) * times;
  const { x, y } = cursor(stage);
  stage.cross = {
    x: Math.min(stage.base.width, Math.max(0, x + dx * step)),
    y: Math.min(stage.base.height, Math.max(0, y + dy * step)),
  };
  stage.reveal(stage.cross);
  editor.extend(stage.cross);
  announce(`${Math.round(stage.cross.x)}, ${Math.round(stage.cross.y)}`);
}

function press(stage, editor) {
  if (stage.showing !== "mask") return;
  stage.cross = cursor(stage);
  if (["rectangle", "lasso"].includes(editor.tool) && editor.drawing) {
    editor.finish();
    announce(editor.tool === "lasso" ? "Outline closed" : "Rectangle drawn");
  } else {
    editor.begin(stage.cross);
    const outline = { rectangle: "First corner set", lasso: "Outline begun" }[editor.tool];
    if (editor.drawing) announce(outline ?? (editor.action === "paint" ? "Painting" : "Erasing"));
  }
  stage.refresh();
}
