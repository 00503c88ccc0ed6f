// Mouse, pen and fingers on the picture: one draws, or moves the before/after line; two pinch and pan; the wheel zooms.

export function listenToPointers(canvas, stage, editor, compareTo) {
  const pointers = new Map();
  let doing = null; // "draw", "pan", "compare", "pinch"

  const position = (event) => {
    const frame = canvas.getBoundingClientRect();
    return { x: event.clientX - frame.left, y: event.clientY - frame.top };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (!stage.base) return;
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, position(event));
    stage.cross = null;
    if (pointers.size === 2) {
      editor.abandon();
      doing = "pinch";
    } else if (pointers.size === 1) {
      doing = intent(event, stage, editor);
      if (doing === "draw") editor.begin(stage.toPicture(position(event)), event.altKey || event.button === 2);
      if (doing === "compare") compareTo(stage.toPicture(position(event)).x / stage.base.width);
    }
    event.preventDefault();
  });

  canvas.addEventListener("pointermove", (event) => {
    if (!stage.base) return;
    const point = position(event);
    hover(stage, editor, event, point);
    const before = pointers.get(event.pointerId);
    if (before === undefined) return;
    if (doing === "pinch") pinch(stage, pointers, event.pointerId, point);
    else if (doing === "pan") stage.pan(point.x - before.x, point.y - before.y);
    else if (doing === "compare") compareTo(stage.toPicture(point).x / stage.base.width);
    else if (doing === "draw") {
      const steps = event.getCoalescedEvents?.() ?? [];
      for (const step of steps.length ? steps : [event]) editor.extend(stage.toPicture(position(step)));
    }
    pointers.set(event.pointerId, point);
  });

  const up = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    if (doing === "draw") event.type === "pointerup" ? editor.finish() : editor.abandon();
    doing = pointers.size === 1 && doing === "pinch" ? "pan" : null;
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => {
    stage.brush = null;
    stage.refresh();
  });
  canvas.addEventListener("contextmenu", (event) => event.preventDefault());

  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!stage.base) return;
      event.preventDefault();
      const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
      if (event.shiftKey) stage.pan(-(event.deltaX || event.deltaY) * unit, event.deltaX ? -event.deltaY * unit : 0);
      else stage.zoom(Math.exp((-event.deltaY * unit) / 400), position(event));
    },
    { passive: false },
  );
}

function intent(event, stage, editor) {
  if (event.button === 1 || editor.tool === "hand") return "pan";
  if (stage.showing === "result") return "compare";
  return stage.showing === "mask" ? "draw" : "pan";
}

/** The ring of the brush follows any pointer that can hover. */
function hover(stage, editor, event, point) {
  const visible = event.pointerType !== "touch" && !editor.frozen && editor.tool === "brush" && stage.showing === "mask";
  stage.brush = visible ? { ...stage.toPicture(point), radius: editor.size / 2 } : null;
  stage.refresh();
}

/** Two fingers: the picture keeps under them what was there. */
function pinch(stage, pointers, moving, point) {
  const fixed = [...pointers].find(([id]) => id !== moving)?.[1];
  const before = pointers.get(moving);
  if (fixed === undefined) return;
  const distance = (a, b) => Math.max(1, Math.hypot(a.x - b.x, a.y - b.y));
  stage.pan((point.x - before.x) / 2, (point.y - before.y) / 2);
  stage.zoom(distance(point, fixed) / distance(before, fixed), { x: (point.x + fixed.x) / 2, y: (point.y + fixed.y) / 2 });
}
