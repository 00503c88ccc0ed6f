// The studio: connects its parts. Each part is a module of its own; this module says what follows from what.

import { ApiError } from "./api.js";
import { toldAdapters } from "./adapters.js";
import { listenToDialogs, openHelp, openKey } from "./dialogs.js";
import { Editor } from "./editor.js";
import { attempt, listenToFailures } from "./failures.js";
import { FleetPanel } from "./fleet.js";
import { listenToKeys } from "./keyboard.js";
import { Mask } from "./mask.js";
import { announce, at, decoded, showError } from "./page.js";
import { decode, extended, listenForPictures, maskPixels, pixels, sample, showSamples, transparency } from "./picture.js";
import { listenToPointers } from "./pointer.js";
import { forgetPrompts, listenToPrompts, rememberPrompt, toldPrompts } from "./prompts.js";
import { finishedPicture, Results } from "./result.js";
import * as job from "./job.js";
import { Run, showEnd } from "./run.js";
import { forget, forgetFinished, kept, recall, remember } from "./saved.js";
import * as settings from "./settings.js";
import { Stage } from "./stage.js";
import { listenToTask, setTask, task } from "./task.js";
import { listenToToolbar } from "./toolbar.js";
import { listenToWords, regionAt } from "./words.js";

const canvas = at("stage");
const stage = new Stage(canvas);
const editor = new Editor(stage);
const results = new Results(showResult);
const fleet = new FleetPanel({ refused: openKey, modelsChanged: () => attempt(settings.loadModels, "edit-error") });
let picture = null; // what is edited
let run = null;
let lack = null; // what the page has said that an edit lacks

results.oncompare = (share) => {
  stage.compare = share;
  stage.refresh();
};

/** Opens a picture for editing, with the mask in `rgba` if there is one. */
function openPicture(opened, rgba = null) {
  const former = picture;
  picture = opened;
  setTask("edit");
  at("invitation").hidden = true;
  showError(at("picture-error"), null);
  editor.open(opened.width, opened.height, rgba);
  settings.fitToPicture(opened);
  at("picture-note").textContent = `${opened.width} × ${opened.height}`;
  for (const thumb of at("samples").children) thumb.setAttribute("aria-pressed", String(thumb.dataset.title === opened.name));
  view("mask");
  former?.bitmap.close();
  announce(`${opened.name}, ${opened.width} by ${opened.height} pixels`);
}

/** Opens a file for editing; what is transparent in it is to be repainted, unless a person says otherwise. */
async function openFile(blob, name) {
  const opened = await decode(blob, name);
  const rgba = await transparency(opened);
  openPicture(opened);
  if (rgba) editor.take(rgba);
  if (rgba) at("picture-note").textContent += ", transparent parts masked";
}

/** Extends the picture at its sides; what is new is to be repainted, beside what was masked before. */
async function extend() {
  const sides = ["left", "top", "right", "bottom"];
  if (picture === null) throw new ApiError({ code: "picture_missing", message: "Choose a picture first." });
  const wrong = sides.map((side) => at(`extend-${side}`)).find((input) => !input.validity.valid);
  wrong?.focus();
  if (wrong) throw new ApiError({ code: "side_invalid", message: `Whole pixels from 0 to ${wrong.max} at each side.` });
  const added = Object.fromEntries(sides.map((side) => [side, at(`extend-${side}`).valueAsNumber || 0]));
  if (!sides.some((side) => added[side])) throw new ApiError({ code: "side_missing", message: "Say by how many pixels, at one side at least." });
  const [former, painted] = [picture, editor.mask];
  const opened = await extended(former, added);
  if (picture !== former) return; // a person has opened another one meanwhile
  const mask = new Mask(opened.width, opened.height);
  mask.data.fill(1);
  mask.put({ left: added.left, top: added.top, right: added.left + former.width, bottom: added.top + former.height }, painted.data);
  openPicture(opened);
  editor.replace(mask);
  for (const side of sides) at(`extend-${side}`).value = "";
}

