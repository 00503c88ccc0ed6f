// Pictures from files, the clipboard, a drop or the strip of samples, as {blob, bitmap, name, width, height, margin}, upright.
// `margin` is a crop's, in pixels, that suits the picture; null where nothing is known.

import { ApiError, requestBlob, requestJson } from "./api.js";
import { isTransparent, MAX_PIXELS } from "./mask.js";
import { at, element } from "./page.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"];

export async function decode(blob, name) {
  if (!TYPES.includes(blob.type)) {
    throw new ApiError({
      code: "picture_type",
      message: `“${name}” is ${blob.type || "of an unknown type"}; a PNG, JPEG or WebP picture can be edited.`,
    });
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new ApiError({ code: "picture_unreadable", message: `“${name}” cannot be read as a picture.` });
  }
  const { width, height } = bitmap;
  try {
    checkSize(name, width, height);
  } catch (error) {
    bitmap.close();
    throw error;
  }
  return { blob, bitmap, name, width, height, margin: null };
}

function checkSize(name, width, height) {
  if (width * height <= MAX_PIXELS) return;
  const message = `“${name}” has ${width} × ${height} pixels; at most ${MAX_PIXELS / 1e6} million can be edited here.`;
  throw new ApiError({ code: "picture_too_large", message });
}

/** The pixels of a picture of which some are transparent, which the service would repaint; of any other null. */
export async function transparency({ blob, width, height }) {
  if (blob.type === "image/jpeg") return null;
  const rgba = await pixels(blob, width, height);
  return isTransparent(rgba) ? rgba : null;
}

/** A picture with so many pixels more at its sides, which go on as its edges are. */
export async function extended({ bitmap, name, width, height, margin }, { left, top, right, bottom }) {
  const [wide, high] = [left + width + right, top + height + bottom];
  checkSize(name, wide, high);
  const canvas = new OffscreenCanvas(wide, high);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(bitmap, left, top);
  context.drawImage(bitmap, 0, 0, 1, height, 0, top, left, height);
  context.drawImage(bitmap, width - 1, 0, 1, height, left + width, top, right, height);
  context.drawImage(canvas, 0, top, wide, 1, 0, 0, wide, top);
  context.drawImage(canvas, 0, top + height - 1, wide, 1, 0, top + height, wide, bottom);
  return { ...(await decode(await canvas.convertToBlob({ type: "image/png" }), name)), margin };
}

/** The pixels of a mask file for a picture, in its size. */
export async function maskPixels(file, { width, height }) {
  const mask = await decode(file, file.name);
  mask.bitmap.close();
  if (Math.abs(mask.width * height - width * mask.height) > Math.max(width, height)) {
    const message = `The mask has ${mask.width} × ${mask.height} pixels; the picture has ${width} × ${height}, which is another shape.`;
    throw new ApiError({ code: "mask_size_mismatch", message });
  }
  return pixels(file, width, height);
}

/** A sample and its mask's pixels (or null), from an entry of samples.json. */
export async function sample(entry) {
  const fetched = (file) => requestBlob(`studio/samples/${file}`);
  const picture = { ...(await decode(await fetched(entry.file), entry.title)), margin: entry.padding_mask_crop ?? null };
  if (!entry.mask) return { picture, rgba: null };
  return { picture, rgba: await pixels(await fetched(entry.mask), picture.width, picture.height) };
}

/** A picture's pixels, scaled to a size, 4 bytes each. */
export async function pixels(blob, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const bitmap = await createImageBitmap(blob);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height).data;
}

/** Fills the strip of samples; `take(entry)` is called with the one that is pressed. */
export async function showSamples(take) {
  const { samples } = await requestJson("studio/samples/samples.json");
  const strip = at("samples");
  strip.replaceChildren(
    ...samples.map((entry) => {
      const image = element("img", { src: `studio/samples/${entry.file}`, alt: "", loading: "lazy" });
      const button = element("button", { type: "button", className: "thumb" }, image, element("span", { textContent: entry.title }));
      button.title = entry.credit ? `${entry.title} (${entry.credit})` : entry.title;
      button.dataset.title = entry.title;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => take(entry));
      return button;
    }),
  );
}

/** Calls `take(blob, name)` for what is chosen, dropped or pasted. */
export function listenForPictures(take) {
  const input = at("file");
  const choose = () => input.click();
  at("choose").addEventListener("click", choose);
  at("choose-empty").addEventListener("click", choose);
  input.addEventListener("change", () => {
    if (input.files[0]) take(input.files[0], input.files[0].name);
    input.value = ""; // the same file can be chosen again
  });

  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])][0];
    if (!file) return;
    event.preventDefault();
    take(file, file.name || "pasted picture");
  });

  const veil = at("veil");
  let depth = 0; // dragenter and dragleave come for every element on the way
  const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragenter", (event) => {
    if (carriesFile(event)) veil.hidden = ++depth === 0;
  });
  document.addEventListener("dragleave", (event) => {
    if (carriesFile(event)) veil.hidden = --depth <= 0;
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    const file = event.dataTransfer?.files[0];
    if (file) take(file, file.name);
  });
  return choose;
}
