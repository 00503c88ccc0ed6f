// An edit or a generation under way: its card with progress and Cancel. Knows nothing of the picture; tells `on` what happens.

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
  #jobId = null;
  #cancelled = false;
  #steps = new Map(); // by picture
  #timer = 0;
  #on;
  #state = "";
  #previews = []; // promises
  #hear = {
    event: (type, data) => this.#event(type, data),
    lost: (error) => this.#link(error.message),
    back: () => this.#link(""),
  };

  /**
   * `on.expected()` is the predicted wait in seconds, or null; `on.preview(data)` draws a partial image, and never fails;
   * `on.completed(status)` takes the pictures, each with its `blob` or its error.
   */
  constructor(on) {
    this.#on = on;
  }

  /**
   * Sends what asks for `pictures`, follows it to its end and returns the job's status. `submit()` returns the job's id;
   * `text` says what it sends.
   */
  start(submit, pictures, text, accepted = async () => {}) {
    return this.#during(pictures ?? 1, text, async () => {
      this.#jobId = await submit();
      await accepted(this.#jobId);
      if (this.#cancelled) await this.#end();
      return this.#follow();
    });
  }

  /** Follows a job that was sent before, as after a reload, and returns its status. */
  resume(jobId) {
    this.#jobId = jobId;
    return this.#during(1, "Finding the edit again", async () => {
      const status = await job.status(jobId, this.#hear);
      this.pictures = status.pictures.length;
      return this.#follow();
    });
  }

  /** Cancels the edit; while it is being sent, as soon as it has a job. */
  async cancel() {
    if (this.#cancelled) return;
    this.#cancelled = true;
    at("cancel").disabled = true;
    if (this.#jobId === null) this.#say("Cancelling; it ends as soon as it has been sent");
    else await this.#end();
  }

  async #end() {
    this.#say("Cancelling; it ends at its next step");
    try {
      const status = await job.cancel(this.#jobId);
      if (["completed", "failed"].includes(status.state)) this.#say("The edit had already ended");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#cancelled = false;
      at("cancel").disabled = false;
      this.#say(`It could not be cancelled: ${error.message}`);
    }
  }

  async #follow() {
    const status = await job.follow(this.#jobId, this.#hear);
    if (status.state !== "completed") return status;
    for (const picture of status.pictures) {
      if (!picture.error) picture.blob = await job.picture(this.#jobId, picture.index, this.#hear);
    }
    await this.#on.completed(status);
    return status;
  }

  #event(type, data) {
    const [, kind] = type.split("."); // of image_edit or image_generation
    if (kind === "progress") this.#progress(data);
    else if (kind === "partial_image") this.#previews.push(this.#on.preview(data));
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
    const wait = ["queued", "running"].includes(this.#state) ? this.#on.expected() : null;
    return wait ? `${text}; about ${seconds(wait)}` : text;
  }

  /** Does `work` with the card open; nothing of it goes on afterwards. */
  async #during(pictures, text, work) {
    this.#open(pictures, text);
    try {
      return await work();
    } finally {
      await Promise.all(this.#previews);
      this.#close();
    }
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
  if (status.state === "cancelled") {
    const text = "Cancelled. The picture is as it was.";
    announce(text);
    at("stage-note").textContent = text;
    return;
  }
  showError(at("edit-error"), job.errorOf(status, 0) ?? new ApiError({ code: "failed", message: "The edit failed." }));
}
