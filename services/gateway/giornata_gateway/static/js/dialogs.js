// Help, the API key, and light or dark.

import { apiKey } from "./api.js";
import { announce, at, showError } from "./page.js";

const THEME = "giornata-theme";
const THEMES = ["system", "light", "dark"];

export function openHelp() {
  at("help").showModal();
}

/** Asks for the key, and shows the gateway's error where it refused one. */
export function openKey(error = null) {
  if (at("key").open) return;
  at("key-input").value = apiKey.get();
  showError(at("key-error"), error);
  at("key").showModal();
  at("key-input").focus();
}

/** Calls `changed()` after a key was entered or forgotten. */
export function listenToDialogs(changed) {
  at("open-help").addEventListener("click", openHelp);
  at("open-key").addEventListener("click", () => openKey());
  at("key").addEventListener("close", () => {
    const choice = at("key").returnValue;
    at("key").returnValue = "";
    if (choice === "save") apiKey.set(at("key-input").value.trim());
    else if (choice === "forget") apiKey.set("");
    else return;
    changed();
  });
  at("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    next === "system" ? localStorage.removeItem(THEME) : localStorage.setItem(THEME, next);
    applyTheme();
    announce(at("theme").getAttribute("aria-label"));
  });
  applyTheme();
}

function theme() {
  const chosen = localStorage.getItem(THEME);
  return THEMES.includes(chosen) ? chosen : "system";
}

function applyTheme() {
  const chosen = theme();
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  const label = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" }[chosen];
  at("theme").setAttribute("aria-label", label);
  at("theme").title = label;
}
