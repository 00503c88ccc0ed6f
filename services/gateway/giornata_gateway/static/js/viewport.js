// Where the picture lies on the screen: scale and offset, in CSS pixels. A value; every function returns a new one.

export const MAX_SCALE = 32;
const MARGIN = 16;
const KEPT = 48; // so much of the picture stays in sight

/** The whole picture, centred; small pictures are enlarged, but not beyond four times. */
export function fit(picture, screen) {
  const scale = Math.min(
    4,
    Math.max(1, screen.width - 2 * MARGIN) / picture.width,
    Math.max(1, screen.height - 2 * MARGIN) / picture.height,
  );
  return centred(picture, screen, scale);
}

/** `view` scaled by `factor` around a point of the screen, which stays where it is. */
export function zoomed(view, picture, screen, factor, point) {
  const smallest = Math.min(1, fit(picture, screen).scale) / 2;
  const scale = Math.min(MAX_SCALE, Math.max(smallest, view.scale * factor));
  const at = toPicture(view, point);
  return kept({ scale, x: point.x - at.x * scale, y: point.y - at.y * scale }, picture, screen);
}

/** `view` moved by some CSS pixels. */
export function moved(view, picture, screen, dx, dy) {
  return kept({ scale: view.scale, x: view.x + dx, y: view.y + dy }, picture, screen);
}

/** `view` moved no more than needed for a point of the picture to be in sight. */
export function showing(view, picture, screen, point) {
  const at = toScreen(view, point);
  const dx = Math.max(MARGIN - at.x, 0) + Math.min(screen.width - MARGIN - at.x, 0);
  const dy = Math.max(MARGIN - at.y, 0) + Math.min(screen.height - MARGIN - at.y, 0);
  return moved(view, picture, screen, dx, dy);
}

export function toPicture(view, point) {
  return { x: (point.x - view.x) / view.scale, y: (point.y - view.y) / view.scale };
}

export function toScreen(view, point) {
  return { x: point.x * view.scale + view.x, y: point.y * view.scale + view.y };
}

function centred(picture, screen, scale) {
  return {
    scale,
    x: (screen.width - picture.width * scale) / 2,
    y: (screen.height - picture.height * scale) / 2,
  };
}

function kept(view, picture, screen) {
  const [width, height] = [picture.width * view.scale, picture.height * view.scale];
  const within = (value, low, high) => Math.min(Math.max(value, low), Math.max(low, high));
  return {
    scale: view.scale,
    x: within(view.x, KEPT - width, screen.width - KEPT),
    y: within(view.y, KEPT - height, screen.height - KEPT),
  };
}
