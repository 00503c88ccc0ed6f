// One edit as an asynchronous job: submit it, follow it across lost connections, cancel it.

import { ApiError, events, known, request, requestJson } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];

/** Accepts an edit; its id. `fields` become form fields, null ones are left out. */
export async function submit(image, mask, fields, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null) form.append(name, String(value));
  }
  form.append("image", image, "image");
  form.append("mask", mask, "mask.png");
  return (await requestJson("v1/jobs", { method: "POST", body: form, signal })).id;
}

/**
 * Tells `on.event(type, data)` of everything until the job has ended, and `on.lost(error)` and `on.back()` of the
 * connection; returns the job's status. Throws when the gateway refuses, or `signal` is aborted.
 */
export async function follow(jobId, on, signal) {
  let lastEventId = "";
  let failures = 0;
  for (;;) {
    try {
      for await (const event of events(`v1/jobs/${jobId}/events`, { lastEventId, signal })) {
        lastEventId = event.id || lastEventId;
        if (failures) on.back();
        failures = 0;
        on.event(event.type, event.data);
      }
      const job = await status(jobId, signal);
      if (["completed", "failed", "cancelled"].includes(job.state)) return job;
    } catch (error) {
      if (!(error instanceof ApiError) || !worthRetrying(error) || failures >= 12) throw error;
      on.lost(error);
    }
    await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
  }
}

export async function status(jobId, signal) {
  return requestJson(`v1/jobs/${jobId}`, { signal });
}

/** Asks for the job's end; its status. A job that has ended stays as it is. */
export async function cancel(jobId) {
  return requestJson(`v1/jobs/${jobId}`, { method: "DELETE" });
}

/** A finished picture. */
export async function picture(jobId, index) {
  return (await request(`v1/jobs/${jobId}/image?index=${index}`)).blob();
}

/** Why a job, or one of its pictures, has none. */
export function errorOf(job, index = null) {
  const error = (index === null ? null : job.pictures[index]?.error) ?? job.error;
  return error ? known(error) : null;
}

function worthRetrying(error) {
  return error.code === "gateway_unreachable" || error.status === 429 || error.status === 503;
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
