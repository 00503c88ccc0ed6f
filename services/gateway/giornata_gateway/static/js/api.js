// The gateway as the page talks to it. Every failure is an ApiError with the stable code of the gateway, or one of ours:
// `gateway_unreachable` where no answer came, `answer_unreadable` where it made no sense.

import { EventParser } from "./sse.js";

const KEY = "giornata-api-key";

export class ApiError extends Error {
  constructor({ code, message, param = null, status = 0, retryAfterS = null }) {
    super(message);
    this.name = "ApiError";
    this.code = code;
    this.param = param;
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** The API key lives as long as this tab, and nowhere else. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer of the gateway; throws ApiError for one that is not a success, and DOMException when aborted. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey.get();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function requestJson(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({
      code: "answer_unreadable",
      message: "The gateway's answer is not JSON.",
      status: response.status,
    });
  }
}

/** The events of a stream, as an asynchronous iterator of {type, data, id}; `data` is parsed JSON. */
export async function* events(path, { lastEventId = "", signal } = {}) {
  const headers = { Accept: "text/event-stream" };
  if (lastEventId) headers["Last-Event-ID"] = lastEventId;
  const response = await request(path, { headers, signal });
  if (response.status === 204 || response.body === null) return;
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw unreachable();
      }
      if (piece.done) return;
      for (const event of parser.push(piece.value)) yield { ...event, data: JSON.parse(event.data) };
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

/** An error object of the gateway, as in its answers and in its event streams. */
export function known(error, status = 0, retryAfterS = null) {
  return new ApiError({
    code: error.code ?? "unknown",
    message: error.message ?? "The gateway did not say what is wrong.",
    param: error.param,
    status,
    retryAfterS,
  });
}

function unreachable() {
  const message = navigator.onLine
    ? "The gateway does not answer. It may be restarting; what you have drawn is kept."
    : "This device is offline. What you have drawn is kept.";
  return new ApiError({ code: "gateway_unreachable", message });
}

async function failure(response) {
  let body;
  try {
    body = await response.json();
  } catch {
    body = null;
  }
  if (body?.error) return known(body.error, response.status, Number(response.headers.get("Retry-After")) || null);
  return new ApiError({
    code: "answer_unreadable",
    message: `The gateway answered ${response.status} without saying why.`,
    status: response.status,
  });
}
