// Mistakes that the form finds itself, and where a mistake is shown.

import { absent } from "./models.js";
import { at, showError } from "./page.js";
import { missingPrompt } from "./task.js";

/** Whether the form asks for a control now: no part of it that holds the control is hidden. */
export function asks(control) {
  return control.closest("[hidden]") === null;
}

export function check(input) {
  mark(input, mistake(input));
}

export function mark(input, error) {
  showError(at(`${input.id}-error`), error);
  if (error) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}

function mistake(input) {
  if (input.disabled) return null;
  if (input.id === "model") return absent() === null ? null : { message: `${absent()} is not served now. Wait for it, or choose another.` };
  if (input.id === "prompt") return input.value.trim() ? null : { message: missingPrompt() };
  if (input.id === "padding" && input.value === "" && !input.validity.badInput) return { message: "How many pixels; 0 for none." };
  if (input.id === "true-cfg" && !(Number(input.value) > 1) && !input.validity.badInput) return { message: "Above 1, or it keeps away from nothing." };
  const { validity, min, max } = input;
  if (validity.badInput) return { message: "This is not a number." };
  if (validity.rangeUnderflow || validity.rangeOverflow) return { message: `From ${min} to ${max}.` };
  if (input.step === "1" && validity.stepMismatch) return { message: "A whole number." };
  return null;
}
