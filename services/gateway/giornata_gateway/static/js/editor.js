// Drawing the mask: tools, and what they do to it. Points are in pixels of the picture.

import { History } from "./history.js";
import { Mask, union } from "./mask.js";

export const SIZES = { min: 2, max: 400 };
const SIDE = 768; // the brush grows with pictures whose longer side is above this

export class Editor extends EventTarget {
  tool = "brush"; // "rectangle", "lasso", "pick", "hand"
  action = "paint"; // "erase"
  size = 48; // of the brush: its diameter
  mask = null;
  frozen = false; // while pictures are made from text, nothing is drawn

  #stage;
  #side = SIDE;
  #history = new History();
  #stroke = null;

  constructor(stage) {
    super();
    this.#stage = stage;
  }

  get canUndo() {
    return this.#history.canUndo;
  }

  get canRedo() {
    return this.#history.canRedo;
  }

  /** The largest brush of the picture. */
  get largest() {
    return Math.max(SIZES.max, this.#side / 2);
  }

  get drawing() {
    return this.#stroke !== null;
  }

  /** An empty mask for another picture; or one taken from `rgba`, its pixels as 4 bytes each. */
  open(width, height, rgba = null) {
    this.#stroke = null;
    this.#history = new History();
    this.mask = new Mask(width, height);
    if (rgba) this.mask.read(rgba);
    const side = Math.max(SIDE, width, height);
    const size = (this.size * side) / this.#side;
    this.#side = side;
    this.choose({ size });
    this.#changed(this.mask.frame());
  }

  choose({ tool = this.tool, action = this.action, size = this.size }) {
    if (tool !== this.tool) this.abandon();
    Object.assign(this, { tool, action, size: Math.min(this.largest, Math.max(SIZES.min, Math.round(size))) });
    this.dispatchEvent(new Event("tool"));
  }

  /** Starts a stroke or an outline, or picks a point; `other` erases where the tool would paint, and the reverse. */
  begin(point, other = false) {
    if (this.mask === null || this.frozen || this.tool === "hand") return;
    if (this.tool === "pick") {
      this.dispatchEvent(new CustomEvent("pick", { detail: point }));
      return;
    }
    this.abandon();
    const value = (this.action === "paint") !== other ? 1 : 0;
    this.#stroke = { value, start: point, last: point, points: [], box: null, record: this.#history.begin(this.mask) };
    this.extend(point);
  }

  extend(point) {
    const stroke = this.#stroke;
    if (stroke === null) return;
    if (this.tool !== "brush") {
      const [{ start }, { x, y }] = [stroke, point];
      if (this.tool === "lasso") stroke.points.push(point);
      this.#stage.outline = this.tool === "lasso" ? stroke.points : [start, { x, y: start.y }, point, { x: start.x, y }];
      this.#stage.refresh();
    } else {
      const box = this.mask.stroke(stroke.last, point, this.size / 2, stroke.value);
      stroke.box = union(stroke.box, box);
      if (box) this.#stage.takeMask(this.mask, box);
    }
    stroke.last = point;
  }

  finish() {
    const stroke = this.#stroke;
    if (stroke === null) return;
    if (this.tool === "rectangle") stroke.box = this.mask.rectangle(stroke.start, stroke.last, stroke.value);
    if (this.tool === "lasso") stroke.box = this.mask.polygon(stroke.points, stroke.value);
    this.#stroke = null;
    this.#stage.outline = null;
    this.#changed(stroke.record.end(stroke.box));
  }

  /** Forgets the stroke that is being drawn. */
  abandon() {
    const stroke = this.#stroke;
    if (stroke === null) return;
    this.#stroke = null;
    this.#stage.outline = null;
    this.#changed(stroke.record.cancel(stroke.box));
  }

  invert() {
    this.#apply((mask) => mask.invert());
  }

  clear() {
    this.#apply((mask) => mask.clear());
  }

  /** Makes another picture's pixels the mask, as `Mask.read` does. */
  take(rgba) {
    this.#apply((mask) => mask.read(rgba));
  }

  /** Puts another mask of the same size in its place. */
  replace(other) {
    this.#apply((mask) => mask.put(mask.frame(), other.data));
  }

  /** Adds what another picture's pixels mark to the mask, or takes it away where `point` is masked already. */
  toggle(rgba, point) {
    const masked = this.mask.data[Math.floor(point.y) * this.mask.width + Math.floor(point.x)];
    this.#apply((mask) => mask.merge(rgba, 1 - masked));
  }

  undo() {
    this.abandon();
    if (this.mask && !this.frozen) this.#changed(this.#history.undo(this.mask));
  }

  redo() {
    this.abandon();
    if (this.mask && !this.frozen) this.#changed(this.#history.redo(this.mask));
  }

  /** The mask as a PNG, white where to repaint. */
  async png() {
    const { width, height } = this.mask;
    const canvas = new OffscreenCanvas(width, height);
    const pixels = this.mask.rgba(this.mask.frame(), [255, 255, 255, 255], [0, 0, 0, 255]);
    canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
    return canvas.convertToBlob({ type: "image/png" });
  }

  #apply(change) {
    this.abandon();
    if (this.mask && !this.frozen) this.#changed(this.#history.apply(this.mask, change));
  }

  #changed(box) {
    if (box) this.#stage.takeMask(this.mask, box);
    this.#stage.refresh();
    this.dispatchEvent(new Event("change"));
  }
}
