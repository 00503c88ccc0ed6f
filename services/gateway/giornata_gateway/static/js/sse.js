// Server-sent events from text in pieces, by the WHATWG HTML standard, section 9.2.6. No DOM.
//
// The browser's own EventSource cannot send an Authorization header, so the stream is read with fetch.

export class EventParser {
  #rest = "";
  #event = { type: "", data: [], id: null };
  lastId = "";

  /** The events that `text` completes, each as {type, data, id}. */
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        const event = this.#dispatch();
        if (event) events.push(event);
      } else if (!line.startsWith(":")) {
        this.#field(line);
      }
    }
    return events;
  }

  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event.type = value;
    else if (name === "data") this.#event.data.push(value);
    else if (name === "id") this.#event.id = value;
  }

  #dispatch() {
    const { type, data, id } = this.#event;
    this.#event = { type: "", data: [], id: null };
    if (id !== null) this.lastId = id;
    return data.length ? { type: type || "message", data: data.join("\n"), id: this.lastId } : null;
  }
}
