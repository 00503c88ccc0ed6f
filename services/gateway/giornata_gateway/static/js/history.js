// Undo and redo of a mask: for each change, the bytes of its rectangle before and after it. No DOM.

const MAX_BYTES = 96_000_000;

export class History {
  #done = [];
  #undone = [];
  #bytes = 0;

  constructor(maxBytes = MAX_BYTES) {
    this.maxBytes = maxBytes;
  }

  get canUndo() {
    return this.#done.length > 0;
  }

  get canRedo() {
    return this.#undone.length > 0;
  }

  /** Carries out `change` on `mask`, a function that returns the touched rectangle, and remembers it. */
  apply(mask, change) {
    const stroke = this.begin(mask);
    const box = change(mask);
    return stroke.end(box);
  }

  /** A change that takes a while, as a stroke: call `end`, or `cancel`, with all that it touched. */
  begin(mask) {
    const before = mask.data.slice();
    return {
      cancel: (box) => (box === null ? null : mask.put(box, cut(before, mask.width, box))),
      end: (box) => {
        if (box === null) return null;
        const old = cut(before, mask.width, box);
        const now = mask.copy(box);
        if (old.every((value, i) => value === now[i])) return null;
        this.#undone = [];
        this.#done.push({ box, old, now });
        this.#bytes = this.#done.reduce((sum, entry) => sum + 2 * entry.old.length, 0);
        while (this.#bytes > this.maxBytes && this.#done.length > 1) {
          this.#bytes -= 2 * this.#done.shift().old.length;
        }
        return box;
      },
    };
  }

  undo(mask) {
    const entry = this.#done.pop();
    if (!entry) return null;
    this.#undone.push(entry);
    return mask.put(entry.box, entry.old);
  }

  redo(mask) {
    const entry = this.#undone.pop();
    if (!entry) return null;
    this.#done.push(entry);
    return mask.put(entry.box, entry.now);
  }
}

function cut(data, width, box) {
  const columns = box.right - box.left;
  const bytes = new Uint8Array(columns * (box.bottom - box.top));
  for (let y = box.top; y < box.bottom; y++) {
    const start = y * width + box.left;
    bytes.set(data.subarray(start, start + columns), (y - box.top) * columns);
  }
  return bytes;
}
