// The OpenAPI document as a page: every operation with its parameters, the fields of its bodies and its answers.

import { at, element } from "./page.js";

/** Words of Markdown: `code` and **strong** alone. */
function words(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).map((part) => {
    if (part.startsWith("`")) return element("code", { textContent: part.slice(1, -1) });
    return part.startsWith("**") ? element("strong", { textContent: part.slice(2, -2) }) : part;
  });
}

function table(heads, rows) {
  const lines = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, ...[cell].flat()))));
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col", textContent: name })));
  return element("div", { className: "docs-table", tabIndex: 0 }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
}

/** A block of the document's description: a paragraph, or a table of Markdown. */
function block(text) {
  if (!text.startsWith("|")) return element("p", {}, ...words(text));
  const [heads, , ...rows] = text.split("\n").map((line) => line.split("|").slice(1, -1).map((cell) => cell.trim()));
  return table(heads, rows.map((cells) => cells.map(words)));
}

const LIMITS = { minimum: "from", exclusiveMinimum: "above", maximum: "to", exclusiveMaximum: "below", maxItems: "at most", maxLength: "at most", default: "default" };

/** The type of a value: parts of a line, links to schemas among them. */
function typed(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return [element("a", { href: `#${name}`, textContent: name })];
  }
  const any = schema.anyOf ?? schema.oneOf;
  if (any) return any.flatMap((one, index) => [...(index ? [" or "] : []), ...typed(one)]);
  if (schema.type === "array") return ["list of ", ...typed(schema.items ?? {})];
  return [(schema.enum ?? [schema.const ?? schema.type ?? "any"]).map((value) => (schema.type ? value : JSON.stringify(value))).join(", ")];
}

/** The type of a field, its limits and its default. */
function told(schema) {
  const limits = Object.entries(LIMITS).filter(([name]) => ![undefined, null].includes(schema[name])).map(([name, word]) => `${word} ${JSON.stringify(schema[name])}`);
  return [...typed(schema), ...limits.map((limit) => `, ${limit}`)];
}

function fields({ properties = {}, required = [] }) {
  return table(["field", "type", "meaning"], Object.entries(properties).map(([name, schema]) => [
    [element("code", { textContent: name }), required.includes(name) ? " (needed)" : ""], told(schema), words(schema.description ?? ""),
  ]));
}

function operation(method, path, { operationId, summary, parameters = [], requestBody, responses }) {
  const bodies = Object.entries(requestBody?.content ?? {});
  const answers = Object.entries(responses).map(([status, { description, content = {} }]) => {
    const kinds = Object.entries(content).flatMap(([kind, { schema }]) => [kind, ...(schema?.$ref ? [" ", ...typed(schema)] : []), "; "]);
    return [status, words(description), kinds.slice(0, -1)];
  });
  const asked = parameters.map(({ name, in: place, schema, description = "" }) => [element("code", { textContent: name }), `${place}`, told(schema), words(description)]);
  return element("details", { id: operationId },
    element("summary", {}, element("strong", { textContent: method.toUpperCase() }), " ", element("code", { className: "docs-path", textContent: path }), ` ${summary}`),
    ...(asked.length ? [table(["parameter", "in", "type", "meaning"], asked)] : []),
    ...bodies.map(([kind, { schema }]) => element("p", {}, "Body: ", element("code", { textContent: kind }), " ", ...typed(schema))),
    table(["answer", "meaning", "body"], answers));
}

/** Opens what the address names, such as a schema that a link leads to. */
function show() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.tagName !== "DETAILS") return;
  named.open = true;
  named.scrollIntoView();
}

const { info, paths, components } = await (await fetch("openapi.json")).json();
at("docs").append(
  element("h1", { textContent: `${info.title} ${info.version}` }),
  ...info.description.trim().split("\n\n").map(block),
  element("h2", { textContent: "Operations" }),
  ...Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, told]) => operation(method, path, told))),
  element("h2", { textContent: "Schemas" }),
  ...Object.entries(components.schemas).map(([name, schema]) => element("details", { id: name },
    element("summary", {}, element("code", { textContent: name })), element("p", {}, ...words(schema.description ?? ""), " ", ...(schema.properties ? [] : typed(schema))),
    ...(schema.properties ? [fields(schema)] : []))),
);
addEventListener("hashchange", show);
show();
