// The card of an adapter that a person has chosen: its name, a button that removes it, its controls and their mistakes.

import { check } from "./checks.js";
import { element } from "./page.js";

const SVG = "http://www.w3.org/2000/svg";

let count = 0;

/** A card called `title`, which a LoRA or a ControlNet has; `remove()` is called when its button is pressed. */
export function card(kind, title, remove, ...content) {
  const button = element("button", { type: "button", className: "icon", title: `Remove ${title}` }, icon("close"));
  button.setAttribute("aria-label", `Remove the ${kind} ${title}`);
  button.addEventListener("click", remove);
  const head = element("div", { className: "head" }, element("strong", { textContent: title }), button);
  const made = element("div", { className: "card" }, head, ...content);
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", `${kind} ${title}`);
  return made;
}

/** A drawing of index.html, by its name. */
export function icon(name) {
  const [drawing, use] = ["svg", "use"].map((tag) => document.createElementNS(SVG, tag));
  drawing.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  drawing.append(use);
  return drawing;
}

/** A control with its label, as {field, input, error}: `error` is where `mark` shows its mistake. */
export function labelled(label, input, about) {
  input.id = `adapter-${++count}`;
  const error = element("p", { className: "error", id: `${input.id}-error`, hidden: true });
  input.setAttribute("aria-describedby", error.id);
  const words = element("label", { textContent: label, htmlFor: input.id }, element("span", { className: "hidden", textContent: ` of ${about}` }));
  return { field: element("div", { className: "field" }, words, input), input, error };
}

/** A number from `min` to `max`; left empty, it is `preset`. */
export function number(label, about, { min, max, step, preset, changed = () => {} }) {
  const input = element("input", { type: "number", min, max, step, placeholder: String(preset), value: String(preset), inputMode: "decimal" });
  const made = labelled(label, input, about);
  input.addEventListener("input", () => {
    check(input);
    changed();
  });
  return { ...made, value: () => (input.value.trim() ? Number(input.value) : preset) };
}

/** How strongly an adapter acts: a number, and a slider for what is usual. */
export function scale(about, min) {
  const slider = element("input", { type: "range", min: 0, max: 2, step: 0.05, value: 1 });
  slider.setAttribute("aria-label", `Scale of ${about}, from 0 to 2`);
  const made = number("Scale", about, { min, max: 4, step: 0.05, preset: 1, changed: () => (slider.value = made.value()) });
  slider.addEventListener("input", () => {
    made.input.value = String(slider.valueAsNumber);
    check(made.input);
  });
  made.field.classList.add("slider");
  made.input.before(slider);
  return made;
}

/** A list of pairs of value and text. */
export function list(label, about, pairs) {
  const input = element("select", {}, ...options(pairs));
  input.addEventListener("change", () => check(input));
  return labelled(label, input, about);
}

export function options(pairs) {
  return pairs.map(([value, textContent]) => element("option", { value, textContent }));
}

/** Shows cards in their place. Where they are there already, nothing moves, and the focus stays in one of them. */
export function lay(place, cards) {
  const there = [...place.children];
  if (there.length !== cards.length || cards.some((one, index) => one !== there[index])) place.replaceChildren(...cards);
}

/** The numbers and the word in the name of a field: "loras.1.scale" → {index: 1, key: "scale"}; null for other fields. */
export function place(param, field) {
  const found = new RegExp(`^${field}(?:\\.(\\d+))?(?:\\.(\\w+))?$`).exec(param ?? "");
  return found && { index: found[1] === undefined ? null : Number(found[1]), key: found[2] ?? null };
}
