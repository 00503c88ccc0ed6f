// What pictures are made from: an edit begins with a picture, a generation with text alone. Not every model generates.

import { at } from "./page.js";

const WORDS = {
  edit: { heading: "Edit", prompt: "What belongs into the mask", hint: "a red star", missing: "Say what belongs into the mask." },
  generate: { heading: "Generate", prompt: "What the picture shows", hint: "a red barn in the snow", missing: "Say what the picture shows." },
};
const buttons = at("task").querySelectorAll("button");

let current = "edit";
let tell = () => {};

export function task() {
  return current;
}

/** Whether the form asks for a control now; `data-only` names the task that alone has it. */
export function asks(control) {
  return [undefined, current].includes(control.closest("[data-only]")?.dataset.only);
}

export function missingPrompt() {
  return WORDS[current].missing;
}

/** The models that do a task: the current one, unless another is named. */
export function able(models, wanted = current) {
  return models.filter(({ tasks }) => tasks.includes(wanted));
}

/** Offers the tasks that some model does, and says what is missing for the other. */
export function offerTasks(models) {
  const generates = able(models, "generate").length > 0;
  at("task-generate").disabled = !generates;
  const known = models.map(({ id }) => id).join(", ");
  at("task-why").textContent =
    generates || !known ? "" : `${known} ${models.length > 1 ? "edit" : "edits"} pictures only. A text-to-image model, served beside, makes them from text.`;
  if (!generates && known) setTask("edit");
}

/** `changed()` is called whenever the task becomes another. */
export function listenToTask(changed) {
  tell = changed;
  for (const button of buttons) button.addEventListener("click", () => setTask(button.dataset.task));
}

export function setTask(wanted) {
  if (wanted === current) return;
  current = wanted;
  const { heading, prompt, hint } = WORDS[wanted];
  at("panel").dataset.task = wanted;
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.task === wanted));
  at("edit-heading").textContent = at("go").textContent = heading;
  at("prompt-label").textContent = prompt;
  at("prompt").placeholder = hint;
  tell();
}
