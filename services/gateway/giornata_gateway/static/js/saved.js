// What a reload of the page needs to find its edit again: the picture and the mask, kept in the browser (IndexedDB) under
// the job's id, which is kept in the tab (sessionStorage). What is older than a day is deleted.

const TAB = "giornata-job";
const DAY_MS = 24 * 3600 * 1000;

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
function act(mode, work) {
  return new Promise((resolve) => {
    const opening = indexedDB.open("giornata", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("edits");
    opening.onerror = () => resolve(null);
    opening.onsuccess = () => {
      const transaction = opening.result.transaction("edits", mode);
      const request = work(transaction.objectStore("edits"));
      const finish = (value) => {
        opening.result.close();
        resolve(value);
      };
      transaction.oncomplete = () => finish(request?.result ?? null);
      transaction.onabort = () => finish(null);
    };
  });
}
