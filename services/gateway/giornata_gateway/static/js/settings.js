// The form of an edit or a generation: what is asked for, and at which field a mistake is shown.

import { adapters, blameAdapters, checkAdapters, clearAdapters, fitAdapters, listenToAdapters } from "./adapters.js";
import { asks, check, mark } from "./checks.js";
import { fitControls, fitGuidance, suggest } from "./controls.js";
import { chooseModel, chosen, fetchModels, listModels, named, shown } from "./models.js";
import { at } from "./page.js";
import { fitReferences, listenToReferences, references } from "./references.js";
import { fitSpeed, listenToSpeed } from "./speed.js";
import { listenToTask, task } from "./task.js";

const PREVIEWS = 8;
const LARGE = 1.5; // times the model's own side
const form = at("edit");
const texts = ["negative_prompt", "sampler", "reuse", "size", "lora_wait"];
const switches = ["step_cache"]; // off unless a person chooses otherwise
const numbers = ["num_inference_steps", "guidance_scale", "true_cfg_scale", "strength", "n", "seed", "mask_blur", "padding_mask_crop", "step_cache_interval", "step_cache_warmup"];

let opened = null; // the picture, as in picture.js

/** Asks which models are served, and makes the form fit the chosen one. */
export async function loadModels() {
  await fetchModels();
  fitToModel();
}

export function listenToSettings() {
  listenToTask(() => {
    clearBlame();
    for (const input of [at("steps"), at("guidance")]) delete input.dataset.touched; // each task has its own defaults
    listModels();
    fitToModel();
  });
  at("model").addEventListener("change", () => {
    chooseModel();
    fitToModel();
  });
  for (const input of form.querySelectorAll("[name]:not(#model)")) {
    input.addEventListener("input", () => {
      input.dataset.touched = "true";
      input.dataset.choice = input.value;
      check(input);
    });
  }
  listenToReferences();
  listenToAdapters();
  listenToSpeed();
  at("negative").addEventListener("input", fitGuidance);
  at("crop").addEventListener("change", () => {
    at("crop").dataset.touched = "true";
    crop(at("crop").checked);
  });
  at("die").addEventListener("click", () => rollSeeds(at("die").getAttribute("aria-pressed") !== "true"));
  at("seed").addEventListener("input", () => at("die").setAttribute("aria-pressed", String(at("seed").value === "")));
}

/** The fields of the request; null ones are not sent. Null when one is wrong, which is then shown and focused. */
export function read() {
  const asked = (name) => asks(form.elements[name]) && !form.elements[name].disabled;
  for (const name of ["prompt", "model", ...numbers.filter(asked)]) check(form.elements[name]);
  checkAdapters();
  const wrong = [...form.querySelectorAll("[aria-invalid=true]")].find(asks);
  if (wrong) {
    reveal(wrong);
    return null;
  }
  const value = (name) => (asked(name) && form.elements[name].value.trim()) || null;
  const number = (name) => (value(name) === null ? null : Number(value(name)));
  return {
    prompt: at("prompt").value.trim(),
    model: named(),
    ...Object.fromEntries(texts.map((name) => [name, value(name)])),
    ...Object.fromEntries(switches.map((name) => [name, value(name) === "off" ? null : value(name)])),
    ...Object.fromEntries(numbers.map((name) => [name, number(name)])),
    reference: asks(at("reference")) && references().length ? references() : null,
    ...adapters(),
    mask_mode: task() === "edit" ? "white" : null,
    partial_images: PREVIEWS,
  };
}

/** Shows an error of the gateway at the field that it names; false where it names none of this form. */
export function blame(error) {
  const told = { code: error.code, param: error.param, message: error.message.replace(`${error.param}: `, "") };
  const input = form.elements[error.param];
  if (!input || !asks(input)) return blameAdapters(told);
  mark(input, told);
  reveal(input);
  return true;
}

/** Focuses a control, and opens the part of the form that holds it. */
function reveal(input) {
  const section = input.closest("details");
  if (section) section.open = true;
  input.focus();
}

export function clearBlame() {
  form.querySelectorAll("[name]").forEach((input) => mark(input, null));
  clearAdapters();
}

/**
 * Switches the crop on, and says why, where a picture is much larger than the model's own; where it is larger at all, if it
 * names the margin that suits it, as a sample does; otherwise the margin grows with it. A person's choice stays.
 */
export function fitToPicture(picture) {
  opened = picture;
  const model = chosen();
  const limit = model ? model.native_size * (picture.margin === null ? LARGE : 1) : Infinity;
  const side = Math.max(picture.width, picture.height);
  const larger = side > limit;
  at("crop-why").textContent = larger
    ? `Best switched on here: ${model.id} is made for pictures of about ${model.native_size} × ${model.native_size} pixels; cropped, it paints the mask's surroundings at that size, and is done sooner.`
    : "";
  suggest(at("padding"), picture.margin ?? Math.max(at("padding").defaultValue, larger ? Math.round(side / 16) : 0));
  if (!at("crop").dataset.touched) crop(larger);
}

export function setPrompt(text) {
  if (at("prompt").dataset.touched && at("prompt").value.trim()) return; // what a person wrote stays
  at("prompt").value = text;
  check(at("prompt"));
}

function crop(on) {
  at("crop").checked = on;
  at("padding").disabled = !on;
  check(at("padding"));
}

function rollSeeds(pressed) {
  at("die").setAttribute("aria-pressed", String(pressed));
  at("seed").value = pressed ? "" : Math.floor(Math.random() * 2 ** 32);
  check(at("seed"));
}

function fitToModel() {
  check(at("model"));
  const model = shown();
  if (model) {
    fitReferences(model);
    fitControls(model, task());
    fitSpeed(model);
    fitAdapters(model, task());
  }
  if (opened) fitToPicture(opened);
}
