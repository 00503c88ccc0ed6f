// What the studio's modules without a DOM promise; each test throws where a promise is broken. Run by test_modules.

import { EventParser } from "/studio/js/sse.js";
import { History } from "/studio/js/history.js";
import { MAX_PIXELS, Mask, union } from "/studio/js/mask.js";
import { toldPrompts } from "/studio/js/prompts.js";
import { keep, kept, recall, remember } from "/studio/js/saved.js";
import * as viewport from "/studio/js/viewport.js";

function equal(got, wanted) {
  const [a, b] = [JSON.stringify(got), JSON.stringify(wanted)];
  if (a !== b) throw new Error(`got ${a}, wanted ${b}`);
}

function near(got, wanted) {
  if (!(Math.abs(got - wanted) < 1e-9)) throw new Error(`got ${got}, wanted ${wanted}`);
}

function throws(work) {
  try {
    work();
  } catch (error) {
    return error;
  }
  throw new Error("did not throw");
}

const rows = (mask) => Array.from({ length: mask.height }, (_, y) => mask.data.subarray(y * mask.width, (y + 1) * mask.width).join(""));

/** Numbers that are the same in every run. */
function* numbers(seed) {
  for (let state = seed; ; ) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    yield state / 2 ** 32;
  }
}

export const tests = {
  "a dab is round and around its point"() {
    const mask = new Mask(5, 5);
    equal(mask.stroke({ x: 2.5, y: 2.5 }, { x: 2.5, y: 2.5 }, 1.5, 1), { left: 1, top: 1, right: 4, bottom: 4 });
    equal(rows(mask), ["00000", "01110", "01110", "01110", "00000"]);
    mask.clear();
    mask.stroke({ x: 2.5, y: 2.5 }, { x: 2.5, y: 2.5 }, 1.1, 1);
    equal(rows(mask), ["00000", "00100", "01110", "00100", "00000"]);
  },
  "the thinnest brush paints the pixel under it"() {
    const mask = new Mask(3, 3);
    mask.stroke({ x: 1.2, y: 1.9 }, { x: 1.2, y: 1.9 }, 0.5, 1);
    equal(mask.data[4], 1);
  },
  "a stroke has no gaps and is every pixel near its line"() {
    const random = numbers(7);
    const draw = (limit) => random.next().value * limit;
    for (let round = 0; round < 10; round++) {
      const mask = new Mask(24, 17);
      const [a, b, radius] = [{ x: draw(30) - 3, y: draw(22) - 3 }, { x: draw(30) - 3, y: draw(22) - 3 }, 1 + draw(4)];
      mask.stroke(a, b, radius, 1);
      for (let y = 0; y < 17; y++) {
        for (let x = 0; x < 24; x++) {
          let nearest = Infinity;
          for (let t = 0; t <= 2000; t++) {
            const [lx, ly] = [a.x + ((b.x - a.x) * t) / 2000, a.y + ((b.y - a.y) * t) / 2000];
            nearest = Math.min(nearest, Math.hypot(x + 0.5 - lx, y + 0.5 - ly));
          }
          if (Math.abs(nearest - radius) > 0.02) equal(mask.data[y * 24 + x], nearest < radius ? 1 : 0);
        }
      }
    }
  },
  "outside of the picture nothing is painted and nothing breaks"() {
    const mask = new Mask(4, 4);
    equal(mask.stroke({ x: -20, y: -20 }, { x: -9, y: -9 }, 3, 1), null);
    equal(mask.rectangle({ x: 9, y: 9 }, { x: 12, y: 12 }, 1), null);
    equal(mask.ratio(), 0);
    mask.rectangle({ x: -5, y: 2 }, { x: 2, y: 99 }, 1);
    equal(rows(mask), ["0000", "0000", "1100", "1100"]);
  },
  "an outline is filled by the centres that lie inside"() {
    const mask = new Mask(6, 5);
    equal(mask.polygon([{ x: 1, y: 1 }, { x: 5, y: 1 }, { x: 5, y: 4 }, { x: 1, y: 4 }], 1), { left: 1, top: 1, right: 5, bottom: 4 });
    equal(rows(mask), ["000000", "011110", "011110", "011110", "000000"]);
    mask.polygon([{ x: 2.4, y: -3 }, { x: 3.4, y: -3 }, { x: 3.4, y: 9 }, { x: 2.4, y: 9 }], 0);
    equal(rows(mask), ["000000", "010110", "010110", "010110", "000000"]);
    equal(mask.polygon([{ x: 7, y: 7 }, { x: 9, y: 7 }, { x: 8, y: 9 }], 1), null);
    mask.clear();
    mask.polygon([{ x: -2, y: 0 }, { x: 8, y: 0 }, { x: -2, y: 10 }], 1);
    equal(rows(mask), ["111111", "111111", "111110", "111100", "111000"]);
  },
  "a mask picture marks what is transparent in it, or else what is bright"() {
    const mask = new Mask(4, 1);
    mask.read([255, 255, 255, 255, 0, 0, 0, 255, 0, 255, 0, 255, 0, 0, 255, 255]);
    equal(rows(mask), ["1010"]);
    mask.read([255, 255, 255, 255, 0, 0, 0, 127, 0, 0, 0, 128, 0, 0, 0, 0]);
    equal(rows(mask), ["0101"]);
    mask.read([255, 255, 255, 254, 0, 0, 0, 128, 0, 255, 0, 200, 0, 0, 0, 254]); // nothing is as good as transparent
    equal(rows(mask), ["1010"]);
    mask.read([255, 255, 255, 255, 0, 0, 0, 127, 0, 0, 0, 128, 0, 0, 0, 0]);
    mask.merge([255, 255, 255, 255, 0, 0, 0, 255, 255, 255, 255, 255, 0, 0, 0, 255], 1);
    equal(rows(mask), ["1111"]);
    mask.merge([255, 255, 255, 255, 0, 0, 0, 255, 255, 255, 255, 255, 0, 0, 0, 255], 0);
    equal(rows(mask), ["0101"]);
  },
  "a job tells of prompts that were not read to their end"() {
    const usage = (prompt, negative) => ({ usage: { input_tokens_details: { prompt_tokens: prompt, negative_prompt_tokens: negative } } });
    equal(toldPrompts({ usage: null }), "");
    equal(toldPrompts(usage(null, null)), "");
    equal(toldPrompts(usage({ given: 9, read: 9 }, { given: 3, read: 3 })), "");
    equal(toldPrompts(usage({ given: 300, read: 255 }, null)), "the first 255 of the prompt's 300 tokens were read");
    const both = "the first 7 of the prompt's 8 tokens were read; the first 5 of the negative prompt's 6 tokens were read";
    equal(toldPrompts(usage({ given: 8, read: 7 }, { given: 6, read: 5 })), both);
  },
  "a rectangle takes its corners in any order"() {
    const [one, other] = [new Mask(6, 6), new Mask(6, 6)];
    one.rectangle({ x: 1.2, y: 4.8 }, { x: 3.5, y: 2.1 }, 1);
    other.rectangle({ x: 3.5, y: 2.1 }, { x: 1.2, y: 4.8 }, 1);
    equal(rows(one), rows(other));
    equal(one.bounds(), { left: 1, top: 2, right: 4, bottom: 5 });
  },
  "erase takes away what paint put there"() {
    const mask = new Mask(9, 9);
    mask.rectangle({ x: 0, y: 0 }, { x: 9, y: 9 }, 1);
    mask.stroke({ x: 4.5, y: 4.5 }, { x: 4.5, y: 4.5 }, 2, 0);
    equal(mask.data[4 * 9 + 4], 0);
    equal(mask.data[0], 1);
  },
  "inverting twice changes nothing, and ratio and bounds follow"() {
    const mask = new Mask(4, 5);
    equal([mask.ratio(), mask.bounds()], [0, null]);
    mask.rectangle({ x: 0, y: 0 }, { x: 2, y: 5 }, 1);
    const before = rows(mask);
    mask.invert();
    equal([mask.ratio(), mask.bounds()], [0.5, { left: 2, top: 0, right: 4, bottom: 5 }]);
    mask.invert();
    equal(rows(mask), before);
  },
  "pixels go out as RGBA and come back by brightness"() {
    const mask = new Mask(3, 2);
    mask.rectangle({ x: 1, y: 0 }, { x: 2, y: 2 }, 1);
    const pixels = mask.rgba(mask.frame(), [255, 255, 255, 255], [0, 0, 0, 255]);
    equal([...pixels.subarray(0, 8)], [0, 0, 0, 255, 255, 255, 255, 255]);
    const copy = new Mask(3, 2);
    copy.read(pixels);
    equal(rows(copy), rows(mask));
  },
  "a mask of no size, or of too large a one, is refused"() {
    for (const [width, height] of [[0, 4], [4, -1], [1.5, 2], [MAX_PIXELS, 2]]) throws(() => new Mask(width, height));
  },
  "the union of rectangles holds both"() {
    const [a, b] = [{ left: 1, top: 2, right: 3, bottom: 4 }, { left: 0, top: 3, right: 2, bottom: 9 }];
    equal(union(a, b), { left: 0, top: 2, right: 3, bottom: 9 });
    equal([union(null, b), union(a, null), union(null, null)], [b, a, null]);
  },

  "undo and redo walk through every state, whatever was drawn"() {
    const random = numbers(11);
    const draw = (limit) => random.next().value * limit;
    const [mask, history] = [new Mask(20, 14), new History()];
    const states = [rows(mask).join()];
    for (let i = 0; i < 30; i++) {
      const changes = [
        (on) => on.stroke({ x: draw(20), y: draw(14) }, { x: draw(20), y: draw(14) }, draw(4), i % 3 ? 1 : 0),
        (on) => on.rectangle({ x: draw(20), y: draw(14) }, { x: draw(20), y: draw(14) }, i % 2),
        (on) => on.invert(),
      ];
      if (history.apply(mask, changes[i % 3])) states.push(rows(mask).join());
    }
    for (const state of states.slice(0, -1).reverse()) {
      history.undo(mask);
      equal(rows(mask).join(), state);
    }
    equal([history.canUndo, history.undo(mask)], [false, null]);
    for (const state of states.slice(1)) {
      history.redo(mask);
      equal(rows(mask).join(), state);
    }
    equal([history.canRedo, history.redo(mask)], [false, null]);
  },
  "a change that changes nothing is not remembered, and a new one ends redo"() {
    const [mask, history] = [new Mask(4, 4), new History()];
    equal(history.apply(mask, (on) => on.clear()), null);
    equal(history.canUndo, false);
    history.apply(mask, (on) => on.invert());
    history.undo(mask);
    equal(history.canRedo, true);
    history.apply(mask, (on) => on.rectangle({ x: 0, y: 0 }, { x: 1, y: 1 }, 1));
    equal(history.canRedo, false);
  },
  "a stroke that is given up leaves no trace"() {
    const [mask, history] = [new Mask(6, 6), new History()];
    const stroke = history.begin(mask);
    stroke.cancel(mask.stroke({ x: 1, y: 1 }, { x: 5, y: 5 }, 2, 1));
    equal([mask.ratio(), history.canUndo], [0, false]);
  },
  "what is remembered stays within its bytes"() {
    const [mask, history] = [new Mask(10, 10), new History(500)];
    for (let i = 0; i < 9; i++) history.apply(mask, (on) => on.invert());
    let undone = 0;
    while (history.undo(mask)) undone++;
    equal(undone, 2);
  },

  "fit shows the whole picture in the middle"() {
    const view = viewport.fit({ width: 200, height: 100 }, { width: 432, height: 632 });
    equal(view, { scale: 2, x: 16, y: 216 });
    equal(viewport.fit({ width: 10, height: 10 }, { width: 500, height: 500 }).scale, 4);
  },
  "zooming keeps the point under the pointer, within its limits"() {
    const [picture, screen] = [{ width: 300, height: 200 }, { width: 400, height: 400 }];
    let view = viewport.fit(picture, screen);
    const point = { x: 123, y: 201 };
    const before = viewport.toPicture(view, point);
    view = viewport.zoomed(view, picture, screen, 3, point);
    const after = viewport.toPicture(view, point);
    near(after.x, before.x);
    near(after.y, before.y);
    equal(viewport.zoomed(view, picture, screen, 1e9, point).scale, viewport.MAX_SCALE);
    if (viewport.zoomed(view, picture, screen, 1e-9, point).scale <= 0) throw new Error("scale is not positive");
  },
  "to the picture and back is where it began"() {
    const view = { scale: 2.5, x: -13, y: 40 };
    const point = viewport.toScreen(view, viewport.toPicture(view, { x: 77, y: 5 }));
    near(point.x, 77);
    near(point.y, 5);
  },
  "the picture cannot be moved out of sight"() {
    const [picture, screen] = [{ width: 100, height: 100 }, { width: 400, height: 300 }];
    for (const [dx, dy] of [[1e6, 1e6], [-1e6, -1e6]]) {
      const { scale, x, y } = viewport.moved({ scale: 2, x: 0, y: 0 }, picture, screen, dx, dy);
      if (!(x < 400 && y < 300 && x + 100 * scale > 0 && y + 100 * scale > 0)) throw new Error(`gone: ${x}, ${y}`);
    }
  },
  "a point out of sight is brought into it, one in sight moves nothing"() {
    const [picture, screen] = [{ width: 1000, height: 1000 }, { width: 300, height: 300 }];
    const view = { scale: 1, x: 0, y: 0 };
    equal(viewport.showing(view, picture, screen, { x: 100, y: 100 }), view);
    const { x, y } = viewport.toScreen(viewport.showing(view, picture, screen, { x: 900, y: 100 }), { x: 900, y: 100 });
    if (!(x > 0 && x < 300 && y > 0 && y < 300)) throw new Error(`not seen: ${x}, ${y}`);
  },

  "events are the same however the text is cut"() {
    const text = ': hello\n\nid: 7\nevent: a\ndata: {"x":1}\n\ndata: one\r\ndata:two\r\n\r\nid: 9\nevent: none\n\ndata\n\n';
    const wanted = [
      { type: "a", data: '{"x":1}', id: "7" },
      { type: "message", data: "one\ntwo", id: "7" },
      { type: "message", data: "", id: "9" },
    ];
    for (let size = 1; size <= text.length; size++) {
      const parser = new EventParser();
      const events = [];
      for (let start = 0; start < text.length; start += size) events.push(...parser.push(text.slice(start, start + size)));
      equal(events, wanted);
      equal(parser.lastId, "9");
    }
  },
  "an event that is not finished is not told"() {
    const parser = new EventParser();
    equal(parser.push("data: half\n"), []);
    equal(parser.push("\n").length, 1);
  },

  async "the latest edits are kept, as many and as large as there is room for"() {
    const edit = (id, bytes, days = 0) => ({
      id, prompt: id, bounds: null, shown: 0, savedMs: Date.now() - days * 86400e3 + Number(id.slice(1)),
      before: { blob: null }, pictures: [{ seed: 1, blob: new Blob([new Uint8Array(bytes)]) }],
    });
    const ids = async () => (await kept()).map(({ id }) => id);
    for (let i = 10; i < 24; i++) await keep(edit(`e${i}`, 1000));
    const many = await ids();
    equal(many, [23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12].map((i) => `e${i}`));
    await keep(edit("e50", 200e6));
    equal(await ids(), ["e50", ...many.slice(0, 11)]);
    await keep(edit("e60", 100e6)); // together they are more than is kept
    await keep(edit("e09", 10, 31));
    equal(await ids(), ["e60"]);
  },
  async "an edit under way that is older than a day is found no more, and is deleted"() {
    const now = Date.now;
    const after = async (hours) => {
      Date.now = () => now() + hours * 3600e3;
      return (await recall())?.prompt ?? null;
    };
    await remember("job-1", { prompt: "a red star" });
    equal([await after(23), await after(25), await after(0)], ["a red star", null, null]);
    Date.now = now;
  },
};
