// The studio: connects its parts. Each part is a module of its own; this module says what follows from what.

import { toldAdapters } from "./adapters.js";
import { listenToDialogs, openHelp, openKey } from "./dialogs.js";
import { Editor } from "./editor.js";
import { attempt, listenToFailures } from "./failures.js";
import { FleetPanel } from "./fleet.js";
import { listenToKeys } from "./keyboard.js";
import { announce, at, showError } from "./page.js";
import { decode, listenForPictures, pixels, sample, showSamples } from "./picture.js";
import { listenToPointers } from "./pointer.js";
import { finishedPicture, Results } from "./result.js";
import * as job from "./job.js";
import { Run, showEnd } from "./run.js";
import { forget, recall, remember } from "./saved.js";
import * as settings from "./settings.js";
import { Stage } from "./stage.js";
import { setTask, task } from "./task.js";
import { listenToToolbar } from "./toolbar.js";
import { listenToWords } from "./words.js";

const canvas = at("stage");
const stage = new Stage(canvas);
const editor = new Editor(stage);
const results = new Results(showResult);
const fleet = new FleetPanel({ refused: openKey, modelsChanged: () => attempt(settings.loadModels, "edit-error") });
let picture = null; // what is edited
let run = null;

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
  const ratio = editor.mask?.ratio() ?? 0;
  const masked = ratio ? `${(100 * ratio).toFixed(ratio < 0.1 ? 1 : 0)} % of the picture is masked.` : "Nothing is masked yet.";
  const text = { mask: picture ? masked : "", run: stage.whole ? "The picture is being made." : "The mask is being repainted.", result: results.current?.before.blob ? "The result; arrow keys move the line between before and after." : "The result." }[stage.showing];
  at("stage-note").textContent = text;
  canvas.setAttribute("aria-label", picture ? `${picture.name}, ${picture.width} by ${picture.height} pixels. ${text}` : "Picture. No picture yet.");
}

function showResult() {
  view("result");
}

function start() {
  if (run !== null) return;
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
  if (picture === null) {
    showError(at("edit-error"), { message: "Choose a picture first." });
    at("choose").focus();
    return;
  }
  if (editor.mask.bounds() === null) {
    showError(at("edit-error"), { message: "Paint over what is to change first." });
    view("mask");
    canvas.focus();
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
  stage.whole = blank !== null;
  const status = await attempt(() => {
    view("run");
    return begin(running);
  }, "edit-error").finally(leaveRun);
  if (status === undefined) return; // told already
  if (edit.shown < 0) {
    showEnd(status);
    await forget();
    return;
  }
  announce("Finished");
  if (stage.showing === "mask") at("stage-note").textContent = "Finished. The edit is under “This visit”.";
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
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type }));
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
    const told = { adapters: await toldAdapters(status, picture) };
    edit.pictures[index] = blob ? Object.assign(await finishedPicture(edit, blob, seed), told) : { error: job.errorOf(status, index) };
  }
  edit.shown = edit.pictures.findIndex((one) => one.url);
  if (edit.shown < 0) return;
  results.add(edit);
  if (watched()) await results.select(edit, edit.shown, watched);
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

/** Applies a change of the mask and shows the mask; changes nothing while a run is shown. */
function drawn(change) {
  if (watched()) return;
  change();
  if (stage.showing === "result" && picture) view("mask");
}

const commands = {
  edit: () => start(),
  choose: listenForPictures((blob, name) => attempt(async () => openPicture(await decode(blob, name)), "picture-error")),
  help: openHelp,
  invert: () => drawn(() => editor.invert()),
  clear: () => drawn(() => editor.clear()),
  undo: () => drawn(() => editor.undo()),
  redo: () => drawn(() => editor.redo()),
  toggleView: () => {
    if (results.current && picture && !run) view(stage.showing === "result" ? "mask" : "result");
  },
  compareBy: (difference) => results.compareTo(stage.compare + difference),
};

async function connect() {
  fleet.watch();
  await attempt(settings.loadModels, "edit-error");
}

listenToFailures("edit-error");
settings.listenToSettings();
listenToToolbar(stage, editor, commands);
listenToPointers(canvas, stage, editor, (share) => results.compareTo(share));
listenToKeys(at("workspace"), canvas, stage, editor, commands);
listenToDialogs(connect);
listenToWords(() => picture, (rgba) => drawn(() => editor.take(rgba)));
editor.addEventListener("change", describe);
editor.addEventListener("tool", () => {
  if (stage.showing === "result" && picture && editor.tool !== "hand") view("mask"); // a person with a brush wants to paint
});
at("edit").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
at("cancel").addEventListener("click", () => run?.cancel());
at("use-result").addEventListener("click", () => attempt(useResult, "picture-error"));
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
await attempt(resume, "edit-error");
document.documentElement.dataset.ready = "true";
