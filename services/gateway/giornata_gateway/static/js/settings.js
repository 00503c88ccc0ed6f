// The form of an edit: what the models take, what is asked for, and where a mistake is shown.

import { requestJson } from "./api.js";
import { at, element, showError } from "./page.js";
import { able, asks, listenToTask, missingPrompt, offerTasks, task } from "./task.js";

const PREVIEWS = 8;
const LARGE = 1.5; // times the model's own side
const form = at("edit");
const SHAPES = [[1, 1], [3, 2], [2, 3], [16, 9], [9, 16]]; // of generated pictures
const numbers = ["num_inference_steps", "guidance_scale", "strength", "n", "seed", "mask_blur", "padding_mask_crop"];

let models = [];
let wanted = null; // the model that a person chose, which may not be served now
let opened = null; // the picture, as in picture.js

/** Asks which models are served, and makes the form fit the chosen one. A person's choice stays, served or not. */
export async function loadModels() {
  models = (await requestJson("v1/models")).data;
  offerTasks(models);
  listModels();
}

/** Lists the models that do the task. */
function listModels() {
  const ids = able(models).map((model) => model.id);
  const missing = wanted !== null && !ids.includes(wanted);
  at("model-field").hidden = ids.length < 2 && !missing;
  if (missing) ids.push(wanted);
  const select = at("model");
  select.replaceChildren(...ids.map((id) => element("option", { value: id, textContent: id })));
  if (wanted !== null) select.value = wanted;
  check(select);
  fitToModel();
}

export function listenToSettings() {
  listenToTask(() => {
    clearBlame();
    for (const input of [at("steps"), at("guidance")]) delete input.dataset.touched; // each task has its own defaults
    listModels();
  });
  at("model").addEventListener("change", () => {
    wanted = at("model").value;
    check(at("model"));
    fitToModel();
  });
  at("sampler").addEventListener("change", () => {
    at("sampler").dataset.touched = "true";
    check(at("sampler"));
  });
  for (const input of form.querySelectorAll("input[name], textarea")) {
    input.addEventListener("input", () => {
      input.dataset.touched = "true";
      check(input);
    });
  }
  at("crop").addEventListener("change", () => {
    at("crop").dataset.touched = "true";
    crop(at("crop").checked);
  });
  at("die").addEventListener("click", () => rollSeeds(at("die").getAttribute("aria-pressed") !== "true"));
  at("seed").addEventListener("input", () => at("die").setAttribute("aria-pressed", String(at("seed").value === "")));
}

/** The fields of the request; null ones are not sent. Null when one is wrong, which is then shown and focused. */
export function read() {
  const prompt = at("prompt");
  check(prompt);
  check(at("model"));
  const asked = numbers.filter((name) => asks(form.elements[name]));
  asked.forEach((name) => check(form.elements[name]));
  const wrong = [...form.querySelectorAll("[aria-invalid=true]")].find(asks);
  if (wrong) {
    at("settings").open ||= at("settings").contains(wrong);
    wrong.focus();
    return null;
  }
  const value = (name) => (form.elements[name].disabled || form.elements[name].value === "" ? null : Number(form.elements[name].value));
  return {
    prompt: prompt.value.trim(),
    model: wanted ?? (able(models).length > 1 ? at("model").value : null),
    sampler: at("sampler-field").hidden ? null : at("sampler").value,
    ...Object.fromEntries(asked.map((name) => [name, value(name)])),
    ...(task() === "edit" ? { mask_mode: "white" } : { size: at("size").value }),
    partial_images: PREVIEWS,
  };
}

/** Shows an error of the gateway at the field that it names; false where it names none of this form. */
export function blame(error) {
  const field = [...form.querySelectorAll("[data-field]")].find((candidate) => candidate.dataset.field === error.param);
  if (!field || !asks(field)) return false;
  const input = field.querySelector("[name]");
  mark(input, { code: error.code, message: error.message.replace(`${error.param}: `, "") });
  at("settings").open ||= at("settings").contains(input);
  input.focus();
  return true;
}

export function clearBlame() {
  form.querySelectorAll("[name]").forEach((input) => mark(input, null));
}

