// Finished pictures: before and after, the strip of one edit's pictures, and earlier edits. They are kept as files, also by
// the browser; only the two pictures on the stage are decoded.

import { announce, at, element, showError } from "./page.js";
import { decode } from "./picture.js";
import { keep, KEPT } from "./saved.js";

/** A finished picture, with a small one of its patch for the strips. */
export async function finishedPicture(edit, blob, seed) {
  const { bitmap } = await decode(blob, "Finished picture");
  const small = await patch(bitmap, edit.bounds);
  bitmap.close();
  return withUrls({ seed, blob, small });
}

function withUrls({ blob, small, ...picture }) {
  return blob ? { ...picture, blob, small, url: URL.createObjectURL(blob), thumb: URL.createObjectURL(small) } : picture;
}

/**
 * Finished edits. One is {id, savedMs, before, prompt, bounds, pictures, shown}: `before` as in picture.js without its bitmap,
 * and without its `blob` where the pictures were made from text; `bounds` of its mask, `pictures` of `finishedPicture`, or {error}. `show()` is called whenever another picture is to be
 * seen; until it returns, the bitmaps of the former one are there.
 */
export class Results {
  current = null;
  bitmaps = []; // of the original and of `picture`
  #edits = [];
  #show;
  #turn = 0;

  constructor(show) {
    this.#show = show;
    at("compare").addEventListener("input", () => this.compareTo(at("compare").valueAsNumber / 100));
  }

  oncompare = () => {};

  get picture() {
    return this.current?.pictures[this.current.shown] ?? null;
  }

  /** Takes an edit whose pictures have come. */
  add(edit) {
    const edits = [edit, ...this.#edits];
    this.#edits = edits.filter((one, place) => place < KEPT || one === this.current);
    edits.filter((one) => !this.#edits.includes(one)).forEach(release);
    this.#visit();
    return keep(edit);
  }

  /** Takes edits that the browser has kept. */
  restore(edits) {
    const others = edits.filter(({ id }) => !this.find(id));
    this.#edits.push(...others.map((edit) => ({ ...edit, pictures: edit.pictures.map(withUrls) })));
    if (this.#edits.length) this.#visit();
  }

  find(id) {
    return this.#edits.find((edit) => edit.id === id);
  }

  /** Forgets all edits; nothing of them may be shown. */
  clear() {
    this.#edits.forEach(release);
    this.bitmaps.forEach((bitmap) => bitmap.close());
    this.#edits = this.bitmaps = [];
    this.current = null;
    at("visit").hidden = true;
  }

  /** Shows the next picture of the edit that is shown, or with -1 the one before it. */
  async step(by) {
    const { pictures, shown } = this.current;
    const finished = [...pictures.keys()].filter((index) => pictures[index].url);
    const index = finished.at((finished.indexOf(shown) + by) % finished.length);
    this.current.shown = index; // at once: the next step goes on from here, though nothing is decoded yet
    if (index !== shown && (await this.select(this.current, index))) announce(`Picture ${index + 1}`);
  }

  /** Keeps the picture that is shown and lets go of the edit's others, or the other way round. */
  async decide(kept) {
    const { current: edit, picture } = this;
    const place = edit.pictures.indexOf(picture);
    const gone = edit.pictures.filter((one) => (one === picture) !== kept);
    edit.pictures = edit.pictures.filter((one) => !gone.includes(one));
    const finished = [...edit.pictures.keys()].filter((index) => edit.pictures[index].url);
    edit.shown = kept ? 0 : (finished.find((index) => index >= place) ?? finished.at(-1));
    release({ pictures: gone });
    await Promise.all([this.select(edit, edit.shown), keep(edit)]);
    announce(kept ? "The picture is kept, the others are gone" : `Discarded; picture ${edit.shown + 1} of ${edit.pictures.length}`);
    if (edit.pictures.length < 2) at("download").focus();
  }

  /** Shows a picture of an edit once it is decoded; false if another was selected meanwhile, or `wanted()` no longer holds. */
  async select(edit, index, wanted = () => true) {
    const turn = ++this.#turn;
    const painted = edit.pictures[index].blob;
    const bitmaps = await Promise.all([edit.before.blob ?? painted, painted].map((blob) => createImageBitmap(blob)));
    const [former, fresh] = [this.bitmaps, edit !== this.current];
    if (turn !== this.#turn || !wanted()) {
      bitmaps.forEach((bitmap) => bitmap.close());
      return false;
    }
    Object.assign(this, { current: edit, bitmaps });
    edit.shown = index;
    this.#tell(fresh);
    this.#show();
    former.forEach((bitmap) => bitmap.close());
    return true;
  }

  /** Of another edit than before, the line between before and after stands at the mask's edge: all that is new is seen. */
  #tell(fresh) {
    const { current: edit, picture } = this;
    at("download").href = picture.url;
    at("download").download = `${stem(edit.before.name)}-${picture.seed}.png`;
    at("result-note").textContent = `Seed ${picture.seed}`;
    at("result-adapters").textContent = picture.adapters;
    at("result-adapters").hidden = !picture.adapters;
    this.#film();
    this.#visit();
    at("compare-label").hidden = !edit.before.blob;
    if (fresh) this.compareTo(edit.before.blob ? (edit.bounds?.left ?? 0) / edit.before.width : 0);
    at("decide").hidden = edit.pictures.length < 2;
    at("discard").disabled = edit.pictures.filter(({ url }) => url).length < 2;
  }

  /** How much of the width shows the original, from 0 to 1. */
  compareTo(share) {
    const value = Math.min(1, Math.max(0, share));
    at("compare").value = Math.round(value * 100);
    at("compare").setAttribute("aria-valuetext", `${Math.round(value * 100)} % original`);
    this.oncompare(value);
  }

  #film() {
    const edit = this.current;
    const film = at("film");
    film.replaceChildren(
      ...edit.pictures.map((picture, index) => {
        if (picture.error) return failed(picture.error, `Picture ${index + 1} failed`);
        return thumb(picture, `Picture ${index + 1}, seed ${picture.seed}`, `${index + 1}`, index === edit.shown, async () => {
          if (!(await this.select(edit, index))) return;
          announce(`Picture ${index + 1}`);
          film.children[index].focus();
        });
      }),
    );
  }

  #visit() {
    at("visit").hidden = false;
    const strip = at("visit-strip");
    strip.replaceChildren(
      ...this.#edits.map((edit, position) => {
        const picture = edit.pictures.find((candidate) => candidate.url);
        return thumb(picture, `Edit: ${edit.prompt}`, edit.prompt, edit === this.current, async () => {
          if (await this.select(edit, edit.shown)) strip.children[position].focus();
        });
      }),
    );
  }
}

