// LoRAs: which ones act on the model, and how strongly. The list is that of /v1/loras; a file can be added to it.

import { ApiError, requestJson } from "./api.js";
import { card, lay, options, place, scale } from "./cards.js";
import { check, mark } from "./checks.js";
import { attempt } from "./failures.js";
import { announce, at, showError } from "./page.js";

const MOST = 4;
const MORE = "more";
const PAGE = 100;

let model = null; // the one that the form is for, as in /v1/models
let listed = []; // what /v1/loras has told, the newest first
let more = false; // whether it has more to tell
let cards = []; // {lora, element, scale}, of any model
const names = new Map(); // of LoRAs, by id

export function listenToLoras() {
  const [section, choice, file] = [at("lora-section"), at("lora-choice"), at("lora-file")];
  section.addEventListener("toggle", () => section.open && attempt(listAnew, "lora-error"));
  choice.addEventListener("change", () => {
    const { value } = choice;
    choice.value = "";
    if (value === MORE) return attempt(listMore, "lora-error");
    add(listed.find(({ id }) => id === value));
  });
  at("lora-upload").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    const [chosen] = file.files;
    file.value = ""; // the same file can be chosen again
    return attempt(() => upload(chosen), "lora-error");
  });
}

/** Offers the LoRAs of a model of /v1/models. */
export function fitLoras(other) {
  const changed = model?.id !== other.id;
  model = other;
  show();
  if (changed && at("lora-section").open) return attempt(listAnew, "lora-error");
}

/** The request's field; null where no LoRA is chosen. */
export function loras() {
  return shown().length ? shown().map((one) => ({ id: one.lora.id, scale: one.scale.value() })) : null;
}

export function checkLoras() {
  for (const one of shown()) check(one.scale.input);
}

/** Shows an error of the gateway at the LoRA that it names, or else at all of them; false where it names none. */
export function blameLora(error) {
  const found = place(error.param, "loras");
  if (found === null) return false;
  const one = shown()[found.index];
  at("lora-section").open = true;
  if (one) mark(one.scale.input, error);
  else showError(at("lora-error"), error);
  (one?.scale.input ?? at("lora-choice")).focus();
  return true;
}

export function clearLoras() {
  showError(at("lora-error"), null);
  for (const one of shown()) mark(one.scale.input, null);
}

/** What a finished job says of its LoRAs, of which it knows `from`, the step from which they acted; "" where it has none. */
export async function toldLoras(job, from) {
  const told = await Promise.all(job.loras.map(async ({ id, scale: by }) => `${await nameOf(id)} × ${by}`));
  if (!told.length) return "";
  const since = (from ?? null) === null ? "" : from === 0 ? ", from the first step" : `, from step ${from + 1}`;
  return `${told.length > 1 ? "LoRAs" : "LoRA"} ${told.join(", ")}${since}`;
}

async function nameOf(id) {
  if (!names.has(id)) {
    try {
      remember([await requestJson(`v1/loras/${id}`)]);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      names.set(id, `${id.slice(0, 13)}…`); // it is deleted, or the gateway is away
    }
  }
  return names.get(id);
}

function remember(told) {
  for (const { id, name } of told) names.set(id, name ?? `${id.slice(0, 13)}…`);
}

async function listAnew() {
  [listed, more] = [[], true];
  await listMore();
}

/** Asks for further LoRAs until one can be offered. */
async function listMore() {
  const before = offered().length;
  const wanted = model.id;
  while (more && offered().length === before && wanted === model.id) {
    const last = listed.at(-1);
    const page = await requestJson(`v1/loras?limit=${PAGE}${last ? `&after=${last.id}` : ""}`);
    listed = [...listed, ...page.data.filter(({ id }) => !listed.some((one) => one.id === id))];
    more = page.has_more;
    remember(page.data);
  }
  show();
}

function shown() {
  return cards.filter(({ lora }) => lora.model === model?.id);
}

/** LoRAs that can be chosen: those of the model that are ready, and are not chosen yet. */
function offered() {
  const taken = shown().map(({ lora }) => lora.id);
  return listed.filter((lora) => lora.state === "ready" && lora.model === model?.id && !taken.includes(lora.id));
}

function add(lora) {
  const name = names.get(lora.id);
  const strength = scale(name, -4);
  const made = { lora, scale: strength };
  made.element = card("LoRA", name, () => remove(made), strength.field, strength.error);
  cards.push(made);
  show();
  announce(`${name} acts on the model`);
}

function remove(one) {
  cards = cards.filter((other) => other !== one);
  clearLoras();
  show();
  at("lora-choice").focus();
  announce(`${names.get(one.lora.id)} is removed`);
}

function show() {
  const count = shown().length;
  lay(at("lora-cards"), shown().map((one) => one.element));
  at("lora-note").textContent = count ? String(count) : "";
  at("lora-wait-field").hidden = count === 0;
  const [found, choice] = [offered().map(({ id, shared }) => [id, `${names.get(id)}${shared ? " (shared)" : ""}`]), at("lora-choice")];
  const text = count >= MOST ? `At most ${MOST} act at a time` : found.length || more ? "Choose a LoRA" : count ? "There is no other" : `There is none of ${model?.id} yet`;
  choice.replaceChildren(...options([["", text], ...found, ...(more ? [[MORE, "Show more"]] : [])]));
  choice.disabled = count >= MOST || !(found.length || more);
}

/** Sends a file, waits until it has been checked, and chooses what it has become. */
async function upload(file) {
  const [button, state] = [at("lora-upload"), at("lora-state")];
  const tell = (text) => {
    state.textContent = text;
  };
  showError(at("lora-error"), null);
  button.disabled = true;
  try {
    tell(`${file.name} is being sent`);
    let lora = await send(file);
    while (["uploading", "validating"].includes(lora.state)) {
      tell(`${file.name} is being checked`);
      lora = await requestJson(`v1/loras/${lora.id}?wait_ms=30000`);
    }
    if (lora.state !== "ready") throw new ApiError({ code: lora.state, message: `${file.name} was removed.`, ...lora.error });
    take(lora);
    tell(`${file.name} is ready`);
  } catch (error) {
    tell(`${file.name} is refused`);
    throw error;
  } finally {
    button.disabled = false;
  }
}

function send(file) {
  const form = new FormData();
  form.append("model", model.id);
  form.append("file", file);
  return requestJson("v1/loras", { method: "POST", body: form });
}

function take(lora) {
  remember([lora]);
  listed = [lora, ...listed.filter(({ id }) => id !== lora.id)];
  const fits = lora.model === model.id && shown().length < MOST && !shown().some((one) => one.lora.id === lora.id);
  if (fits) add(lora);
  else show();
}
