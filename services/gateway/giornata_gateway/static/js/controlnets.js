// ControlNets: which ones the model follows, what each of them sees, how strongly and in which part of the steps.

import { card, icon, lay, list, number, options, place, scale } from "./cards.js";
import { check, mark } from "./checks.js";
import { attempt } from "./failures.js";
import { announce, at, element, showError } from "./page.js";
import { decode } from "./picture.js";

const MOST = 3;
const FILE = ["file", "A file"];
const PICTURE = ["picture", "The picture"];
const NONE = ["", "As it is"];
const ANNOTATORS = [["canny", "Canny edges"], ["soft_edge", "Soft edges"], ["tile", "Tile"]];

let model = null; // the one that the form is for, as in /v1/models
let task = "edit";
let cards = []; // as `made` of `add`, of any model

export function listenToControlnets() {
  const choice = at("controlnet-choice");
  choice.addEventListener("change", () => {
    const { value } = choice;
    choice.value = "";
    add(model.controlnets.find(({ name }) => name === value));
  });
}

/** Offers the ControlNets of a model of /v1/models for a task. */
export function fitControlnets(other, wanted) {
  [model, task] = [other, wanted];
  cards.forEach(fitSource);
  show();
  if (shown().length) at("controlnet-section").hidden = false; // also where its ControlNets are gone: none is left out unsaid
}

/** The request's fields: `controlnets`, and the pictures that they count as `control_images`. Null without any. */
export function controlnets() {
  const images = shown().filter(seesFile).map(({ picture }) => picture.blob);
  const asked = shown().map((one) => ({
    model: one.net.name,
    ...(seesFile(one) ? { image: imageOf(one) } : {}),
    ...(one.annotator.input.value ? { annotator: one.annotator.input.value } : {}),
    scale: one.scale.value(),
    start: one.start.value(),
    end: one.end.value(),
    ...(one.mode ? { mode: Number(one.mode.input.value) } : {}),
  }));
  return { controlnets: asked.length ? asked : null, control_images: images.length ? images : null };
}

/** Marks what is wrong; the request is not sent while something is. */
export function checkControlnets() {
  for (const one of shown()) {
    for (const { input } of [one.scale, one.end]) check(input);
    checkStart(one);
    mark(one.source.input, seesFile(one) && one.picture === null ? { message: "Choose its control image." } : null);
    if (!model.controlnets.some(({ name }) => name === one.net.name)) mark(one.source.input, { message: `${one.net.name} is not served now. Wait for it, or remove it.` });
    if (one.mode) mark(one.mode.input, one.mode.input.value === "" ? { message: `Choose which of its ${one.net.modes} kinds the control image is.` } : null);
  }
}

/** Shows an error of the gateway at the ControlNet that it names, or else at all of them; false where it names none. */
export function blameControlnet(error) {
  const image = /^control_image_(\d)$/.exec(error.param ?? "");
  const found = image ? null : place(error.param, "controlnets");
  if (!image && found === null) return false;
  const one = image ? shown().find((each) => seesFile(each) && imageOf(each) === Number(image[1])) : shown()[found.index];
  at("controlnet-section").open = true;
  const control = one && (one[image ? "source" : (found.key ?? "start")]?.input ?? one.source.input);
  if (control) mark(control, error);
  else showError(at("controlnet-error"), error);
  (control ?? at("controlnet-choice")).focus();
  return true;
}

export function clearControlnets() {
  showError(at("controlnet-error"), null);
  for (const one of shown()) controls(one).forEach(({ input }) => mark(input, null));
}

/** What a job says of its ControlNets; "" where it has none. */
export function toldControlnets(job) {
  const told = job.controlnets.map(({ model: name, scale: by, start, end }) => {
    const part = start > 0 || end < 1 ? ` from ${Math.round(100 * start)} to ${Math.round(100 * end)} %` : "";
    return `${name} × ${by}${part}`;
  });
  return told.length ? `${told.length > 1 ? "ControlNets" : "ControlNet"} ${told.join(", ")}` : "";
}

function shown() {
  return cards.filter((one) => one.model === model?.id);
}

function seesFile(one) {
  return one.source.input.value === "file";
}

function imageOf(one) {
  return shown().filter(seesFile).indexOf(one);
}

function controls(one) {
  return [one.source, one.annotator, one.scale, one.start, one.end, one.mode].filter(Boolean);
}

