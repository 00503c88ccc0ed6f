// An edit under way: its card with progress and Cancel. Knows nothing of the picture; tells `on` what happens.

import { ApiError } from "./api.js";
import * as job from "./job.js";
import { announce, at, seconds, showError } from "./page.js";

const STATES = {
  queued: "Queued",
  preparing: "Preparing the picture",
  running: "Waiting for a place on a worker",
  finishing: "Finishing",
};

export class Run {
  #abort = new AbortController();
  #jobId = null;
  #cancelled = false;
  #steps = new Map(); // by picture
  #timer = 0;
  #expected;
  #state = "";
  #preview;

  /** `expected()` is the predicted wait in seconds, or null; `preview(data)` is told of each partial image. */
  constructor(expected, preview) {
    this.#expected = expected;
    this.#preview = preview;
  }

  /** Sends an edit and follows it to its end; the job's status, or null when it was cancelled before it was accepted. */
  async start(image, mask, fields, accepted) {
    this.#open(fields.n ?? 1, "Sending the picture");
    try {
      this.#jobId = await job.submit(image, mask, fields, this.#abort.signal);
      await accepted(this.#jobId);
      return await this.#follow();
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    } finally {
      this.#close();
    }
  }

  /** Follows a job that was sent before, as after a reload. */
  async resume(jobId) {
    this.#jobId = jobId;
    try {
      const status = await job.status(jobId, this.#abort.signal);
      this.#open(status.pictures.length, "Finding the edit again");
      return await this.#follow();
    } finally {
      this.#close();
    }
  }

  async cancel() {
    if (this.#cancelled) return;
    this.#cancelled = true;
    at("cancel").disabled = true;
    this.#say("Cancelling; it ends at its next step");
    if (this.#jobId === null) {
      this.#abort.abort();
      return;
    }
    try {
      const status = await job.cancel(this.#jobId);
      if (!status.cancelling) announce("The edit had already ended");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#cancelled = false;
      at("cancel").disabled = false;
      this.#say(`It could not be cancelled: ${error.message}`);
    }
  }

  #follow() {
    const hear = {
      event: (type, data) => this.#event(type, data),
      lost: (error) => this.#link(error.message),
      back: () => this.#link(""),
    };
    return job.follow(this.#jobId, hear, this.#abort.signal);
  }

  #event(type, data) {
    if (type === "image_edit.progress") this.#progress(data);
    else if (type === "image_edit.partial_image") this.#preview(data);
  }

  #progress(data) {
    if (data.step === undefined) {
      this.#state = data.state;
      if (data.state !== "finishing") this.#steps.clear(); // also when it begins again on another worker
      if (!this.#cancelled) this.#say(this.#waiting(STATES[data.state] ?? data.state));
      if (data.state === "finishing") at("progress").value = at("progress").max;
      return;
    }
    this.#steps.set(data.index, data.step);
    this.#state = "step";
    const done = [...this.#steps.values()].reduce((sum, step) => sum + step, 0);
    const bar = at("progress");
    bar.max = this.pictures * data.steps;
    bar.value = done;
    if (this.#cancelled) return;
    const all = this.pictures > 1 ? `, ${this.pictures} pictures` : "";
    const slowest = this.#steps.size < this.pictures ? 0 : Math.min(...this.#steps.values());
    this.#say(`Step ${slowest} of ${data.steps}${all}`, slowest === 1);
  }

  #waiting(text) {
    const wait = ["queued", "running"].includes(this.#state) ? this.#expected() : null;
    return wait ? `${text}; about ${seconds(wait)}` : text;
  }

  #open(pictures, text) {
    this.pictures = pictures;
    const started = performance.now();
    at("run").hidden = false;
    at("go").disabled = true;
    at("cancel").disabled = false;
    at("progress").removeAttribute("value");
    this.#link("");
    this.#say(text);
    const tick = () => {
      at("run-clock").textContent = `${Math.floor((performance.now() - started) / 1000)} s`;
    };
    tick();
    this.#timer = setInterval(tick, 1000);
  }

  #close() {
    clearInterval(this.#timer);
    const held = document.activeElement === at("cancel");
    at("run").hidden = true;
    at("go").disabled = false;
    if (held) at("go").focus(); // focus does not fall off a button that goes away
  }

  #say(text, aloud = true) {
    at("run-text").textContent = text;
    if (aloud) announce(text);
  }

  #link(text) {
    at("run-link").hidden = !text;
    at("run-link").textContent = text && `${text} Trying again.`;
  }
}

/** What to say of an edit that ended without a picture. */
export function showEnd(status) {
  const cancelled = status === null || status.state === "cancelled";
  const text = status === null ? "Cancelled before it was sent." : "Cancelled. The picture is as it was.";
  if (cancelled) {
    announce(text);
    at("stage-note").textContent = text;
    return;
  }
  showError(at("edit-error"), job.errorOf(status, 0) ?? new ApiError({ code: "failed", message: "The edit failed." }));
}