/** A picture to be kept, without its decoded pixels, which are freed when another picture is opened. */
function asFile({ bitmap: _, ...kept }) {
  return kept;
}

/** "mask", "run" or "result": what the stage shows and what the controls beside it are for. */
function view(name) {
  stage.showing = name;
  stage.brush = stage.cross = null;
  canvas.dataset.view = name;
  const result = name === "result";
  at("result").hidden = !result;
  at("film").hidden = !result || results.current.pictures.length < 2;
  at("stage-note").hidden = name !== "mask";
  offerSwitch();
  for (const button of at("view-switch").children) button.setAttribute("aria-pressed", String((button.dataset.view === "result") === result));
  const [before, after] = results.bitmaps;
  if (result) stage.after = after;
  const base = result ? { ...results.current.before, bitmap: before } : name === "run" ? (run.blank ?? picture) : picture;
  if (base) stage.show(base);
  describe();
}

function offerSwitch() {
  at("view-switch").hidden = results.current === null || picture === null || run !== null;
}

function describe() {
  if (lack && lack !== lacking()) {
    lack = null;
    showError(at("edit-error"), null);
  }
  const ratio = editor.mask?.ratio() ?? 0;
  const masked = ratio ? `${(100 * ratio).toFixed(ratio < 0.1 ? 1 : 0)} % of the picture is masked.` : "Nothing is masked yet.";
  const text = { mask: picture && task() === "edit" ? masked : "", run: stage.whole ? "The picture is being made." : "The mask is being repainted.", result: results.current?.before.blob ? "The result; arrow keys move the line between before and after." : "The result." }[stage.showing];
  at("stage-note").textContent = text;
  canvas.setAttribute("aria-label", picture ? `${picture.name}, ${picture.width} by ${picture.height} pixels. ${text}` : "Picture. No picture yet.");
}

function showResult() {
  view("result");
}

/** Takes the stage into sight on a small screen, unless a person is typing. */
function reveal() {
  if (!document.activeElement.matches("input:not([type=range]), textarea")) at("easel").scrollIntoView({ block: "nearest" });
}

/** What an edit lacks, in words; null of one that can begin. */
function lacking() {
  if (picture === null) return "Choose a picture first.";
  return editor.mask.bounds() === null ? "Paint over what is to change first." : null;
}

function start() {
  if (run !== null) return;
  lack = null;
  showError(at("edit-error"), null);
  showError(at("picture-error"), null);
  settings.clearBlame();
  return task() === "edit" ? startEdit() : startGeneration();
}

async function startGeneration() {
  const fields = settings.read();
  if (fields === null) return;
  const [width, height] = fields.size.split("x").map(Number);
  const before = { name: "Generated picture", width, height, margin: null };
  const blank = { ...before, bitmap: new OffscreenCanvas(width, height) };
  at("invitation").hidden = true;
  await carry(before, fields.prompt, (running) => running.start(() => job.generate(fields), fields.n, "Sending the text"), blank);
  at("invitation").hidden = picture !== null || results.current !== null;
}

async function startEdit() {
  lack = lacking();
  if (lack) {
    showError(at("edit-error"), { message: lack });
    if (picture) view("mask");
    (picture ? canvas : at("choose")).focus();
    return;
  }
  const fields = settings.read();
  if (fields === null) return;
  const before = asFile(picture);
  await carry(before, fields.prompt, async (running) => {
    const mask = await editor.png();
    const kept = { image: before.blob, mask, name: before.name, margin: before.margin, prompt: fields.prompt };
    const submit = () => job.submit(before.blob, mask, fields);
    return running.start(submit, fields.n, "Sending the picture", (jobId) => attempt(() => remember(jobId, kept), "edit-error"));
  });
}

/**
 * Shows a run from its start to its end, one at a time; `begin` starts or resumes it and returns the job's status. `blank`
 * is what a generation is drawn on.
 */