function checkStart(one) {
  check(one.start.input);
  const wrong = one.start.input.hasAttribute("aria-invalid") || one.end.input.hasAttribute("aria-invalid");
  if (!wrong && one.start.value() >= one.end.value()) mark(one.start.input, { message: `Start has to be below end, which is ${one.end.value()}.` });
}

function add(net) {
  const made = { net, model: model.id, picture: null, seesPicture: false };
  const share = { min: 0, max: 1, step: 0.05, changed: () => checkStart(made) };
  made.source = list("Sees", net.name, [FILE, PICTURE]);
  made.annotator = list("Made into", net.name, [NONE, ...ANNOTATORS]);
  made.scale = scale(net.name, 0);
  made.start = number("Start", net.name, { ...share, preset: 0 });
  made.end = number("End", net.name, { ...share, preset: 1 });
  made.mode = net.modes ? list("Mode", net.name, [["", "Choose"], ...Array.from({ length: net.modes }, (_, mode) => [String(mode), String(mode)])]) : null;
  made.thumb = element("button", { type: "button", className: "thumb" });
  made.element = drawn(made);
  made.source.input.addEventListener("change", () => fitSource(made));
  fitSource(made);
  showPicture(made);
  cards.push(made);
  show();
  announce(`The model follows ${net.name}`);
}

/** The card, with a hidden chooser of files behind its thumbnail. */
function drawn(made) {
  const { net } = made;
  const file = element("input", { type: "file", className: "hidden", accept: "image/png,image/jpeg,image/webp", tabIndex: -1 });
  file.setAttribute("aria-label", `File of the control image of ${net.name}`);
  made.thumb.addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    const [chosen] = file.files;
    file.value = ""; // the same file can be chosen again
    return attempt(() => take(made, chosen), made.source.error.id);
  });
  const sees = element("div", { className: "row sees" }, made.thumb, made.source.field, made.annotator.field);
  const steps = element("div", { className: "row" }, ...[made.start, made.end, made.mode].filter(Boolean).map(({ field }) => field));
  const errors = [made.scale, made.start, made.end, made.mode].filter(Boolean).map(({ error }) => error);
  return card("ControlNet", net.name, () => remove(made), sees, file, made.source.error, made.annotator.error, made.scale.field, steps, ...errors);
}

async function take(made, chosen) {
  mark(made.source.input, null);
  const { blob, bitmap, name } = await decode(chosen, chosen.name);
  bitmap.close();
  if (made.picture) URL.revokeObjectURL(made.picture.url);
  made.picture = { blob, name, url: URL.createObjectURL(blob) };
  showPicture(made);
  announce(`${name} is the control image of ${made.net.name}`);
}

function showPicture({ net, picture, thumb }) {
  thumb.replaceChildren(picture ? element("img", { src: picture.url, alt: "" }) : icon("picture"));
  thumb.title = picture ? `${picture.name}: press to choose another` : "Choose the control image";
  thumb.setAttribute("aria-label", `Control image of ${net.name}: ${picture ? picture.name : "choose a file"}`);
}

/** Offers what a ControlNet can see: a generation has no picture, and the picture itself is no control image. */
function fitSource(one) {
  const { input } = one.source;
  const picture = input.value === "picture" && task === "edit";
  input.replaceChildren(...options(task === "edit" ? [FILE, PICTURE] : [FILE]));
  input.value = picture ? "picture" : "file";
  const kept = one.seesPicture === picture ? one.annotator.input.value : picture ? ANNOTATORS[0][0] : "";
  one.annotator.input.replaceChildren(...options(picture ? ANNOTATORS : [NONE, ...ANNOTATORS]));
  one.annotator.input.value = kept;
  one.seesPicture = one.thumb.hidden = picture;
  if (one.source.error.isConnected) mark(input, null);
}

function remove(one) {
  cards = cards.filter((other) => other !== one);
  if (one.picture) URL.revokeObjectURL(one.picture.url);
  showError(at("controlnet-error"), null);
  show();
  at("controlnet-choice").focus();
  announce(`${one.net.name} is removed`);
}

function show() {
  const [count, choice] = [shown().length, at("controlnet-choice")];
  lay(at("controlnet-cards"), shown().map((one) => one.element));
  at("controlnet-note").textContent = count ? String(count) : "";
  const nets = model?.controlnets ?? [];
  const text = count >= MOST ? `At most ${MOST} act at a time` : nets.length ? "Choose a ControlNet" : "None is served now";
  choice.replaceChildren(...options([["", text], ...nets.map(({ name }) => [name, name])]));
  choice.disabled = count >= MOST || !nets.length;
}