/**
 * Advises the crop, and says why, where a picture is much larger than the model's own; where it is larger at all, if it
 * names the margin that suits it, as a sample does; only then is the crop switched on. A person's choice stays.
 */
export function fitToPicture(picture) {
  opened = picture;
  const model = chosen();
  const limit = model ? model.native_size * (picture.margin === null ? LARGE : 1) : Infinity;
  const larger = Math.max(picture.width, picture.height) > limit;
  at("crop-why").hidden = !larger;
  at("crop-why").textContent = larger
    ? `Best switched on here: ${model.id} is made for pictures of about ${model.native_size} × ${model.native_size} pixels; cropped, it paints the mask's surroundings at that size.`
    : "";
  suggest(at("padding"), picture.margin ?? at("padding").defaultValue);
  if (!at("crop").dataset.touched) crop(larger && picture.margin !== null);
}

function crop(on) {
  at("crop").checked = on;
  at("padding").disabled = !on;
  check(at("padding"));
}

export function setPrompt(text) {
  if (at("prompt").dataset.touched && at("prompt").value.trim()) return; // what a person wrote stays
  at("prompt").value = text;
  check(at("prompt"));
}

function rollSeeds(pressed) {
  at("die").setAttribute("aria-pressed", String(pressed));
  at("seed").value = pressed ? "" : Math.floor(Math.random() * 2 ** 32);
  check(at("seed"));
}

function chosen() {
  return able(models).find((candidate) => candidate.id === at("model").value);
}

function fitToModel() {
  const model = chosen();
  if (opened) fitToPicture(opened);
  at("model-note").textContent = model?.id ?? (wanted === null ? "No model is served now" : `${wanted} is not served now`);
  if (!model) return;
  suggest(at("steps"), model.default_steps);
  suggest(at("strength"), model.default_strength);
  offerSamplers(model);
  at("guidance").disabled = !model.takes_guidance;
  at("guidance-why").textContent = model.takes_guidance ? "" : `${model.id} takes no guidance`;
  const guidance = task() === "edit" ? model.default_guidance_scale : model.generation_guidance_scale;
  if (model.takes_guidance) suggest(at("guidance"), guidance);
  else at("guidance").value = "";
  fitSizes(model);
}

/** Offers the shapes that the model makes, each of about its native size. */
function fitSizes({ native_size: side, size_multiple: multiple }) {
  const cut = (length) => Math.max(multiple, Math.floor(length / multiple) * multiple);
  const sizes = SHAPES.map(([width, height]) => {
    const scale = side / Math.sqrt(width * height);
    return `${cut(width * scale)}x${cut(height * scale)}`;
  });
  const former = at("size").value;
  at("size").replaceChildren(...sizes.map((size) => element("option", { value: size, textContent: size.replace("x", " × ") })));
  at("size").value = sizes.includes(former) ? former : sizes[0];
}

/** The samplers that the model takes, where there is a choice. A person's choice stays where the model takes it. */
function offerSamplers(model) {
  const select = at("sampler");
  const stays = select.dataset.touched && model.samplers.includes(select.value);
  const value = stays ? select.value : model.default_sampler;
  at("sampler-field").hidden = model.samplers.length < 2;
  select.replaceChildren(...model.samplers.map((name) => element("option", { value: name, textContent: name })));
  select.value = value;
  check(select);
}

function suggest(input, value) {
  input.placeholder = String(value);
  if (!input.dataset.touched) input.value = value;
}

function check(input) {
  mark(input, mistake(input));
}

function mistake(input) {
  if (input.disabled) return null;
  if (input.id === "model") return wanted === null || chosen() ? null : { message: `${wanted} is not served now. Wait for it, or choose another.` };
  if (input.id === "prompt") return input.value.trim() ? null : { message: missingPrompt() };
  if (input.id === "padding" && input.value === "" && !input.validity.badInput) return { message: "How many pixels; 0 for none." };
  const { validity, min, max } = input;
  if (validity.badInput) return { message: "This is not a number." };
  if (validity.rangeUnderflow || validity.rangeOverflow) return { message: `From ${min} to ${max}.` };
  if (input.step === "1" && validity.stepMismatch) return { message: "A whole number." };
  return null;
}

function mark(input, error) {
  const place = at(`${input.id}-error`);
  showError(place, error);
  if (error) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}
