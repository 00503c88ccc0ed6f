// Prompts that were sent before, the latest first: kept in the browser, offered above the prompt.

import { at, element } from "./page.js";

const STORE = "giornata-prompts";
const MOST = 30;

function prompts() {
  return JSON.parse(localStorage.getItem(STORE) ?? "[]");
}

export function rememberPrompt(text) {
  localStorage.setItem(STORE, JSON.stringify([text, ...prompts().filter((one) => one !== text)].slice(0, MOST)));
  show();
}

/** What a finished job says of prompts of which the model did not read all; "" of any other. */
export function toldPrompts({ usage }) {
  const told = usage?.input_tokens_details ?? {};
  const cut = (name, tokens) => tokens && tokens.read < tokens.given && `the first ${tokens.read} of the ${name}'s ${tokens.given} tokens were read`;
  const parts = [cut("prompt", told.prompt_tokens), cut("negative prompt", told.negative_prompt_tokens)];
  return parts.filter(Boolean).join("; ");
}

export function forgetPrompts() {
  localStorage.removeItem(STORE);
  show();
}

export function listenToPrompts() {
  const choice = at("prompt-history");
  choice.addEventListener("change", () => {
    at("prompt").value = choice.value;
    choice.selectedIndex = 0;
    at("prompt").dispatchEvent(new Event("input"));
    at("prompt").focus();
  });
  show();
}

function show() {
  const all = prompts();
  at("prompt-history").hidden = !all.length;
  const short = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
  const options = all.map((value) => element("option", { value, textContent: short(value) }));
  at("prompt-history").replaceChildren(element("option", { value: "", textContent: "Earlier prompts", disabled: true, selected: true }), ...options);
}
