// What is drawn over a picture, in pixels of the screen times `ratio`, its device pixels per CSS pixel.

/** The handle of the line between before and after. */
export function drawHandle(context, x, y, ratio) {
  context.beginPath();
  context.arc(x, y, 14 * ratio, 0, 2 * Math.PI);
  context.shadowColor = "rgb(20 15 10 / 0.4)";
  context.shadowBlur = 6 * ratio;
  context.fill();
  context.shadowBlur = 0;
  context.strokeStyle = "#27479c";
  context.lineWidth = 1.75 * ratio;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  for (const side of [-1, 1]) {
    context.moveTo(x + side * 4 * ratio, y - 4 * ratio);
    context.lineTo(x + side * 8 * ratio, y);
    context.lineTo(x + side * 4 * ratio, y + 4 * ratio);
  }
  context.stroke();
}

/** Diagonal lines, so that the mask is seen on any colour. */
export function hatching(context, size) {
  const tile = document.createElement("canvas");
  Object.assign(tile, { width: size, height: size });
  const on = tile.getContext("2d");
  on.strokeStyle = "rgb(255 255 255 / 0.5)";
  on.lineWidth = size / 6;
  on.beginPath();
  for (const shift of [-size, 0, size]) {
    on.moveTo(shift - 1, size + 1);
    on.lineTo(shift + size + 1, -1);
  }
  on.stroke();
  return context.createPattern(tile, "repeat");
}