async function carry(before, prompt, begin, blank = null) {
  const edit = { before, prompt, bounds: blank ? null : editor.mask.bounds(), pictures: [], shown: -1 };
  const running = new Run({
    expected: () => fleet.expectedWaitS,
    preview: (data) => attempt(() => showPreview(running, data), "edit-error"),
    completed: (status) => collect(edit, status),
  });
  run = Object.assign(running, { blank }); // before anything is awaited: a second click finds the place taken
  attempt(() => rememberPrompt(prompt), "edit-error");
  stage.whole = blank !== null;
  const status = await attempt(() => {
    view("run");
    reveal();
    return begin(running);
  }, "edit-error").finally(leaveRun);
  if (status === undefined) return; // told already
  if (edit.shown < 0) {
    showEnd(status);
    await forget();
    return;
  }
  announce("Finished");
  if (stage.showing === "mask") at("stage-note").textContent = "Finished. It is under “Earlier edits”.";
}

/** Whether the stage still shows the run. A person may have opened something else meanwhile, which stays. */
function watched() {
  return stage.showing === "run";
}

function leaveRun() {
  const { blank } = run;
  run = null;
  stage.preview?.bitmap.close();
  stage.preview = null;
  if (watched()) view("mask");
  else offerSwitch();
  if (stage.base !== null && stage.base === blank) stage.show(null);
}

/** Draws the latest preview of the first picture through the mask, and drops a preview that a later one overtook. */
async function showPreview(running, { b64_json: text, media_type: type, index, partial_image_index: number, box }) {
  const late = () => running !== run || number < (stage.preview?.number ?? 0);
  if (index !== 0 || late()) return;
  const bitmap = await createImageBitmap(decoded(text, type));
  if (late() || !watched()) {
    bitmap.close();
    return;
  }
  stage.preview?.bitmap.close();
  stage.preview = { bitmap, box, number };
  canvas.dataset.previews = String(number + 1);
  stage.refresh();
}

/** Takes the pictures of a completed job; a picture that failed has its error instead. */
async function collect(edit, status) {
  for (const picture of status.pictures) {
    const { index, seed, blob } = picture;
    const told = { adapters: [await toldAdapters(status, picture), toldPrompts(status)].filter(Boolean).join("; ") };
    edit.pictures[index] = blob ? Object.assign(await finishedPicture(edit, blob, seed), told) : { error: job.errorOf(status, index) };
  }
  edit.shown = edit.pictures.findIndex((one) => one.url);
  if (edit.shown < 0) return;
  Object.assign(edit, { id: status.id, savedMs: Date.now() });
  await results.add(edit);
  if (watched() && (await results.select(edit, edit.shown, watched))) reveal();
}

/** After a reload, restores the picture, the mask and the last edit, unless a person was faster. */
async function resume() {
  const saved = await recall();
  if (saved === null) return;
  const opened = { ...(await decode(saved.image, saved.name)), margin: saved.margin };
  const mask = await pixels(saved.mask, opened.width, opened.height);
  if (picture !== null) {
    opened.bitmap.close();
    return;
  }
  openPicture(opened, mask);
  settings.setPrompt(saved.prompt);
  const finished = results.find(saved.jobId);
  if (finished) {
    await results.select(finished, finished.shown);
    return;
  }
  await carry(asFile(opened), saved.prompt, async (running) => {
    try {
      return await running.resume(saved.jobId);
    } catch (error) {
      if ([404, 410].includes(error.status)) await forget(); // it will not be found next time either
      throw error;
    }
  });
}

async function useResult() {
  const { blob } = results.picture;
  const { name, margin } = results.current.before;
  openPicture({ ...(await decode(blob, name)), margin });
  canvas.focus();
}

