// One edit or generation as an asynchronous job: submit it, follow it across lost connections, fetch its pictures, cancel it.
//
// A function with the argument `on` tries again while the gateway is away: it calls `on.lost(error)` at each failure and
// `on.back()` once the gateway answers. It throws when the gateway refuses, or stays away.

import { ApiError, events, known, requestBlob, requestJson } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const PRIORITY = "interactive"; // a person looks on

/** Submits an edit and returns its job's id. `fields` become form fields; null ones are left out. */
export async function submit(image, mask, { reference, control_images: controls, ...fields }) {
  const form = new FormData();
  controls?.forEach((blob, index) => form.append(`control_image_${index}`, blob, "control"));
  for (const blob of reference ?? []) form.append("reference", blob, "reference");
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null) form.append(name, Array.isArray(value) ? JSON.stringify(value) : String(value));
  }
  form.append("priority", PRIORITY);
  form.append("image", image, "image");
  form.append("mask", mask, "mask.png");
  return (await requestJson("v1/jobs", { method: "POST", body: form })).id;
}

/** Submits a generation and returns its job's id; null fields are left out. */
export async function generate({ reference, control_images: controls, ...fields }) {
  const written = (blobs) => Promise.all((blobs ?? []).map(dataUrl));
  const pictures = (await written(controls)).map((text, index) => [`control_image_${index}`, text]);
  if (reference) pictures.push(["reference", await written(reference)]);
  const asked = Object.fromEntries([["priority", PRIORITY], ...Object.entries(fields).filter(([, value]) => value !== null), ...pictures]);
  const headers = { "Content-Type": "application/json" };
  return (await requestJson("v1/jobs", { method: "POST", headers, body: JSON.stringify(asked) })).id;
}

/** A picture as text, for a JSON body. */
function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Calls `on.event(type, data)` for every event until the job has ended; returns its status. */
export function follow(jobId, on) {
  let lastEventId = "";
  return patiently(on, async (heard) => {
    for await (const event of events(`v1/jobs/${jobId}/events`, { lastEventId })) {
      lastEventId = event.id || lastEventId;
      heard();
      on.event(event.type, event.data);
    }
    const job = await requestJson(`v1/jobs/${jobId}`);
    return ["completed", "failed", "cancelled"].includes(job.state) ? job : null;
  });
}

export function status(jobId, on) {
  return patiently(on, () => requestJson(`v1/jobs/${jobId}`));
}

/** A finished picture. */
export function picture(jobId, index, on) {
  return patiently(on, () => requestBlob(`v1/jobs/${jobId}/image?index=${index}`));
}

/** Cancels the job and returns its status. A job that has ended stays as it is. */
export async function cancel(jobId) {
  return requestJson(`v1/jobs/${jobId}`, { method: "DELETE" });
}

/** Why a job, or one of its pictures, has none. */
export function errorOf(job, index = null) {
  const error = (index === null ? null : job.pictures[index]?.error) ?? job.error;
  return error ? known(error) : null;
}

/** Runs `work(heard)` again while it returns null or the gateway is away. `work` calls `heard` at each sign of life. */
async function patiently(on, work) {
  let failures = 0;
  const heard = () => {
    if (failures) on.back();
    failures = 0;
  };
  for (;;) {
    try {
      const result = await work(heard);
      if (result !== null) {
        heard();
        return result;
      }
    } catch (error) {
      if (!(error instanceof ApiError) || !worthRetrying(error) || failures >= 12) throw error;
      on.lost(error);
    }
    const ms = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, ms));
  }
}

function worthRetrying(error) {
  return error.code === "gateway_unreachable" || error.status === 429 || error.status === 503;
}
