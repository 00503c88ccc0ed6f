// What is kept in the browser (IndexedDB). Of an edit under way, what a reload of the page needs to find it again: the picture
// and the mask, for a day, under the job's id, which is kept in the tab (sessionStorage). Of finished edits, the latest.

const TAB = "giornata-job";
const DAY_MS = 24 * 3600 * 1000;
export const KEPT = 12; // finished edits
const KEPT_BYTES = 256e6; // of their pictures
const KEPT_MS = 30 * DAY_MS;

export async function remember(jobId, edit) {
  await forget();
  sessionStorage.setItem(TAB, jobId);
  await act("readwrite", (store) => store.put({ ...edit, savedMs: Date.now() }, jobId));
}

/** {jobId, image, mask, name, margin, prompt} of this tab's last edit, or null. */
export async function recall() {
  const jobId = sessionStorage.getItem(TAB);
  const edit = await act("readwrite", (store) => {
    purge(store);
    return jobId && store.get(jobId);
  });
  return edit && !old(edit) ? { ...edit, jobId } : null;
}

export async function forget() {
  const jobId = sessionStorage.getItem(TAB);
  sessionStorage.removeItem(TAB);
  await act("readwrite", (store) => {
    if (jobId) store.delete(jobId);
    purge(store);
    return null;
  });
}

/** Keeps a finished edit, as in result.js, in the place of a former one with its id; what is beyond the limits is deleted. */
export function keep({ id, before, prompt, bounds, pictures, shown, savedMs }) {
  const files = pictures.map(({ url, thumb, error, ...file }) => ({ ...file, error: error && { code: error.code, message: error.message } }));
  return act(
    "readwrite",
    (store) => {
      store.put({ id, before, prompt, bounds, pictures: files, shown, savedMs });
      limit(store);
      return null;
    },
    "finished",
  );
}

/** The finished edits that are kept, the latest first. */
export async function kept() {
  const all = await act("readwrite", (store) => limit(store), "finished");
  return latest(all ?? []).filter(within);
}

export async function forgetFinished() {
  await act("readwrite", (store) => store.clear(), "finished");
}

const latest = (all) => all.sort((a, b) => b.savedMs - a.savedMs);

/** Whether an edit is within the limits, in a list with the latest first. */
function within({ savedMs }, place, all) {
  const weight = ({ before, pictures }) => [before, ...pictures].reduce((sum, { blob }) => sum + (blob?.size ?? 0), 0);
  const bytes = all.slice(0, place + 1).reduce((sum, edit) => sum + weight(edit), 0);
  return place < KEPT && (place === 0 || bytes <= KEPT_BYTES) && Date.now() - savedMs <= KEPT_MS;
}

function limit(store) {
  const all = store.getAll();
  all.onsuccess = () => {
    for (const { id } of latest([...all.result]).filter((...one) => !within(...one))) store.delete(id);
  };
  return all;
}

function old(edit) {
  return Date.now() - edit.savedMs > DAY_MS;
}

function purge(store) {
  const cursor = store.openCursor();
  cursor.onsuccess = () => {
    if (cursor.result === null) return;
    if (old(cursor.result.value)) cursor.result.delete();
    cursor.result.continue();
  };
}

/** One transaction. Where the browser keeps nothing (a private window), there is nothing to find again. */
function act(mode, work, name = "edits") {
  return new Promise((resolve) => {
    const opening = indexedDB.open("giornata", 2);
    opening.onupgradeneeded = ({ oldVersion }) => {
      if (oldVersion < 1) opening.result.createObjectStore("edits");
      opening.result.createObjectStore("finished", { keyPath: "id" });
    };
    opening.onerror = () => resolve(null);
    opening.onsuccess = () => {
      const transaction = opening.result.transaction(name, mode);
      const request = work(transaction.objectStore(name));
      const finish = (value) => {
        opening.result.close();
        resolve(value);
      };
      transaction.oncomplete = () => finish(request?.result ?? null);
      transaction.onabort = () => finish(null);
    };
  });
}
