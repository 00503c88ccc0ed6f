// Adapters of the request: LoRAs and ControlNets, as far as the model takes them.

import { asks } from "./checks.js";
import { blameControlnet, checkControlnets, clearControlnets, controlnets, fitControlnets, listenToControlnets, toldControlnets } from "./controlnets.js";
import { blameLora, checkLoras, clearLoras, fitLoras, listenToLoras, loras, toldLoras } from "./loras.js";
import { at } from "./page.js";

export function listenToAdapters() {
  listenToLoras();
  listenToControlnets();
}

/** Offers the adapters that a model of /v1/models takes for a task. */
export function fitAdapters(model, task) {
  fitLoras(model);
  fitControlnets(model, task);
}

/** Marks what is wrong with them. */
export function checkAdapters() {
  checkLoras();
  checkControlnets();
}

/** The request's fields; null ones are not sent. */
export function adapters() {
  return {
    loras: asks(at("lora-choice")) ? loras() : null,
    ...(asks(at("controlnet-choice")) ? controlnets() : { controlnets: null, control_images: null }),
  };
}

/** Shows an error of the gateway at the adapter that it names; false where it names none. */
export function blameAdapters(error) {
  return blameLora(error) || blameControlnet(error);
}

export function clearAdapters() {
  clearLoras();
  clearControlnets();
}

/** Which adapters a job's picture is made with, in words; "" without any. */
export async function toldAdapters(job, picture) {
  const told = [await toldLoras(job, picture.loras_from), toldControlnets(job)];
  return told.filter(Boolean).join("; ");
}
