// What makes a picture take less computation: step caches. Off unless a person chooses one.

import { asks } from "./checks.js";
import { offer } from "./controls.js";
import { at } from "./page.js";

const CACHES = {
  off: ["None (off)", ""],
  taylorseer: ["Extrapolate steps (taylorseer)", "One step in so many is computed; those between are extrapolated."],
};

export function listenToSpeed() {
  at("step-cache").addEventListener("input", show);
}

/** Offers the step caches that a model of /v1/models has; `fitControls` hides what it does not take. */
export function fitSpeed(model) {
  const caches = ["off", ...model.step_caches];
  offer(at("step-cache"), caches.map((name) => [name, CACHES[name]?.[0] ?? name]));
  show();
}

/** Shows the settings of what is chosen, and whether one is in use. */
function show() {
  const cache = at("step-cache");
  at("taylorseer-settings").hidden = cache.value !== "taylorseer";
  at("step-cache-why").textContent = CACHES[cache.value]?.[1] ?? "";
  at("speed-note").textContent = asks(cache) && cache.value !== "off" ? "1" : "";
}
