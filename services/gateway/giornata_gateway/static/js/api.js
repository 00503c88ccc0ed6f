// The gateway as the page talks to it. Every failure is an ApiError with the stable code of the gateway, or one of ours:
// `gateway_unreachable` where no answer came, or only a part of one; `answer_unreadable` where it made no sense;
// `page_failed` where the page itself is at fault.

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
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey.get();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await arriving(fetch(path, { ...options, headers, cache: "no-store" }));
  if (!response.ok) throw await failure(response);
  return response;
}

export async function requestJson(path, options) {
  const response = await request(path, options);
  return parsed(await body(response, "text"), response.status);
}

export async function requestBlob(path, options) {
  return body(await request(path, options), "blob");
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
      const piece = await arriving(reader.read());
      if (piece.done) return;
      for (const event of parser.push(piece.value)) yield { ...event, data: parsed(event.data, response.status) };
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

/** Any error as an ApiError, for a person to read; what nobody foresaw is `page_failed`. */
export function inWords(error) {
  if (error instanceof ApiError) return error;
  const message = `The page failed: ${error?.message ?? error}. What you have drawn is kept.`;
  return new ApiError({ code: "page_failed", message });
}

function unreachable() {
  const message = navigator.onLine
    ? "The gateway does not answer. It may be restarting; what you have drawn is kept."
    : "This device is offline. What you have drawn is kept.";
  return new ApiError({ code: "gateway_unreachable", message });
}

/** What the network brings; a connection that is cut, at whatever byte, is a gateway that does not answer. */
async function arriving(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
}

/** All of an answer, as "text" or "blob". */
function body(response, kind) {
  return arriving(response[kind]());
}

function parsed(text, status) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError({ code: "answer_unreadable", message: "The gateway's answer is not JSON.", status });
  }
}

async function failure(response) {
  const { status, headers } = response;
  const text = await body(response, "text");
  try {
    return known(JSON.parse(text).error, status, Number(headers.get("Retry-After")) || null);
  } catch {
    const message = `The gateway answered ${status} without saying why.`;
    return new ApiError({ code: "answer_unreadable", message, status });
  }
}
