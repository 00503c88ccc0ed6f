// A mask from words: the gateway marks what they name in the picture, and the mask is drawn on from there. Each thing that
// was found can be taken or left by a click.

import { ApiError, requestJson } from "./api.js";
import { mark } from "./checks.js";
import { attempt } from "./failures.js";
import { announce, at, decoded, showError } from "./page.js";
import { pixels } from "./picture.js";

let found = { picture: null, regions: [] }; // of the picture in which words were found last

/** `opened()` is the picture that is edited, or null; `take(rgba)` makes a mask's pixels the mask. */
export function listenToWords(opened, take) {
  at("find").addEventListener("click", () => attempt(() => find(opened, take), "words-error"));
  at("words").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault(); // the form's own answer is an edit
    at("find").click();
  });
}

async function find(opened, take) {
  const [picture, input, button] = [opened(), at("words"), at("find")];
  const words = input.value.trim();
  const missing = picture === null ? "Choose a picture first." : words ? null : "Say what to edit.";
  mark(input, missing && { message: missing });
  if (missing) {
    input.focus();
    return;
  }
  button.disabled = true;
  try {
    const { regions, b64_png: all } = await named(picture.blob, words);
    const rgba = await pixels(decoded(all, "image/png"), picture.width, picture.height);
    if (opened() !== picture) return; // a person has opened another one meanwhile
    found = { picture, regions };
    take(rgba);
    announce(`Masked: ${words}; ${regions.length} found`);
  } finally {
    button.disabled = false;
  }
}

/** The mask of the smallest thing found that lies at a point of the picture, as its pixels; null, and says why, where there is none. */
export async function regionAt(picture, { x, y }) {
  if (found.picture !== picture) {
    showError(at("words-error"), { message: "Say what to edit and press Find; then click one of what was found." });
    at("words").focus();
    return null;
  }
  const holds = ({ box: [left, top, width, height] }) => x >= left && y >= top && x < left + width && y < top + height;
  for (const region of found.regions.filter(holds).sort((a, b) => a.area - b.area)) {
    const rgba = await pixels(decoded(region.b64_png, "image/png"), picture.width, picture.height);
    if (rgba[4 * (Math.floor(y) * picture.width + Math.floor(x))] > 127) return rgba;
  }
  announce("Nothing that was found lies here");
  return null;
}

/** What words name in a picture, as the gateway tells it. What the gateway says of the words is said of this form's. */
async function named(image, words) {
  const body = new FormData();
  body.append("prompt", words);
  body.append("image", image, "image");
  try {
    return await requestJson("v1/masks", { method: "POST", body });
  } catch (error) {
    if (error instanceof ApiError && error.param !== "image") error.param = "mask_prompt";
    throw error;
  }
}
