// The studio: puts the parts together. Each part is a module of its own; this one says what follows from what.

import { ApiError } from "./api.js";
import { listenToDialogs, openHelp, openKey } from "./dialogs.js";
import { Editor } from "./editor.js";
import { FleetPanel } from "./fleet.js";
import * as job from "./job.js";
import { listenToKeys } from "./keyboard.js";
import { announce, at, showError } from "./page.js";
import { decode, listenForPictures, pixels, sample, showSamples } from "./picture.js";
import { listenToPointers } from "./pointer.js";
import { finishedPicture, Results } from "./result.js";
import { Run, showEnd } from "./run.js";
import { forget, recall, remember } from "./saved.js";
import * as settings from "./settings.js";
import { Stage } from "./stage.js";
import { listenToToolbar } from "./toolbar.js";

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
  picture = opened;
  at("invitation").hidden = true;
  showError(at("picture-error"), null);
  editor.open(opened.width, opened.height, rgba);
  settings.fitToPicture(opened);
  at("picture-note").textContent = `${opened.width} × ${opened.height}`;
  for (const thumb of at("samples").children) thumb.setAttribute("aria-pressed", String(thumb.dataset.title === opened.name));
  view("mask");
  announce(`${opened.name}, ${opened.width} by ${opened.height} pixels`);
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
  at("view-switch").hidden = results.current === null || picture === null || run !== null;
  for (const button of at("view-switch").children) button.setAttribute("aria-pressed", String((button.dataset.view === "result") === result));
  if (result) stage.after = results.picture.bitmap;
  const base = result ? results.current.before : picture;
  if (base) stage.show(base);
  describe();
}

function describe() {
  const ratio = editor.mask?.ratio() ?? 0;
  const masked = ratio ? `${(100 * ratio).toFixed(ratio < 0.1 ? 1 : 0)} % of the picture is masked.` : "Nothing is masked yet.";
  const text = { mask: picture ? masked : "", run: "The mask is being repainted.", result: "The result; arrow keys move the line between before and after." }[stage.showing];
  at("stage-note").textContent = text;
  canvas.setAttribute("aria-label", picture ? `${picture.name}, ${picture.width} by ${picture.height} pixels. ${text}` : "Picture. No picture yet.");
}

function showResult() {
  view("result");
}

/** Does something that may fail with an ApiError, which is shown in words. */
async function attempt(work, place) {
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) openKey(error);
    if (settings.blame(error)) announce(`${error.message} ${error.code}`);
    else showError(["image", "mask"].includes(error.param) ? at("picture-error") : at(place), error);
    return undefined;
  }
}

async function startEdit() {
  if (run !== null) return;
  showError(at("edit-error"), null);
  showError(at("picture-error"), null);
  settings.clearBlame();
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
  const [before, mask] = [picture, await editor.png()];
  await carry(before, fields.prompt, (running) =>
    running.start(before.blob, mask, fields, (jobId) =>
      remember(jobId, { image: before.blob, mask, name: before.name, margin: before.margin, prompt: fields.prompt }),
    ),
  );
}

/** Shows a run from its start to its end; `begin` starts or resumes it and returns the job's status. */
async function carry(before, prompt, begin) {
  const edit = { before, prompt, bounds: editor.mask.bounds(), pictures: [], shown: 0 };
  run = new Run(() => fleet.expectedWaitS, (data) => showPreview(data));
  stage.preview = null;
  view("run");
  const status = await attempt(async () => {
    const ended = await begin(run);
    if (ended?.state === "completed") await collect(edit, ended);
    return ended;
  }, "edit-error");
  run = null;
  stage.preview = null;
  if (edit.pictures.some((one) => one.bitmap)) {
    results.add(edit);
    announce("Finished");
    return;
  }
  view("mask");
  if (status === undefined) return; // told already
  showEnd(status);
  await forget();
}

/** The latest preview of the first picture, drawn through the mask. */
async function showPreview({ b64_json: text, media_type: type, index, partial_image_index: number, box }) {
  if (index !== 0 || number < (stage.preview?.number ?? 0)) return;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type }));
  if (stage.showing !== "run") return;
  stage.preview = { bitmap, box, number };
  canvas.dataset.previews = String(number + 1);
  stage.refresh();
}

/** Fetches the pictures of a job that is completed; those that failed have their error instead. */
async function collect(edit, status) {
  for (const { index, seed } of status.pictures) {
    const error = job.errorOf(status, index);
    edit.pictures[index] = error ? { error } : await finishedPicture(edit, await job.picture(status.id, index), seed);
  }
  edit.shown = Math.max(0, edit.pictures.findIndex((one) => one.bitmap));
}

/** After a reload: the picture, the mask and the edit that was under way or done. */
async function resume() {
  const saved = await recall();
  if (saved === null) return;
  const before = { ...(await decode(saved.image, saved.name)), margin: saved.margin };
  openPicture(before, await pixels(saved.mask, before.width, before.height));
  settings.setPrompt(saved.prompt);
  await carry(before, saved.prompt, async (running) => {
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

/** A change of the mask is seen: not while the result hides it, nor under a run that has begun. */
function drawn(change) {
  if (run !== null) return;
  change();
  if (stage.showing === "result" && picture) view("mask");
}

const commands = {
  edit: () => startEdit(),
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

settings.listenToSettings();
listenToToolbar(stage, editor, commands);
listenToPointers(canvas, stage, editor, (share) => results.compareTo(share));
listenToKeys(at("workspace"), canvas, stage, editor, commands);
listenToDialogs(connect);
editor.addEventListener("change", describe);
editor.addEventListener("tool", () => {
  if (stage.showing === "result" && editor.tool !== "hand") view("mask"); // who takes a brush wants to paint
});
at("edit").addEventListener("submit", (event) => {
  event.preventDefault();
  startEdit();
});
at("cancel").addEventListener("click", () => run?.cancel());
at("use-result").addEventListener("click", useResult);
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
