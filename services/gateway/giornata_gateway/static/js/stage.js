// Draws the picture, and nothing else. Other modules set what it shows; `refresh` draws it at the next frame.

import { drawHandle, hatching } from "./marks.js";
import * as viewport from "./viewport.js";

const HATCH = 7; // CSS pixels between the lines of the mask's hatching

export class Stage {
  base = null; // {bitmap, width, height} of what is shown
  view = { scale: 1, x: 0, y: 0 };
  showing = "mask"; // or "run", "result"
  whole = false; // whether a run makes the whole picture, and has no mask
  preview = null; // {bitmap, box: [left, top, width, height]} in pixels of the picture
  after = null; // bitmap of the result
  compare = 0.5; // how much of the width shows the original
  brush = null; // {x, y, radius} in pixels of the picture
  cross = null; // {x, y}: the cursor of the keyboard
  outline = null; // corners of a rectangle or a lasso that is being drawn
  masked = true; // whether the mask is seen while nothing runs
  onview = () => {};

  #canvas;
  #overlay = document.createElement("canvas");
  #layer = document.createElement("canvas");
  #fitted = true;
  #frame = 0;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#resize()).observe(canvas);
  }

  get screen() {
    return { width: this.#canvas.clientWidth, height: this.#canvas.clientHeight };
  }

  /** Shows another picture; the view stays where the new one has the same size. */
  show(base) {
    const same = this.base && base && this.base.width === base.width && this.base.height === base.height;
    this.base = base;
    if (!same) this.fit();
    this.refresh();
  }

  /** Takes a mask, or its part inside `box`. */
  takeMask(mask, box) {
    if (this.#overlay.width !== mask.width || this.#overlay.height !== mask.height) {
      Object.assign(this.#overlay, { width: mask.width, height: mask.height });
      box = mask.frame();
    }
    const pixels = mask.rgba(box, [255, 255, 255, 255]);
    const image = new ImageData(pixels, box.right - box.left, box.bottom - box.top);
    this.#overlay.getContext("2d").putImageData(image, box.left, box.top);
    this.refresh();
  }

  fit() {
    this.#fitted = true;
    if (this.base) this.#look(viewport.fit(this.base, this.screen));
  }

  zoom(factor, point = this.#middle()) {
    if (!this.base) return;
    this.#fitted = false;
    this.#look(viewport.zoomed(this.view, this.base, this.screen, factor, point));
  }

  pan(dx, dy) {
    if (!this.base) return;
    this.#fitted = false;
    this.#look(viewport.moved(this.view, this.base, this.screen, dx, dy));
  }

  /** Moves the view as far as needed for a point of the picture to be seen. */
  reveal(point) {
    this.#look(viewport.showing(this.view, this.base, this.screen, point));
  }

  toPicture(point) {
    return viewport.toPicture(this.view, point);
  }

  refresh() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #middle() {
    return { x: this.screen.width / 2, y: this.screen.height / 2 };
  }

  #look(view) {
    this.view = view;
    this.onview();
    this.refresh();
  }

  #resize() {
    const { width, height } = this.screen;
    const ratio = devicePixelRatio;
    for (const canvas of [this.#canvas, this.#layer]) {
      Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    }
    if (this.base && this.#fitted) this.#look(viewport.fit(this.base, this.screen));
    else if (this.base) this.pan(0, 0);
    this.#draw(); // at once: a resized canvas is empty
  }

  #draw() {
    const context = this.#canvas.getContext("2d");
    const ratio = devicePixelRatio;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    if (!this.base) return;
    this.#place(context, ratio);
    this.#ground(context);
    context.drawImage(this.base.bitmap, 0, 0, this.base.width, this.base.height);
    if (this.showing === "result" && this.after) this.#drawResult(context, ratio);
    else {
      const running = this.showing === "run";
      if (running && this.preview) this.#drawPreview(context, ratio);
      else if (running ? !this.whole : this.masked) this.#drawMask(context, ratio);
      if (this.showing === "mask") this.#drawMarks(context, ratio);
    }
  }

  /** Pixels of the picture as coordinates; sharp pixels where they are large. */
  #place(context, ratio) {
    const { scale, x, y } = this.view;
    context.setTransform(scale * ratio, 0, 0, scale * ratio, x * ratio, y * ratio);
    context.imageSmoothingEnabled = scale < 4;
    context.imageSmoothingQuality = "high";
  }

  /** The pattern behind transparent pixels. */
  #ground(context) {
    context.fillStyle = "#f6f2ea";
    context.fillRect(0, 0, this.base.width, this.base.height);
  }

  #onLayer(ratio, paint) {
    const context = this.#layer.getContext("2d");
    context.globalCompositeOperation = "source-over";
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.#layer.width, this.#layer.height);
    this.#place(context, ratio);
    paint(context);
    return this.#layer;
  }

  #over(context, layer) {
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(layer, 0, 0);
    context.restore();
  }

  #drawMask(context, ratio) {
    const layer = this.#onLayer(ratio, (on) => {
      on.drawImage(this.#overlay, 0, 0);
      on.globalCompositeOperation = "source-in";
      on.setTransform(1, 0, 0, 1, 0, 0);
      on.fillStyle = "rgb(39 71 156 / 0.5)";
      on.fillRect(0, 0, this.#layer.width, this.#layer.height);
      on.globalCompositeOperation = "source-atop";
      on.fillStyle = hatching(on, Math.round(HATCH * ratio));
      on.fillRect(0, 0, this.#layer.width, this.#layer.height);
    });
    this.#over(context, layer);
  }

  #drawPreview(context, ratio) {
    const [left, top, width, height] = this.preview.box;
    const layer = this.#onLayer(ratio, (on) => {
      on.imageSmoothingEnabled = true;
      on.drawImage(this.preview.bitmap, left, top, width, height);
      if (this.whole) return;
      on.globalCompositeOperation = "destination-in";
      on.drawImage(this.#overlay, 0, 0);
    });
    this.#over(context, layer);
  }

  #drawResult(context, ratio) {
    const { width, height } = this.base;
    const edge = width * this.compare;
    context.save();
    context.beginPath();
    context.rect(edge, 0, width - edge, height);
    context.clip();
    this.#ground(context);
    context.drawImage(this.after, 0, 0, width, height);
    context.restore();
    if (this.compare <= 0 || this.compare >= 1) return;
    const x = Math.round((this.view.x + edge * this.view.scale) * ratio);
    const [top, bottom] = [this.view.y * ratio, (this.view.y + height * this.view.scale) * ratio];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = "rgb(20 15 10 / 0.35)";
    context.fillRect(x - 1.5 * ratio, top, 3 * ratio, bottom - top);
    context.fillStyle = "#fff";
    context.fillRect(x - 0.75 * ratio, top, 1.5 * ratio, bottom - top);
    drawHandle(context, x, (Math.max(top, 0) + Math.min(bottom, this.#canvas.height)) / 2, ratio);
  }

  #drawMarks(context, ratio) {
    const line = 1 / this.view.scale;
    const twice = (path) => {
      for (const [color, width] of [["rgb(20 15 10 / 0.75)", 3 * line], ["#fff", 1.25 * line]]) {
        context.beginPath();
        path();
        context.strokeStyle = color;
        context.lineWidth = width;
        context.stroke();
      }
    };
    this.#place(context, ratio);
    if (this.outline) {
      twice(() => {
        for (const { x, y } of this.outline) context.lineTo(x, y);
        context.closePath();
      });
    }
    if (this.brush) twice(() => context.arc(this.brush.x, this.brush.y, this.brush.radius, 0, 2 * Math.PI));
    if (this.cross) {
      const { x, y } = this.cross;
      const arm = 9 * line;
      twice(() => {
        context.moveTo(x - arm, y);
        context.lineTo(x + arm, y);
        context.moveTo(x, y - arm);
        context.lineTo(x, y + arm);
      });
    }
  }
}
