// A canvas that is as sharp as the screen and as wide as its place.

export class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
  }

  /** Ready to draw on, in CSS pixels; false while it has no place. */
  begin(height = null) {
    if (height !== null && this.canvas.style.height !== `${height}px`) this.canvas.style.height = `${height}px`;
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth || !clientHeight) return false;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const [width, rows] = [Math.round(clientWidth * ratio), Math.round(clientHeight * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== rows) {
      this.canvas.width = width;
      this.canvas.height = rows;
    }
    this.width = clientWidth;
    this.height = clientHeight;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, clientWidth, clientHeight);
    return true;
  }

  bar(x, y, width, height, radius = 0) {
    this.context.beginPath();
    this.context.roundRect(x, y, Math.max(width, 1), height, Math.min(radius, height / 2, Math.max(width, 1) / 2));
  }

  /** How wide `words` are in that style. */
  measure(words, { size = 11, weight = 400 } = {}) {
    this.context.font = `${weight} ${size}px system-ui, sans-serif`;
    return this.context.measureText(words).width;
  }

  text(words, x, y, fill, { align = "left", size = 11, weight = 400 } = {}) {
    const { context } = this;
    context.font = `${weight} ${size}px system-ui, sans-serif`;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillStyle = fill;
    context.fillText(words, x, y);
  }
}

/** Diagonal lines over a colour, so that prompts are told from decodes without colours, too. */
export function hatch(context, ground, line) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 12;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 12, 12);
  brush.strokeStyle = line;
  brush.lineWidth = 1.6;
  brush.globalAlpha = 0.75;
  for (const x of [-6, 0, 6, 12]) {
    brush.moveTo(x, 13);
    brush.lineTo(x + 7, -1);
  }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}
