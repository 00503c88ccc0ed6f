// The panel of queue and fleet, fed by the live stream of /v1/fleet while the page is seen.

import { ApiError, events } from "./api.js";
import { at, element, seconds, showError } from "./page.js";

const RETRY_MS = 2000;

export class FleetPanel {
  expectedWaitS = null;
  #abort = null;
  #models = null;

  /** `on.refused(error)` is told when the gateway wants an API key, `on.modelsChanged()` when others are served. */
  constructor(on) {
    this.on = on;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.watch()));
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }

  /** Follows the fleet until `stop`; begins anew where it was following already. */
  async watch() {
    this.stop();
    const { signal } = (this.#abort = new AbortController());
    while (!signal.aborted) {
      try {
        for await (const event of events("v1/fleet", { signal })) {
          if (event.type === "fleet") this.#show(event.data);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        this.#lost(error);
        if (error.status === 401) {
          this.on.refused(error);
          return; // watched again when there is a key
        }
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #show(fleet) {
    showError(at("fleet-error"), null);
    const wait = fleet.predicted_wait_s ?? null;
    this.expectedWaitS = wait;
    const rows = (count) => `${count} ${count === 1 ? "picture" : "pictures"}`;
    write("fleet-running", rows(fleet.running_rows));
    write("fleet-free", fleet.free_rows === undefined ? "unknown" : rows(fleet.free_rows));
    write("fleet-queued", fleet.queued_jobs === undefined ? "unknown" : String(fleet.queued_jobs));
    write("fleet-steps", fleet.steps_per_s === undefined ? "unknown" : fleet.steps_per_s.toFixed(1));
    write("fleet-wait", wait === null ? "unknown" : wait < 0.05 ? "none" : `about ${seconds(wait)}`);
    write("fleet-note", fleet.workers === 1 ? "1 worker" : `${fleet.workers} workers`);
    this.#pulse(fleet);
    const models = JSON.stringify(fleet.instances.filter((one) => one.ready).map((one) => one.models).sort());
    if (this.#models !== null && models !== this.#models) this.on.modelsChanged();
    this.#models = models;
    const workers = fleet.instances.filter((instance) => instance.worker);
    at("fleet-workers").replaceChildren(...workers.map(workerItem));
  }

  #pulse(fleet) {
    const waiting = fleet.waiting_rows + (fleet.queued_rows ?? 0);
    const busy = [fleet.running_rows && `${fleet.running_rows} running`, waiting && `${waiting} waiting`].filter(Boolean).join(", ");
    const dot = at("pulse-dot").dataset;
    dot.state = !fleet.workers ? "gone" : busy ? "busy" : "ready";
    const workers = fleet.workers === 1 ? "1 worker" : `${fleet.workers} workers`;
    const none = fleet.router_active === false ? "No router is active" : "No worker is ready";
    write("pulse-text", fleet.workers ? `${workers}, ${busy || "free"}` : none);
  }

  #lost(error) {
    this.expectedWaitS = null;
    showError(at("fleet-error"), error);
    at("pulse-dot").dataset.state = "gone";
    const short = { unauthorized: "An API key is needed", gateway_unreachable: "The gateway does not answer" }[error.code];
    showError(at("pulse-text"), short ? { message: short } : error);
    for (const id of ["fleet-running", "fleet-free", "fleet-queued", "fleet-steps", "fleet-wait"]) write(id, "unknown");
    write("fleet-note", "");
    at("fleet-workers").replaceChildren();
  }
}

function workerItem({ instance, ready, draining, models, worker }) {
  const state = draining ? "draining" : !ready ? "not ready" : worker.running_rows ? "running" : "free";
  const pace = worker.step_ms === undefined ? "" : `, ${Math.round(worker.step_ms)} ms a step`;
  const row = element(
    "div",
    { className: "row" },
    element("span", { className: "name", textContent: instance, title: `${instance} (${models.join(", ")})` }),
    element("span", { className: "state", textContent: state + pace }),
  );
  const places = element("div", { className: "places" });
  places.setAttribute("role", "img");
  places.setAttribute("aria-label", `${worker.running_rows} of ${worker.capacity_rows} places taken, ${worker.waiting_rows} waiting`);
  for (let i = 0; i < Math.min(worker.capacity_rows, 64); i++) {
    const kind = i < worker.running_rows ? "taken" : i < worker.running_rows + worker.waiting_rows ? "waiting" : "";
    places.append(element("i", { className: kind }));
  }
  return element("li", {}, row, places);
}

function write(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}
