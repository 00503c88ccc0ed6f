// Which models are served, and which one the form is for.

import { requestJson } from "./api.js";
import { at, element } from "./page.js";
import { able, offerTasks } from "./task.js";

let models = [];
let known = []; // also those that were served before
let wanted = null; // the model that a person chose, which may not be served now

/** Asks which models are served. A person's choice stays, served or not. */
export async function fetchModels() {
  models = (await requestJson("v1/models")).data;
  known = [...models, ...known.filter(({ id }) => !models.some((model) => model.id === id))];
  offerTasks(models);
  listModels();
}

/** Lists the models that do the task; of a person's choice that does another task, the list says nothing. */
export function listModels() {
  const ids = able(models).map(({ id }) => id);
  if (absent()) ids.push(wanted);
  at("model-field").hidden = ids.length < 2 && !absent();
  const select = at("model");
  select.replaceChildren(...ids.map((id) => element("option", { value: id, textContent: id })));
  if (ids.includes(wanted)) select.value = wanted;
  const told = at("model-field").hidden ? chosen()?.id : chosen() && ""; // the list tells it, where there is one
  at("model-note").textContent = told ?? (absent() ? `${wanted} is not served now` : "No model is served now");
}

export function chooseModel() {
  wanted = at("model").value;
  listModels();
}

/** The model that the form is for; undefined while it is not served. */
export function chosen() {
  return able(models).find(({ id }) => id === at("model").value);
}

/** The model whose controls the form has: the chosen one, or, while there is none, one that was served before. */
export function shown() {
  return chosen() ?? able(known).find(({ id }) => id === wanted) ?? able(known)[0];
}

/** The name of the model that a person chose, where it is not served now; otherwise null. */
export function absent() {
  return wanted === null || models.some(({ id }) => id === wanted) ? null : wanted;
}

/** The model that a request names: none where there is one alone, and no one chose. */
export function named() {
  return wanted !== null || able(models).length > 1 ? at("model").value : null;
}
