// References: pictures that the model looks at beside the one that it edits. A person adds them, and removes them again.

import { attempt } from "./failures.js";
import { announce, at, element, showError } from "./page.js";
import { decode } from "./picture.js";

let held = []; // {blob, name, url}
let most = 0; // as many as the model takes; the others wait for a model that takes more

export function listenToReferences() {
  const input = at("reference-file");
  at("reference").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // the same file can be chosen again
    return attempt(() => add(files), "reference-error");
  });
}

/** Offers as many references as the model of /v1/models takes. */
export function fitReferences({ max_references }) {
  most = max_references;
  show();
}

/** The files of the references that are shown. */
export function references() {
  return shown().map(({ blob }) => blob);
}

function shown() {
  return held.slice(0, most);
}

async function add(files) {
  showError(at("reference-error"), null);
  const room = most - shown().length;
  const added = [];
  for (const file of files.slice(0, room)) {
    const { blob, bitmap, name } = await decode(file, file.name);
    bitmap.close();
    added.push({ blob, name, url: URL.createObjectURL(blob) });
  }
  held.splice(shown().length, 0, ...added);
  show();
  announce(`${shown().length} of at most ${most} references`);
  if (files.length > room) showError(at("reference-error"), { message: `The model takes at most ${most} references.` });
}

function remove(one) {
  const place = held.indexOf(one);
  held.splice(place, 1);
  URL.revokeObjectURL(one.url);
  showError(at("reference-error"), null);
  show();
  (at("reference-strip").children[Math.min(place, shown().length - 1)] ?? at("reference")).focus();
  announce(`${one.name} is removed`);
}

function show() {
  at("reference-strip").replaceChildren(...shown().map(thumb));
  at("reference").disabled = shown().length >= most;
  at("reference-note").textContent = `${shown().length} of at most ${most}`;
}

function thumb(one) {
  const label = `Remove the reference ${one.name}`;
  const button = element("button", { type: "button", className: "thumb", title: label }, element("img", { src: one.url, alt: "" }), element("span", { textContent: one.name }));
  button.setAttribute("aria-label", label);
  button.addEventListener("click", () => remove(one));
  return button;
}
