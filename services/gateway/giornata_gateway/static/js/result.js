// Finished pictures: before and after, the strip of one edit's pictures, and the edits of this visit.

import { announce, at, element } from "./page.js";

const KEPT = 12; // edits of this visit

/** A finished picture, with a small one of its patch for the strips. */
export async function finishedPicture(edit, blob, seed) {
  const bitmap = await createImageBitmap(blob);
  return { bitmap, seed, url: URL.createObjectURL(blob), blob, thumb: await patch(bitmap, edit.bounds) };
}

/**
 * The edits of this visit. One is {before, prompt, bounds, pictures, shown}: `before` as in picture.js, `bounds` of its
 * mask, `pictures` of `finishedPicture`, or {error}. `show()` is called whenever another picture is to be seen.
 */
export class Results {
  current = null;
  #edits = [];
  #show;

  constructor(show) {
    this.#show = show;
    at("compare").addEventListener("input", () => this.compareTo(at("compare").valueAsNumber / 100));
  }

  oncompare = () => {};

  get picture() {
    return this.current?.pictures[this.current.shown] ?? null;
  }

  /** Takes an edit whose pictures have come, or more of them. */
  add(edit) {
    if (!this.#edits.includes(edit)) this.#edits.unshift(edit);
    for (const old of this.#edits.splice(KEPT)) {
      for (const picture of old.pictures) {
        if (picture.url) [picture.url, picture.thumb].forEach((url) => URL.revokeObjectURL(url));
        picture.bitmap?.close();
      }
    }
    this.select(edit, edit.shown);
  }

  select(edit, index) {
    this.current = edit;
    edit.shown = index;
    const picture = this.picture;
    at("download").href = picture.url;
    at("download").download = `${stem(edit.before.name)}-${picture.seed}.png`;
    at("result-note").textContent = `Seed ${picture.seed}`;
    this.#film();
    this.#visit();
    this.compareTo(0.5);
    this.#show();
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
        if (picture.error) {
          return element("span", { className: "failed", title: picture.error.message, textContent: picture.error.code });
        }
        return thumb(picture, `Picture ${index + 1}, seed ${picture.seed}`, `${index + 1}`, index === edit.shown, () => {
          this.select(edit, index);
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
        return thumb(picture, `Edit: ${edit.prompt}`, edit.prompt, edit === this.current, () => {
          this.select(edit, edit.shown);
          strip.children[position].focus();
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

function stem(name) {
  return name.replace(/\.[a-z]+$/i, "").replace(/[^\w.-]+/g, "-") || "edited";
}

/** A small picture of what was repainted and a little around it, as a URL. */
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
  return URL.createObjectURL(await canvas.convertToBlob({ type: "image/png" }));
}
