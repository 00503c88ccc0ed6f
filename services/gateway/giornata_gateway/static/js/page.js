// Small things that every part of the page needs.

/** The element with an id of index.html. */
export function at(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`index.html has no #${id}`);
  return element;
}

/** Says something to screen readers. */
export function announce(text) {
  at("announcer").textContent = text;
}

/** Shows an error in words, with its stable code, in a place that is hidden while there is none. */
export function showError(place, error) {
  place.hidden = error === null;
  place.replaceChildren();
  if (error === null) return;
  place.append(error.message);
  if (error.code) {
    const code = document.createElement("code");
    code.textContent = error.code;
    place.append(" ", code);
  }
}

/** Base64 as a file. */
export function decoded(text, type) {
  return new Blob([Uint8Array.from(atob(text), (character) => character.charCodeAt(0))], { type });
}

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** 7.25 → "7.3 s", 95 → "1 min 35 s". */
export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