function thumb(picture, label, text, pressed, press) {
  const image = element("img", { src: picture.thumb, alt: "" });
  const button = element("button", { type: "button", className: "thumb", title: label }, image, element("span", { textContent: text }));
  button.setAttribute("aria-label", label);
  button.setAttribute("aria-pressed", String(pressed));
  button.addEventListener("click", press);
  return button;
}

/** Lets go of an edit's files. */
function release({ pictures }) {
  for (const { url, thumb } of pictures) {
    if (url) [url, thumb].forEach((one) => URL.revokeObjectURL(one));
  }
}

/** What stands in the film for a picture that failed: focusable, since its words may have to be scrolled. */
function failed(error, label) {
  const place = element("p", { className: "failed", tabIndex: 0 });
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", label);
  showError(place, error);
  return place;
}

function stem(name) {
  return name.replace(/\.[a-z]+$/i, "").replace(/[^\w.-]+/g, "-") || "edited";
}

/** A small picture of what was repainted and a little around it. */
async function patch(bitmap, bounds) {
  const [width, height] = [176, 132];
  const box = bounds ?? { left: 0, top: 0, right: bitmap.width, bottom: bitmap.height };
  const span = Math.max(box.right - box.left, ((box.bottom - box.top) * width) / height) * 1.3;
  const scale = Math.max(width / Math.min(span, bitmap.width), height / bitmap.height);
  const within = (middle, size, all) => Math.min(Math.max(middle - size / 2, 0), all - size);
  const x = within((box.left + box.right) / 2, width / scale, bitmap.width);
  const y = within((box.top + box.bottom) / 2, height / scale, bitmap.height);
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").drawImage(bitmap, x, y, width / scale, height / scale, 0, 0, width, height);
  return canvas.convertToBlob({ type: "image/png" });
}