/** Forgets all finished edits and prompts, after a question. */
async function clearHistory() {
  if (run || !confirm("Delete all earlier edits and prompts from this browser?")) return;
  if (stage.showing === "result") view("mask");
  if (picture === null) stage.show(null);
  at("invitation").hidden = picture !== null;
  results.clear();
  offerSwitch();
  forgetPrompts();
  await Promise.all([forgetFinished(), forget()]);
  announce("Earlier edits are deleted");
  at("prompt").focus();
}

/** Takes or leaves what was found at a point of the picture. */
async function pick(point) {
  const on = picture;
  const rgba = await regionAt(on, point);
  if (rgba && on === picture) drawn(() => editor.toggle(rgba, point));
}

/** Applies a change of the mask and shows the mask; changes nothing while a run is shown. */
function drawn(change) {
  if (watched()) return;
  change();
  if (stage.showing === "result" && picture) view("mask");
}

const commands = {
  edit: () => start(),
  choose: listenForPictures((blob, name) => attempt(() => openFile(blob, name), "picture-error")),
  help: openHelp,
  invert: () => drawn(() => editor.invert()),
  clear: () => drawn(() => editor.clear()),
  undo: () => drawn(() => editor.undo()),
  redo: () => drawn(() => editor.redo()),
  toggleView: () => {
    if (results.current && picture && !run) view(stage.showing === "result" ? "mask" : "result");
  },
  stepBy: (difference) => attempt(() => results.step(difference), "picture-error"),
  compareBy: (difference) => results.compareTo(stage.compare + difference),
};

async function connect() {
  fleet.watch();
  await attempt(settings.loadModels, "edit-error");
}

listenToFailures("edit-error");
settings.listenToSettings();
listenToPrompts();
listenToToolbar(stage, editor, commands);
listenToPointers(canvas, stage, editor, (share) => results.compareTo(share));
listenToKeys(at("workspace"), canvas, stage, editor, commands);
listenToDialogs(connect);
listenToWords(() => picture, (rgba) => drawn(() => editor.take(rgba)));
listenToTask(() => {
  stage.masked = task() === "edit";
  editor.frozen = task() !== "edit";
  describe();
  stage.refresh();
});
editor.addEventListener("change", describe);
editor.addEventListener("pick", ({ detail }) => attempt(() => pick(detail), "words-error"));
editor.addEventListener("tool", () => {
  if (stage.showing === "result" && picture && editor.tool !== "hand") view("mask"); // a person with a brush wants to paint
});
at("edit").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
at("cancel").addEventListener("click", () => run?.cancel());
at("use-result").addEventListener("click", () => attempt(useResult, "picture-error"));
at("extend").addEventListener("click", () => attempt(extend, "picture-error"));
at("load-mask").addEventListener("click", () => at("mask-file").click());
at("mask-file").addEventListener("change", () => {
  const [file, on] = [at("mask-file").files[0], picture];
  at("mask-file").value = ""; // the same file can be chosen again
  showError(at("picture-error"), null);
  attempt(async () => {
    if (on === null) throw new ApiError({ code: "picture_missing", message: "Choose a picture first." });
    const rgba = await maskPixels(file, on);
    if (on === picture) drawn(() => editor.take(rgba));
  }, "picture-error");
});
at("keep").addEventListener("click", () => attempt(() => results.decide(true), "picture-error"));
at("discard").addEventListener("click", () => attempt(() => results.decide(false), "picture-error"));
at("clear-history").addEventListener("click", () => attempt(clearHistory, "edit-error"));
for (const button of at("view-switch").children) button.addEventListener("click", () => view(button.dataset.view));

view("mask");
await Promise.all([
  connect(),
  attempt(
    () =>
      showSamples((entry) =>
        attempt(async () => {
          const { picture: opened, rgba } = await sample(entry);
          openPicture(opened, rgba);
          settings.setPrompt(entry.prompt);
        }, "picture-error"),
      ),
    "picture-error",
  ),
]);
await attempt(async () => results.restore(await kept()), "edit-error");
await attempt(resume, "edit-error");
document.documentElement.dataset.ready = "true";
