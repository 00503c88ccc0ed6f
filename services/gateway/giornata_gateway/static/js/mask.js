// A mask as a value: one byte per pixel of the picture, 1 where it is to be repainted. No DOM.
//
// Every change returns the rectangle that it may have touched, as {left, top, right, bottom} (right and bottom
// exclusive), or null where it touched nothing.

export const MAX_PIXELS = 40_000_000; // what the service takes where nobody told it otherwise

export class Mask {
  constructor(width, height) {
    if (!(Number.isInteger(width) && Number.isInteger(height) && width > 0 && height > 0)) {
      throw new RangeError(`a mask has whole, positive sides, not ${width} x ${height}`);
    }
    if (width * height > MAX_PIXELS) {
      throw new RangeError(`a mask has at most ${MAX_PIXELS} pixels, not ${width} x ${height}`);
    }
    this.width = width;
    this.height = height;
    this.data = new Uint8Array(width * height);
  }

  /** A round brush drawn from one point to another: every pixel whose centre lies within `radius` of the line. */
  stroke(from, to, radius, value) {
    const box = this.#clip({
      left: Math.floor(Math.min(from.x, to.x) - radius),
      top: Math.floor(Math.min(from.y, to.y) - radius),
      right: Math.ceil(Math.max(from.x, to.x) + radius),
      bottom: Math.ceil(Math.max(from.y, to.y) + radius),
    });
    if (box === null) return null;
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const length2 = dx * dx + dy * dy;
    // a brush thinner than a pixel still paints the pixel under it
    const reach2 = Math.max(radius, Math.SQRT1_2) ** 2;
    for (let y = box.top; y < box.bottom; y++) {
      for (let x = box.left; x < box.right; x++) {
        const [px, py] = [x + 0.5 - from.x, y + 0.5 - from.y];
        const along = length2 === 0 ? 0 : Math.min(1, Math.max(0, (px * dx + py * dy) / length2));
        const [ex, ey] = [px - along * dx, py - along * dy];
        if (ex * ex + ey * ey <= reach2) this.data[y * this.width + x] = value;
      }
    }
    return box;
  }

  /** A filled rectangle between two corners, in any order; every pixel that it touches. */
  rectangle(a, b, value) {
    const box = this.#clip({
      left: Math.floor(Math.min(a.x, b.x)),
      top: Math.floor(Math.min(a.y, b.y)),
      right: Math.ceil(Math.max(a.x, b.x)),
      bottom: Math.ceil(Math.max(a.y, b.y)),
    });
    if (box === null) return null;
    for (let y = box.top; y < box.bottom; y++) {
      this.data.fill(value, y * this.width + box.left, y * this.width + box.right);
    }
    return box;
  }

  /** A filled outline: every pixel whose centre lies inside, by the even-odd rule. */
  polygon(points, value) {
    const [xs, ys] = [points.map(({ x }) => x), points.map(({ y }) => y)];
    const least = (all) => all.reduce((a, b) => Math.min(a, b)); // spread into Math.min, a long outline is too many arguments
    const most = (all) => all.reduce((a, b) => Math.max(a, b));
    const box = this.#clip({ left: Math.floor(least(xs)), top: Math.floor(least(ys)), right: Math.ceil(most(xs)), bottom: Math.ceil(most(ys)) });
    if (box === null) return null;
    for (let y = box.top; y < box.bottom; y++) {
      const crossed = [];
      points.forEach((a, i) => {
        const b = points[(i + 1) % points.length];
        if (a.y <= y + 0.5 !== b.y <= y + 0.5) crossed.push(a.x + ((y + 0.5 - a.y) * (b.x - a.x)) / (b.y - a.y));
      });
      crossed.sort((a, b) => a - b);
      for (let i = 0; i < crossed.length; i += 2) {
        const [first, end] = [crossed[i], crossed[i + 1]].map((x) => Math.min(box.right, Math.max(box.left, Math.ceil(x - 0.5))));
        this.data.fill(value, y * this.width + first, y * this.width + end);
      }
    }
    return box;
  }

  invert() {
    for (let i = 0; i < this.data.length; i++) this.data[i] ^= 1;
    return this.frame();
  }

  clear() {
    this.data.fill(0);
    return this.frame();
  }

  /** Takes over a mask picture as the service does: its transparent pixels if it has any, otherwise those of a luma of at least half. */
  read(rgba) {
    const clear = isTransparent(rgba);
    for (let i = 0; i < this.data.length; i++) this.data[i] = marks(rgba, i, clear) ? 1 : 0;
    return this.frame();
  }

  /** Gives every pixel that an opaque mask picture marks a value. */
  merge(rgba, value) {
    for (let i = 0; i < this.data.length; i++) if (marks(rgba, i, false)) this.data[i] = value;
    return this.frame();
  }

  frame() {
    return { left: 0, top: 0, right: this.width, bottom: this.height };
  }

  /** How much of the picture is masked, from 0 to 1. */
  ratio() {
    let count = 0;
    for (const value of this.data) count += value;
    return count / this.data.length;
  }

  /** The smallest rectangle around what is masked, or null. */
  bounds() {
    let [left, top, right, bottom] = [this.width, this.height, 0, 0];
    for (let y = 0; y < this.height; y++) {
      const row = this.data.subarray(y * this.width, (y + 1) * this.width);
      const first = row.indexOf(1);
      if (first < 0) continue;
      left = Math.min(left, first);
      right = Math.max(right, row.lastIndexOf(1) + 1);
      top = Math.min(top, y);
      bottom = y + 1;
    }
    return right > left ? { left, top, right, bottom } : null;
  }

  /** A copy of the bytes inside `box`, row by row. */
  copy(box) {
    const width = box.right - box.left;
    const bytes = new Uint8Array(width * (box.bottom - box.top));
    for (let y = box.top; y < box.bottom; y++) {
      const start = y * this.width + box.left;
      bytes.set(this.data.subarray(start, start + width), (y - box.top) * width);
    }
    return bytes;
  }

  /** Puts bytes of `copy` back. */
  put(box, bytes) {
    const width = box.right - box.left;
    for (let y = box.top; y < box.bottom; y++) {
      const start = (y - box.top) * width;
      this.data.set(bytes.subarray(start, start + width), y * this.width + box.left);
    }
    return box;
  }

  /** The pixels inside `box` as RGBA, `color` where masked and transparent (or `other`) elsewhere. */
  rgba(box, color, other = [0, 0, 0, 0]) {
    const width = box.right - box.left;
    const bytes = new Uint8ClampedArray(4 * width * (box.bottom - box.top));
    let at = 0;
    for (let y = box.top; y < box.bottom; y++) {
      for (let x = box.left; x < box.right; x++, at += 4) {
        bytes.set(this.data[y * this.width + x] ? color : other, at);
      }
    }
    return bytes;
  }

  #clip(box) {
    const clipped = {
      left: Math.max(0, box.left),
      top: Math.max(0, box.top),
      right: Math.min(this.width, box.right),
      bottom: Math.min(this.height, box.bottom),
    };
    return clipped.left < clipped.right && clipped.top < clipped.bottom ? clipped : null;
  }
}

/** Whether any of a picture's pixels, 4 bytes each, is transparent as the service means it. */
export function isTransparent(rgba) {
  for (let at = 3; at < rgba.length; at += 4) if (rgba[at] < 128) return true;
  return false;
}

function marks(rgba, i, clear) {
  const [red, green, blue, alpha] = [rgba[4 * i], rgba[4 * i + 1], rgba[4 * i + 2], rgba[4 * i + 3]];
  return clear ? alpha < 128 : 299 * red + 587 * green + 114 * blue >= 128000;
}

/** The smallest rectangle around two, either of which may be null. */
export function union(a, b) {
  if (a === null || b === null) return a ?? b;
  return {
    left: Math.min(a.left, b.left),
    top: Math.min(a.top, b.top),
    right: Math.max(a.right, b.right),
    bottom: Math.max(a.bottom, b.bottom),
  };
}
