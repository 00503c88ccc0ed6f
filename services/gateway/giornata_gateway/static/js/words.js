// A mask from words: the gateway marks what they name in the picture, and the mask is drawn on from there.

import { ApiError, requestBlob } from "./api.js";
import { mark } from "./checks.js";
import { attempt } from "./failures.js";
import { announce, at } from "./page.js";
import { pixels } from "./picture.js";

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
    const rgba = await pixels(await named(picture.blob, words), picture.width, picture.height);
    if (opened() !== picture) return; // a person has opened another one meanwhile
    take(rgba);
    announce(`Masked: ${words}`);
  } finally {
    button.disabled = false;
  }
}

/** The mask of what words name in a picture, as a PNG. What the gateway says of the words is said of this form's. */
async function named(image, words) {
  const body = new FormData();
  body.append("prompt", words);
  body.append("image", image, "image");
  try {
    return await requestBlob("v1/masks", { method: "POST", body, headers: { Accept: "image/png" } });
  } catch (error) {
    if (error instanceof ApiError && error.param !== "image") error.param = "mask_prompt";
    throw error;
  }
}
