// What pictures are made from: an edit begins with a picture, a generation with text alone. Not every model generates.

import { at } from "./page.js";

const WORDS = {
  edit: { heading: "Edit", hint: "a red star", missing: "Write a prompt: what belongs into the mask." },
  generate: { heading: "Generate", hint: "a red barn in the snow", missing: "Write a prompt: what the picture shows." },
};
const buttons = at("task").querySelectorAll("button");

let current = "edit";
const listeners = [];

export function task() {
  return current;
}

export function missingPrompt() {
  return WORDS[current].missing;
}

/** The models that do a task: the current one, unless another is named. */
export function able(models, wanted = current) {
  return models.filter(({ tasks }) => tasks.includes(wanted));
}

/** Offers a choice of tasks where some model generates. While no model is served, what was offered stays. */
export function offerTasks(models) {
  if (!models.length) return;
  at("task").hidden = !able(models, "generate").length;
  if (at("task").hidden) setTask("edit");
}

/** `changed()` is called whenever the task becomes another. */
export function listenToTask(changed) {
  listeners.push(changed);
}

for (const button of buttons) button.addEventListener("click", () => setTask(button.dataset.task));

export function setTask(wanted) {
  if (wanted === current) return;
  current = wanted;
  const { heading, hint } = WORDS[wanted];
  document.body.dataset.task = wanted;
  at("panel").setAttribute("aria-label", heading);
  at("picture").hidden = wanted !== "edit";
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.task === wanted));
  at("edit-heading").textContent = at("go").textContent = heading;
  at("prompt").placeholder = hint;
  for (const tell of listeners) tell();
}
