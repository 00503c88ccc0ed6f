// What makes a picture take less computation: step caches, and latents of earlier pictures. Off unless a person chooses them.

import { asks } from "./checks.js";
import { offer } from "./controls.js";
import { at } from "./page.js";

const CACHES = {
  off: ["None (off)", ""],
  "first-block": ["Skip blocks (first-block)", "Blocks are skipped in steps whose first block adds nearly what it added before."],
  taylorseer: ["Extrapolate steps (taylorseer)", "One step in so many is computed; those between are extrapolated."],
};

export function listenToSpeed() {
  for (const id of ["step-cache", "approximate"]) at(id).addEventListener("input", show);
}

/** Offers the step caches that a model of /v1/models has; `fitControls` hides what it does not take. */
export function fitSpeed(model) {
  const caches = ["off", ...model.step_caches];
  offer(at("step-cache"), caches.map((name) => [name, CACHES[name]?.[0] ?? name]));
  show();
}

/** Shows the settings of what is chosen, and how many of the two are in use. */
function show() {
  const [cache, earlier] = [at("step-cache"), at("approximate")];
  for (const name of ["first-block", "taylorseer"]) at(`${name}-settings`).hidden = cache.value !== name;
  at("step-cache-why").textContent = CACHES[cache.value]?.[1] ?? "";
  at("slo-field").hidden = earlier.value !== "deadline";
  const used = [cache, earlier].filter((choice) => asks(choice) && choice.value !== "off").length;
  at("speed-note").textContent = used ? String(used) : "";
}

/** What a finished picture of a job says of steps that were saved, and the job of its deadline, in words; "" of neither. */
export function toldSpeed(job, { approximate }) {
  const begun = approximate
    ? `${approximate.step} of ${job.steps} steps saved: begun with the latent of a similar prompt (cosine ${approximate.cosine.toFixed(2)}), not from the seed`
    : "";
  const kept = job.slo_met === true ? "deadline kept" : job.slo_met === false ? "deadline missed" : "";
  return [begun, kept].filter(Boolean).join("; ");
}
