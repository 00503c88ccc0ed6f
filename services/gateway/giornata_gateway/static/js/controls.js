// Which controls a model has for a task, and what they begin with: `fields`, `defaults`, `samplers` and sizes of /v1/models.

import { asks, check, mark } from "./checks.js";
import { at, element } from "./page.js";

const SHAPES = [[1, 1], [3, 2], [2, 3], [16, 9], [9, 16]]; // of generated pictures
const REUSE = { auto: "Reuse cached template", strict: "Only equal noise levels", off: "No reuse" };

/** Makes the form fit a model of /v1/models and a task. What a person chose stays where the model takes it. */
export function fitControls(model, task) {
  const defaults = model.defaults[task];
  const spare = [...(task === "edit" ? ["size"] : []), ...(model.samplers.length < 2 ? ["sampler"] : [])];
  const fields = model.fields[task].filter((field) => !spare.includes(field)); // an edit keeps its picture's size
  for (const place of at("edit").querySelectorAll("[data-field]:not(#model-field)")) place.hidden = !place.dataset.field.split(" ").some((field) => fields.includes(field));
  at("pick").hidden = at("words").closest("[hidden]") !== null;
  suggest(at("steps"), defaults.num_inference_steps);
  suggest(at("guidance"), defaults.guidance_scale);
  suggest(at("true-cfg"), defaults.true_cfg_scale);
  suggest(at("strength"), defaults.strength);
  offer(at("sampler"), model.samplers.map((name) => [name, name]), defaults.sampler);
  const reuse = Object.entries(REUSE).filter(([name]) => name !== "auto" || defaults.reuse === "auto");
  offer(at("reuse"), reuse, defaults.reuse);
  offer(at("size"), sizes(model).map((size) => [size, size.replace("x", " × ")]));
  fitGuidance();
  for (const input of at("edit").querySelectorAll("[name]")) if (!asks(input)) mark(input, null);
}

/** `true_cfg_scale` weighs a negative prompt, so it waits for one. */
export function fitGuidance() {
  const [scale, prompt] = [at("true-cfg"), at("negative")];
  scale.disabled = !asks(prompt) || !prompt.value.trim();
  check(scale);
}

/** What a control begins with, where a person has not said otherwise. */
export function suggest(input, value) {
  input.placeholder = String(value ?? "");
  if (!input.dataset.touched) input.value = value ?? "";
}

/** Fills a list with pairs of value and text. A person's choice comes back where a later model takes it. */
export function offer(select, pairs, preset = pairs[0]?.[0]) {
  const { choice } = select.dataset;
  select.replaceChildren(...pairs.map(([name, textContent]) => element("option", { value: name, textContent })));
  select.value = pairs.some(([value]) => value === choice) ? choice : preset;
  check(select);
}

/** The shapes that the model makes, each of about its native size. */
function sizes({ native_size: side, size_multiple: multiple }) {
  const cut = (length) => Math.max(multiple, Math.floor(length / multiple) * multiple);
  const all = SHAPES.map(([width, height]) => {
    const scale = side / Math.sqrt(width * height);
    return `${cut(width * scale)}x${cut(height * scale)}`;
  });
  return [...new Set(all)];
}
