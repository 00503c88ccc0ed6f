// Shows what goes wrong, in words and in its place. Nothing is swallowed.

import { inWords } from "./api.js";
import { openKey } from "./dialogs.js";
import { announce, at, showError } from "./page.js";
import { blame } from "./settings.js";

/** Does something that may fail. On failure shows why in the element with the id `place` and returns undefined. */
export async function attempt(work, place) {
  try {
    return await work();
  } catch (error) {
    tell(error, place);
    return undefined;
  }
}

/** Shows in `place` every error that was not caught. */
export function listenToFailures(place) {
  window.addEventListener("unhandledrejection", (event) => {
    event.preventDefault(); // the browser need not tell it again
    tell(event.reason, place);
  });
}

function tell(thrown, place) {
  const error = inWords(thrown);
  if (error !== thrown) console.error(thrown);
  if (error.status === 401) openKey(error);
  if (blame(error)) announce(`${error.message} ${error.code}`);
  else showError(["image", "mask"].includes(error.param) ? at("picture-error") : at(place), error);
}
